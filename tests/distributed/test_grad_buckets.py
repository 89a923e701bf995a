"""Sums over `data` that travel while backward runs: when they leave, what they change, and what they cost."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, ExecutionPolicy, Linear3D, MixedPrecisionPolicy, local
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.distributed import grad_buckets
from tensor3d.distributed.comm_stats import Place, bucket_elements
from tensor3d.optim import AdamW
from tensor3d.torch_private import storage_id
from tests.dtensors import begin_adam
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, make_twins, ranks_of
from tests.small_buckets import small_buckets
from tests.tied_weight_model import Fail, Trial, truth
from tools.training.dry_step import LiveBytes

Shape = tuple[int, int, int, int]
HIDDEN = 8
DATA: Shape = (1, 1, 1, 2)


class Branches(nn.Module):
    """Pairs of products, one after another in an order that is given anew for each pass."""

    def __init__(self, cube: Cube, hidden: int = HIDDEN, pairs: int = 3) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(Linear3D(hidden, hidden, cube, std=0.3), Linear3D(hidden, hidden, cube, "y", std=0.3))
            for _ in range(pairs)
        )

    def forward(self, x: Tensor, order: str = "012", fail: int | None = None, reentrant: bool = False) -> Tensor:
        for place, name in enumerate(order):
            pair = self.pairs[int(name)]
            x = Fail.apply(x) if place == fail else x
            x = checkpoint(pair, x, use_reentrant=True) if reentrant else pair(x)
        return x.cos().sum()


def inputs(cube: Cube, step: int) -> Tensor:
    """Of all data ranks: (data, rows, HIDDEN)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(cube.shape.data, 4, HIDDEN, generator=generator)


def gradient_error(model: nn.Module, twin: nn.Module) -> float:
    """The worst; both are cleared."""
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    worst = max(error(full(ours.grad), full(theirs.grad)) for ours, theirs in pairs)
    model.zero_grad(), twin.zero_grad()
    return worst


# --- when they leave ----------------------------------------------------------------------------------------------


class Events:
    """What happens in a pass, in its order: "gradient" where one is handed in, "sum" where a bucket leaves."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def issued(self, place: Place) -> None:
        self.seen += ["sum"] if place[1:] == ("data", "all-reduce") else []

    def waits(self, place: Place) -> None:
        pass

    has = waits


@contextmanager
def noted(cube: Cube, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    events, hand_in = Events(), cube.ledger.accumulate_grad

    def noting(*arguments: Any) -> None:
        events.seen.append("gradient")
        hand_in(*arguments)

    cube.traffic.observer = events
    with monkeypatch.context() as patched:
        patched.setattr(cube.ledger, "accumulate_grad", noting)
        yield events.seen
    cube.traffic.observer = None


@small_buckets()
def _left() -> list[list[str]]:
    cube = Cube(*DATA)
    cube.manual_seed(0)
    model, found = Branches(cube), []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, noted(cube, patch) as seen:
            model(inputs(cube, 0)[cube.rank]).backward()
        found.append(seen)
    return found


def test_the_first_bucket_leaves_before_the_last_gradient_is_there() -> None:
    for first, second in run_ranks(2, _left):
        assert first.count("gradient") == second.count("gradient") == 12
        # 6 * (64 + 8) elements in buckets of 16; the two numbers that are compared travel over data, too.
        assert first.count("sum") == second.count("sum") == 27 + 1
        assert first.index("sum") > 11, "no order is known yet"
        # The first to come are a bias and a weight of 8 + 64 elements; they leave at once, before the other ten.
        assert second.index("sum") < 3
        assert second.count("sum") - second[: len(second) - second[::-1].index("gradient")].count("sum") <= 5


# --- what they change ---------------------------------------------------------------------------------------------


@small_buckets()
def _parity(shape: Shape) -> float:
    """Steps with a tied weight, a parameter that some leave out, accumulation and a type that changes nothing."""
    trial = Trial(shape)
    worst = [0.0]
    for step in range(3):
        trial.model(step).backward()
        worst.append(trial.error(step))
    for head in (False, False, True):
        trial.model(3, head=head).backward()
        wanted = truth(trial.weights, 3, head=head)
        named = dict(trial.model.named_parameters())
        assert {name for name in named if named[name].grad is None} == (set() if head else {"head.weight", "head.bias"})
        worst += [error(full(p.grad), wanted[name], name) for name, p in named.items() if p.grad is not None]
        trial.model.zero_grad()
    with trial.cube.no_sync():
        trial.model(4).backward()
    trial.model(5).backward()
    worst.append(trial.error(4, 5))
    return max(worst)


@pytest.mark.parametrize("shape", fast_alone(DATA, (1, 2, 1, 2), (2, 1, 2, 2)))
def test_gradients_are_those_of_one_device(shape: Shape) -> None:
    assert max(run_ranks(ranks_of(shape), _parity, shape)) <= 1e-9


@small_buckets()
def _same_bits(dtype: torch.dtype) -> bool:
    """Four ranks, whose sums depend on the order of the ranks; two of them go through the model in another order."""
    torch.set_default_dtype(dtype)
    cube, found = Cube(data=4), []
    for changes in ({}, {"overlap": False}, {"keep_buckets": False}):
        each = cube.with_policy(speed=ExecutionPolicy(**changes))
        each.manual_seed(0)
        model = Branches(each)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step, order in enumerate(("012", "012", "012", "120", "120", "120")):
            with each.no_sync():
                model(inputs(cube, step)[cube.rank]).backward()
            model(inputs(cube, step)[cube.rank], "201" if step == 2 and cube.rank > 1 else order).backward()
            begin_adam(optimizer)
            optimizer.step()
            found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
        found += [local(parameter).detach() for parameter in model.parameters()]
    third = len(found) // 3
    first, *others = (found[place : place + third] for place in range(0, len(found), third))
    return all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_overlap_and_kept_memory_change_no_bit(dtype: torch.dtype) -> None:
    assert all(run_ranks(4, _same_bits, dtype))


@small_buckets()
def _odd_passes() -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube, model, _, twin = make_twins(Branches, DATA)
    found = {}

    def step(number: int, **options: Any) -> float:
        for each in inputs(cube, number):
            twin(each).backward()
        model(inputs(cube, number)[cube.rank].requires_grad_(), **options).backward()
        return gradient_error(model, twin)

    for number in range(2):
        step(number)
    # It fails when one rank has sent the first pair's, and the other one, in another order, nothing.
    with pytest.raises(ArithmeticError):
        model(inputs(cube, 2)[cube.rank], ("012", "201")[cube.rank], fail=1).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    found["after a failed pass"] = step(3)
    found["passes within a pass"] = max(step(number, reentrant=True) for number in (4, 5, 6))
    found["as before"] = max(step(number) for number in (7, 8, 9))
    other = Branches(cube.with_policy(MixedPrecisionPolicy(reduce=torch.float64)))
    for name, parameter in other.named_parameters():
        local(parameter).data.copy_(local(model.get_parameter(name)))
    for number in (10, 11, 12):
        for each in inputs(cube, number):
            (2 * twin(each)).backward()
        own = inputs(cube, number)[cube.rank]
        (model(own) + other(own)).backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            local(ours.grad).add_(local(theirs.grad))  # type: ignore[arg-type]
        other.zero_grad()
        found["two cubes in a pass"] = gradient_error(model, twin)
    return found


def test_passes_that_fail_or_meet_others_are_summed_whole() -> None:
    for errors in run_ranks(2, _odd_passes):
        assert max(errors.values()) <= 1e-9, errors


# --- what they cost -----------------------------------------------------------------------------------------------


@small_buckets()
def _sent() -> list[tuple[int, int, int, int]]:
    cube = Cube(*DATA)
    cube.manual_seed(0)
    model, other, found = Branches(cube), Branches(cube, pairs=1), []
    for order in ("012", "012", "012", "021", "0", "012", ""):
        elements = sum(local(p).numel() for p in model.parameters())
        elements = elements * len(order) // 3 or sum(local(p).numel() for p in other.parameters())
        wire = [CommModel(shape=cube.shape, rank=cube.rank, unit=unit) for unit in ("bytes", "calls")]
        with cube.traffic.counting() as count:
            (model(inputs(cube, 0)[0], order) if order else other(inputs(cube, 0)[0], "0")).backward()
        key = "data", "all-reduce"
        wanted = [each.summed_in_buckets(("data",), elements)[key] for each in wire]
        found.append((count.received[key] - 16, wanted[0], count.calls[key] - 1, wanted[1]))
    return found


def test_bytes_and_collectives_are_those_of_the_closed_form() -> None:
    """In the first pass, in those that send early, in another order, without some parameters, of another model."""
    for passes in run_ranks(2, _sent):
        for number, (received, wanted, calls, wanted_calls) in enumerate(passes):
            assert (received, calls) == (wanted, wanted_calls), number


def _held(small: bool, kept: bool) -> list[tuple[int, int, int]]:
    cube = Cube(*DATA, speed=ExecutionPolicy(keep_buckets=kept))
    cube.manual_seed(0)
    model, found = Branches(cube, hidden=64), []
    for _ in range(3):
        loss = model(torch.ones(2, 64))
        with small_buckets() if small else nullcontext(), LiveBytes() as live:
            for parameter in model.parameters():
                live.follow(local(parameter))
            before = live.now
            loss.backward()
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        found.append(
            (live.peaks["building"] - before, sum(g.nbytes for g in gradients), max(g.nbytes for g in gradients))
        )
        del gradients
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("small", "kept"), [(False, True), *(pytest.param(small, False, marks=pytest.mark.slow) for small in (True, False))]
)
def test_gradients_are_held_once(small: bool, kept: bool) -> None:
    """A bucket is the memory of what is in it. A first pass knows no order, and fills them at its end."""
    for passes in run_ranks(2, _held, small, kept):
        for number, (peak, gradients, largest) in enumerate(passes):
            with small_buckets() if small else nullcontext():
                bucket = min(gradients, 4 * bucket_elements(2, 4, gradients // 4))
            assert peak <= gradients + (largest if number else max(largest, bucket)) + 2048, number  # hidden states


# --- memory that stays ----------------------------------------------------------------------------------------------


@small_buckets()
@patch.object(grad_buckets, "_LETTING_GO", [0.0] + [0.02] * 500)  # on a busy machine gloo's threads come late
def _stays() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    cube, model, _, twin = make_twins(Branches, DATA)
    whole = sum(local(p).nbytes for p in model.parameters())
    parameters, found = list(model.parameters()), dict[str, Any]()

    def step(number: int, *, micro: int = 1, order: str = "012") -> set[int]:
        """Where gradients lie; they are checked, and not cleared."""
        for each in inputs(cube, number):
            for _ in range(micro):
                twin(each, order).backward()
        for place in range(micro):
            with nullcontext() if place == micro - 1 else cube.no_sync():
                model(inputs(cube, number)[cube.rank], order).backward()
        pairs = zip(parameters, twin.parameters(), strict=True)
        found["error"] = max(found.get("error", 0.0), *(error(full(p.grad), full(t.grad)) for p, t in pairs))
        return {storage_id(local(each)) for each in gradients()}

    def gradients() -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    def clear(set_to_none: bool = True) -> int:
        """What stays."""
        for each in (model, twin):
            each.zero_grad(set_to_none)
        return cube.ledger.kept_bytes

    step(0)
    found["after a first pass"] = clear() == 0
    (place,) = step(1)
    found["after the second"] = clear() == whole
    found["it is the same"] = step(2) == {place} and clear() == whole
    found["in another order"] = all(step(number, order="201") == {place} and clear() == whole for number in (3, 4, 5))
    step(6)
    gradient = parameters[0].grad
    assert gradient is not None
    was = full(gradient).clone()
    clear()
    with patch.object(grad_buckets, "_LETTING_GO", (0.0,)):
        (other,) = step(7)
    found["what is held keeps its values"] = other != place and torch.equal(full(gradient), was)
    clear()
    found["memory is that of the last pass"] = step(8) == {other} and cube.ledger.kept_bytes == whole
    twice = copy.deepcopy(model)
    with patch.object(grad_buckets, "_LETTING_GO", (0.0,)):
        step(9)  # added to what is there
    found["where .grad is, nothing else stays"] = cube.ledger.kept_bytes == 0
    found["a copy has its own"] = all(
        p.grad is not None and not torch.equal(full(p.grad), full(own)) and storage_id(local(p.grad)) != place
        for p, own in zip(twice.parameters(), gradients(), strict=True)
        for place in [storage_id(local(own))]
    )
    del twice
    clear(set_to_none=False)
    step(10)
    found["nor with zeros"] = clear() == 0
    step(11)
    clear()
    step(12, micro=2)
    found["nor under accumulation"] = clear() == 0
    step(13)
    found["again"] = clear() == whole
    AdamW(parameters, cube, lr=0.1, shard_over_data=True)
    step(14)
    found["nor beside a sharded state"] = clear() == 0
    always = cube.with_policy(speed=ExecutionPolicy(keep_buckets=True))
    found["but where it is asked for"] = always.ledger.keeps_buckets and not cube.with_policy().ledger.keeps_buckets
    return found


def test_memory_of_buckets_stays_where_nobody_holds_it() -> None:
    for found in run_ranks(2, _stays):
        assert found.pop("error") <= 1e-9
        assert all(found.values()), found


def test_an_eighth_travels_together_within_limits() -> None:
    mebibyte = 2**20
    assert bucket_elements(3, 4, 10) == 3 * mebibyte
    assert bucket_elements(8, 4, 18 * mebibyte) == 3 * mebibyte
    assert bucket_elements(8, 4, 32 * mebibyte) == 4 * mebibyte
    assert bucket_elements(8, 2, 1000 * mebibyte) == 25 * mebibyte // 2

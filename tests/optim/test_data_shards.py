"""The state sharded over `data`: the steps are those of the whole optimiser, and a rank holds its share alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tensor3d import MLP3D, Cube, all_reduce_replicated, check_copies, clip_gradients, constant, local, shard
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.optim import GradScaler, data_shards, decay_groups
from tensor3d.sharding.param_layout import copies
from tests.dtensors import filled_like
from tests.optim.zoo import (
    BETAS,
    EPS,
    KINDS,
    LAYOUTS,
    NoWaiting,
    Optimizer,
    Zoo,
    give,
    gradients_of,
    make,
    rate,
    run,
    spoiled,
)
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, ranks_of
from tests.tied_weight_model import Tied

Shape = tuple[int, int, int, int]
MOMENTS = ("exp_avg", "exp_avg_sq")


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Logical tensors of weights, and of moments and counts where the optimiser has some."""
    found = {name: full(p).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in optimizer.state:
            continue
        found |= {f"{name}.{key}": full(optimizer.state[parameter][key]).clone() for key in (*MOMENTS, "step")}
    return found


def worst(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(error(got[name], wanted[name], name) for name in wanted)


def steps(optimizer: Optimizer, zoo: Zoo, cube: Cube) -> None:
    """With one that is skipped, and one in which a parameter has no gradient."""
    run(optimizer, zoo, cube, range(2))
    give(zoo, cube, spoiled(7))
    optimizer.found_inf = torch.ones((), dtype=torch.float32)
    optimizer.step()
    optimizer.found_inf = torch.zeros((), dtype=torch.float32)
    give(zoo, cube, gradients_of(2))
    zoo.up.grad = None
    optimizer.step()
    run(optimizer, zoo, cube, range(3, 5))


def _all_kinds(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    errors = {}
    for kind, regions in (*((kind, False) for kind in KINDS), ("lamb", True)):
        cube, zoo, optimizer = make(kind, shape, regions=regions, shard_over_data=True)
        with cube.traffic.counting() as count:
            steps(optimizer, zoo, cube)
        check_copies(dict(zoo.named_parameters()), cube)
        shares = [-(-local(p).shape[0] // cube.shape.data) * math.prod(local(p).shape[1:]) for p in zoo.parameters()]
        gathered = ("data", "all-gather")
        assert count.calls[gathered] == 6, "one bucket a step"
        assert count.received[gathered] == 6 * (cube.shape.data - 1) * sum(shares) * 8
        for parameter, most in zip(zoo.parameters(), shares, strict=True):
            held = {local(optimizer.state[parameter][key]).numel() for key in MOMENTS}
            assert len(held) == 1
            assert held.pop() <= most
        plain_cube, plain_zoo, plain = make(kind, shape)
        steps(plain, plain_zoo, plain_cube)
        errors[f"{kind}, {regions}"] = worst(everything(zoo, optimizer), everything(plain_zoo, plain))
    return errors


@pytest.mark.parametrize("shape", fast_alone((1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 1, 3)))
def test_steps_are_those_of_the_whole_optimiser(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _all_kinds, shape):
        assert max(errors.values()) <= 1e-14, errors


def _train(model: nn.Module, optimizer: Optimizer, cube: Cube, loss: Any) -> None:
    """Three steps of two micro-batches each, with a loss scale, clipped by the norm; the second one overflows."""
    scaler = GradScaler(cube, initial=2.0**10)
    for step in range(3):
        with cube.no_sync():
            scaler.scaled(loss(2 * step)).backward()
        scaler.scaled(loss(2 * step + 1)).backward()
        if step == 1:
            first = next(p for p in model.parameters() if p.grad is not None)
            local(first.grad).fill_(math.inf)  # type: ignore[arg-type]
        norm = clip_gradients(model.parameters(), 0.5, cube, loss_scale=scaler.scale)
        optimizer.found_inf = norm.found_inf
        optimizer.step()
        scaler.update(norm.found_inf)
        optimizer.zero_grad()


def _both(shape: Shape, kind: str, make_model: Any, make_loss: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and states after the same steps, with state in shares and without."""
    found = []
    for shards in (True, False):
        cube = Cube(*shape)
        cube.manual_seed(3)
        model = make_model(cube)
        groups = decay_groups(model, 0.1)
        optimizer = KINDS[kind](groups, cube, lr=0.01, betas=BETAS, eps=EPS, shard_over_data=shards)
        _train(model, optimizer, cube, make_loss(model, cube))
        found.append(everything(model, optimizer))
    return found[0], found[1]


def _tied(cube: Cube) -> Tied:
    """With a weight that is frozen."""
    model = Tied(cube)
    model.head.weight.requires_grad_(False)
    return model


def _of_tied(model: nn.Module, cube: Cube) -> Any:
    return model


def _of_mlp(model: nn.Module, cube: Cube) -> Any:
    everyone = cube.over("data", "x", "y", "z")

    def loss(number: int) -> Tensor:
        x = torch.linspace(-1, 1 + number, 32 * 64).reshape(32, 64)
        x = x.roll(cube.coordinate["data"], 0)
        return all_reduce_replicated(model(shard(x, cube, "z")).square().sum() / 2048, everyone)

    return loss


def _trained(shape: Shape) -> tuple[dict[str, float], list[str]]:
    different = []
    got, wanted = _both(shape, "adamw", lambda cube: MLP3D(64, cube), _of_mlp)
    different += [name for name in wanted if not torch.equal(got[name], wanted[name])]
    torch.set_default_dtype(torch.float64)
    return {kind: worst(*_both(shape, kind, _tied, _of_tied)) for kind in ("adamw", "lamb")}, different


@pytest.mark.parametrize("shape", fast_alone((2, 1, 1, 2), (1, 1, 1, 2), (1, 2, 1, 2)))
@pytest.mark.slow
def test_a_training_is_that_of_the_whole_optimiser(shape: Shape) -> None:
    """Tied and frozen weights, micro-batches, clipping and a skipped step; to the bit where shares are whole vectors of
    a CPU."""
    for errors, different in run_ranks(ranks_of(shape), _trained, shape):
        assert max(errors.values()) <= 1e-9, errors
        assert not different


# State


def _states() -> dict[str, bool]:
    """State that goes round, that comes from a whole optimiser, and copies."""
    found = {}
    cube, zoo, optimizer = make("adamw", (1, 1, 1, 2), shard_over_data=True)
    _, plain_zoo, plain = make("adamw", (1, 1, 1, 2))
    run(optimizer, zoo, cube, range(2))
    run(plain, plain_zoo, cube, range(2))
    twin_zoo, twin = copy.deepcopy((zoo, optimizer))
    assert twin.shard_over_data
    sources = {"its own": optimizer.state_dict(), "a whole one": plain.state_dict()}
    for name, state in sources.items():
        _, other_zoo, other = make("adamw", (1, 1, 1, 2), shard_over_data=True)
        other_zoo.load_state_dict(zoo.state_dict())
        other.load_state_dict(copy.deepcopy(state))
        shares = [local(other.state[p]["exp_avg"]).shape for p in other_zoo.parameters()]
        found[f"{name}: in shares"] = shares == [local(optimizer.state[p]["exp_avg"]).shape for p in zoo.parameters()]
        run(other, other_zoo, cube, range(2, 4))
        sources[name] = everything(other_zoo, other)
    run(twin, twin_zoo, cube, range(2, 4))
    run(optimizer, zoo, cube, range(2, 4))
    wanted = everything(zoo, optimizer)
    found["its own goes on"] = all(torch.equal(sources["its own"][name], wanted[name]) for name in wanted)
    found["a whole one goes on"] = worst(sources["a whole one"], wanted) <= 1e-6
    found["a copy goes on"] = all(torch.equal(each, wanted[n]) for n, each in everything(twin_zoo, twin).items())
    before = everything(plain_zoo, plain)
    with pytest.raises(ValueError, match=r"state is in shares over data.*shard_over_data=True"):
        plain.load_state_dict(optimizer.state_dict())
    found["refused, nothing changed"] = worst(everything(plain_zoo, plain), before) == 0
    return found


@pytest.mark.slow
def test_a_state_goes_round() -> None:
    for found in run_ranks(2, _states):
        assert all(found.values()), found


def _unusual() -> tuple[list[int], float]:
    """A scalar, which has no rows; a table of one row, of which one rank has nothing; and several buckets; the host
    waits for nothing."""
    cube = Cube(1, 1, 1, 2)
    scalar, row = constant((), copies("z"), cube, 1.0), constant((1, 3), copies("z"), cube, 1.0)
    long = constant((3, 2_100_001), copies("z"), cube, 1.0)
    parameters = [scalar, row, long]
    optimizer = KINDS["lamb"](parameters, cube, lr=0.5, adapt_all=True, shard_over_data=True)
    for parameter in parameters:
        parameter.grad = filled_like(parameter, 2.0)
    with cube.traffic.counting() as count, NoWaiting():
        optimizer.step()
    share = 3 + 2 * 2_100_001
    assert count.calls["data", "all-gather"] == -(-share // (bucket_elements(2, 4, 2 * share) // 2)) > 1
    assert count.received["data", "all-gather"] == 4 * share
    assert all(len(full(p).unique()) == 1 for p in parameters), "one element is like another"
    return [local(optimizer.state[p]["exp_avg"]).numel() for p in parameters], float(full(scalar))


def test_rows_that_do_not_divide_and_several_buckets() -> None:
    (first, value), (second, other) = run_ranks(2, _unusual)
    assert (first, second) == ([1, 3, 2 * 2_100_001], [1, 0, 2_100_001])
    assert value == other == pytest.approx(0.5)


def _refused() -> None:
    cube = Cube(1, 1, 1, 2)
    block = torch.ones(4, 3).t()
    parameter = nn.Parameter(DTensor.from_local(block, cube.mesh, [Replicate()] * 4, run_check=False))
    KINDS["adamw"]([parameter], cube, lr=0.1)
    with pytest.raises(ValueError, match=r"rows lie one after another.*\(3, 4\).*strides \(1, 3\)"):
        KINDS["adamw"]([parameter], cube, lr=0.1, shard_over_data=True)


def test_shares_that_are_no_part_of_memory_are_refused() -> None:
    run_ranks(2, _refused)


def test_one_rank_along_data_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    cube, zoo, optimizer = make("lamb", (1, 1, 1, 1), shard_over_data=True)
    _, plain_zoo, plain = make("lamb", (1, 1, 1, 1))
    monkeypatch.setattr(data_shards, "all_gather", None)  # nothing is sent
    for each, model in ((optimizer, zoo), (plain, plain_zoo)):
        run(each, model, cube, range(2))
    got, wanted = everything(zoo, optimizer), everything(plain_zoo, plain)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert rate(0) > 0
    assert len(got) == 4 * len(LAYOUTS)

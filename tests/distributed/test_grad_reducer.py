"""The ledger: gradients that add up, survive what happens to models, and cost no more than they must.

The truth is plain torch with the same numbers, which knows no ledger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, Linear3D, Sequences, TransformerLayer3D, distribute, local, local_param, shard
from tensor3d.sharding.param_layout import vector
from tests.dtensors import begin_adam
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, make_twins, ranks_of
from tests.small_buckets import small_buckets
from tests.tied_weight_model import HIDDEN, Tied, Trial, truth

Shape = tuple[int, int, int, int]

# --- passes --------------------------------------------------------------------------------------------------------


def tied(t: Trial) -> float:
    t.model(0).backward()
    return t.error(0)


def two_passes_add(t: Trial) -> float:
    t.model(0).backward()
    t.model(1).backward()
    return t.error(0, 1)


def two_losses_in_one_pass(t: Trial) -> float:
    (t.model(0) + t.model(1)).backward()
    return t.error(0, 1)


def one_graph_twice(t: Trial) -> float:
    loss = t.model(0)
    loss.backward(retain_graph=True)
    loss.backward()
    return t.error(0, times=2)


def accumulated(t: Trial) -> float:
    with t.cube.no_sync():
        for number in range(3):
            t.model(number).backward()
        assert t.cube.shape.ranks == 1 or t.model.on_y.bias.grad is None  # type: ignore[union-attr]
    t.model(3).backward()
    return t.error(0, 1, 2, 3)


def accumulated_beside_a_pass_without_the_head(t: Trial) -> float:
    """What was held back for parameters that the last pass does not touch must not be forgotten."""
    with t.cube.no_sync():
        t.model(0).backward()
    t.model(1, head=False).backward()
    wanted, other = truth(t.weights, 0), truth(t.weights, 1, head=False)
    parameters = dict(t.model.named_parameters())
    worst = max(error(full(parameters[name].grad), wanted[name] + other[name]) for name in wanted)
    t.model.zero_grad()
    return worst


def accumulated_around_a_pass_within(t: Trial) -> float:
    """What the pass around a reentrant checkpoint has sent already, with what was held back, counts once."""
    first, last = (Linear3D(HIDDEN, HIDDEN, t.cube, face, std=0.5) for face in ("z", "y"))
    x = torch.linspace(-1, 1, 4 * HIDDEN // t.cube.shape.z).view(4, -1).requires_grad_()
    found = []
    for within in (False, False, True):  # what was alike twice goes by a plan from then on
        for hold in (t.cube.no_sync(), nullcontext()):
            with hold:
                last(checkpoint(first, x, use_reentrant=True) if within else first(x)).cos().sum().backward()
        found.append([local(p.grad) for p in (*first.parameters(), *last.parameters())])  # type: ignore[arg-type]
        first.zero_grad(), last.zero_grad()
    return max(error(a, b) for a, b in zip(found[0], found[2], strict=True))


def given_up(t: Trial) -> float:
    """A step that is given up leaves nothing for the next one."""
    with suppress(KeyError), t.cube.no_sync():
        t.model(0).backward()
        raise KeyError
    t.cube.ledger.discard()
    t.model.zero_grad()
    t.model(1).backward()
    return t.error(1)


def failed_then_good(t: Trial) -> float:
    t.model(1).backward()
    wanted = t.snapshot()
    t.fail(0)
    assert t.snapshot() == [], "a failed pass wrote gradients"
    loss = t.model(1)
    assert not t.cube.ledger._passes, "what the failed pass handed in is kept alive"
    loss.backward()
    got = t.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), "the failed pass left a trace"
    t.model(1).backward()
    return t.error(1)


def failed_with_a_graph_already_there(t: Trial) -> float:
    loss = t.model(0)
    t.fail(1)
    loss.backward()
    return t.error(0)


def failed_while_accumulating(t: Trial) -> float:
    with t.cube.no_sync():
        t.model(0).backward()
        t.fail(1)
        t.model(2).backward()
    t.fail(1)
    t.model(3).backward()
    return t.error(0, 2, 3)


def copied(t: Trial) -> float:
    """Before and after a backward pass, and each for itself."""
    early = copy.deepcopy(t.model)
    t.model(0).backward()
    late = copy.deepcopy(t.model)
    late.zero_grad()
    early(1).backward()
    late(2).backward()
    return max(t.error(0), t.error(1, model=early), t.error(2, model=late))


def shared_gradient(t: Trial) -> float:
    """Autograd gives one tensor to a parameter's use and to a leaf beside it: neither may write into the other's."""
    cube = t.cube
    parameter = distribute(torch.zeros(HIDDEN), vector("z"), cube)
    leaf = torch.zeros(HIDDEN // cube.shape.z, requires_grad=True)
    with cube.no_sync():
        for _ in range(2):
            (local_param(parameter, vector("z"), cube) + leaf).sum().backward()
    (local_param(parameter, vector("z"), cube) + leaf).sum().backward()
    members = cube.over(*vector("z").sum_over).size
    return error(full(parameter.grad), torch.full((HIDDEN,), 3.0 * members)) + error(
        leaf.grad,  # type: ignore[arg-type]
        torch.full_like(leaf, 3.0),
    )


SCENARIOS: tuple[Callable[[Trial], float], ...] = (
    tied,
    two_passes_add,
    two_losses_in_one_pass,
    one_graph_twice,
    accumulated,
    accumulated_beside_a_pass_without_the_head,
    accumulated_around_a_pass_within,
    given_up,
    failed_then_good,
    failed_with_a_graph_already_there,
    failed_while_accumulating,
    copied,
    shared_gradient,
)


@small_buckets()
def _scenarios(shape: Shape) -> dict[str, float]:
    trial = Trial(shape)
    return {scenario.__name__: scenario(trial) for scenario in SCENARIOS}


@pytest.mark.parametrize(
    "shape", [*fast_alone((1, 2, 1, 2), (1, 2, 2, 2), (2, 2, 2, 1)), pytest.param((1, 1, 1, 1), id="1x1x1")]
)
def test_gradients_equal_plain_torchs(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _scenarios, shape):
        assert max(errors.values()) <= 1e-9, errors


# --- models --------------------------------------------------------------------------------------------------------


@small_buckets()
def _checkpointed(shape: Shape) -> list[bool]:
    """Two layers with dropout of everything: gradients of input and parameters, recomputed or not, to the bit."""
    cube = Cube(*shape)
    cube.manual_seed(3)
    layers = [TransformerLayer3D(16, 4, cube, dropout=0.2, attention_dropout=0.2, std=0.2) for _ in range(2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    rows = 32 // cube.shape.planes
    sequences = Sequences.from_lengths([1, rows // cube.shape.z - 1])
    x = torch.randn(rows // cube.shape.y, 16 // cube.shape.z)

    def gradients(recompute: bool) -> list[Tensor]:
        torch.manual_seed(cube.rank)
        start = x.clone().requires_grad_()
        hidden = start
        for layer in layers:
            hidden = (
                checkpoint(layer, hidden, sequences, use_reentrant=False) if recompute else layer(hidden, sequences)
            )
        hidden.square().sum().backward()
        found = [start.grad, *(local(p.grad) for p in parameters)]  # type: ignore[arg-type]
        for parameter in parameters:
            parameter.grad = None
        return found  # type: ignore[return-value]

    kept, recomputed, again = gradients(False), gradients(True), gradients(True)
    assert float(kept[1].abs().max()) > 0
    return [torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(kept, recomputed, again, strict=True)]


@pytest.mark.parametrize("shape", fast_alone((1, 1, 2, 2), (2, 2, 2, 1), (1, 2, 2, 2)))
def test_recomputation_changes_no_bit(shape: Shape) -> None:
    for equal in run_ranks(ranks_of(shape), _checkpointed, shape):
        assert all(equal), equal


def _doubled(shape: Shape) -> dict[str, float]:
    """`.double()` replaces the parameters: gradients that are there come along, and new ones find their way."""
    cube = Cube(*shape)
    layer = Linear3D(8, 8, cube)
    generator = torch.Generator().manual_seed(1)
    x, direction = torch.randn(2, 16, 8, generator=generator, dtype=torch.float64)

    def backward(dtype: torch.dtype) -> None:
        on_z, on_y = shard(x.to(dtype), cube, "z"), shard(direction.to(dtype), cube, "y")
        layer(on_z).backward(on_y)

    def errors(times: int) -> float:
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == layer.weight.dtype == torch.float64
        wanted = {"weight": direction.t() @ x, "bias": direction.sum(0)}
        return max(error(full(p.grad), times * wanted[name]) for name, p in layer.named_parameters())

    backward(torch.float32)
    layer.double()
    backward(torch.float64)
    half_of_it_in_fp32 = errors(times=2)
    layer.zero_grad()
    backward(torch.float64)
    return {"both": half_of_it_in_fp32 * 1e-4, "fp64": errors(times=1)}


def _trained(shape: Shape) -> dict[str, float]:
    """Five steps of torch's AdamW on DTensors against five on plain tensors with plain gradients."""
    torch.set_default_dtype(torch.float64)
    _, model, _, twin = make_twins(Tied, shape)
    weights = {name: nn.Parameter(p.detach().clone()) for name, p in twin.named_parameters()}
    ours, theirs = (
        torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True)
        for parameters in (model.parameters(), weights.values())
    )
    losses = []
    for step in range(5):
        loss = model(step)
        loss.backward()
        for name, gradient in truth(dict(weights), step).items():
            weights[name].grad = gradient
        begin_adam(ours)
        ours.step()
        theirs.step()
        ours.zero_grad()
        losses.append(float(loss.detach()))
    assert len(set(losses)) == 5
    return {name: error(full(p), weights[name], name) for name, p in model.named_parameters()}


@pytest.mark.parametrize("body", [pytest.param(_doubled, marks=pytest.mark.slow), _trained])
@pytest.mark.parametrize("shape", fast_alone((2, 1, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)))
def test_models_that_change(body: Callable[[Shape], dict[str, float]], shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), body, shape):
        assert max(errors.values()) <= 1e-9, errors


# --- cost ----------------------------------------------------------------------------------------------------------


def _sums(shape: Shape) -> list[int]:
    """All-reduces of gradients in a step of 1 and of 4 micro-batches; LayerNorm's own run along y and z."""
    trial, found = Trial(shape), []
    for held in (0, 3):
        with trial.cube.traffic.counting() as count:
            with trial.cube.no_sync():
                for number in range(held):
                    trial.model(number).backward()
            trial.model(held).backward()
        found.append(sum(n for (axis, kind), n in count.calls.items() if kind == "all-reduce" and axis not in "yz"))
    return found


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 2), (2, 2, 2, 1)))
def test_accumulation_sends_no_more_sums_than_one_pass(shape: Shape) -> None:
    for once, four_times in run_ranks(ranks_of(shape), _sums, shape):
        # In every forward the loss is a sum, and with x the hosts agree on the rows of a lookup.
        forward = 1 + (shape[0] > 1)
        # One bucket for vectors on y, one for those on z, and for matrices.
        buckets = 3 if shape[3] > 1 else 2
        # And the question whether all ranks have used the same parameters, once a step too.
        assert once == forward + 1 + buckets
        assert four_times == 4 * forward + 1 + buckets

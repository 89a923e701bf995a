"""Legal but unusual use, and misuse that sizes do not give away: a right result, or a refusal on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tensor3d import (
    Attention3D,
    Cube,
    Embedding3D,
    ExecutionPolicy,
    GatedMLP3D,
    LayerNorm3D,
    Layout,
    Linear3D,
    LookupEmbedding3D,
    Projection3D,
    RMSNorm3D,
    Sequences,
    SmallHead3D,
    TransformerLayer3D,
    checkpoint,
    clip_grad_norm_,
    constant,
    cross_entropy,
    distribute,
    gather,
    local,
    local_param,
    local_rows,
    matmul,
    shard,
)
from tensor3d.distributed.collectives import CommHandle, reduce_scatter
from tensor3d.sharding.param_layout import matrix, table, vector
from tests.dtensors import begin_adam
from tests.ranks import run_ranks
from tests.single_device_reference import error, full

# --- types ---------------------------------------------------------------------------------------------------------


def narrow_head_of_bf16(cube: Cube) -> Any:
    """Weights of fp32 serve activations of bf16; the few logits are fp32."""
    head = SmallHead3D(8, 3, cube, "y")
    x = torch.ones(4, 8 // cube.shape.y, dtype=torch.bfloat16)
    logits = head(x)
    logits.sum().backward()
    assert head.weight.grad is not None
    wanted = torch.full((3, 8), 4.0 * cube.shape.x * cube.shape.z)
    return logits.dtype, head.weight.grad.dtype, error(full(head.weight.grad), wanted)


def autocast(cube: Cube) -> Any:
    """The same numbers as with an input of bf16."""
    layer, grads = Linear3D(8, 8, cube, std=0.5), []
    values = torch.randn(4, 8 // cube.shape.z)
    for enabled in (True, False):
        x = values.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = layer(x if enabled else x.bfloat16())
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        grads.append([x.grad, *(local(p.grad) for p in layer.parameters() if p.grad is not None)])
        layer.zero_grad()
    assert len(grads[0]) == 3
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def autocast_of_a_transformer_layer(cube: Cube) -> Any:
    layer = TransformerLayer3D(16, 4, cube)
    x = torch.randn(4, 16 // cube.shape.z, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, Sequences.from_lengths([4 * cube.shape.y // cube.shape.z]))
    y.float().square().sum().backward()
    return [p.grad is not None and bool(full(p.grad).isfinite().all()) for p in layer.parameters()]


def clipping_of_two_types(cube: Cube) -> Any:
    """Ranks that stand for different blocks must agree on the type of the norm."""
    # Of the first, only ranks with y = 0 count their block; of the second, only those with z = 0.
    parameters = [constant((8,), vector("z"), cube, 1.0), distribute(torch.ones(8).double(), vector("y"), cube)]
    for parameter, face in zip(parameters, ("z", "y"), strict=True):
        local_param(parameter, Layout(cut=((face, 0),), sum_over=()), cube).sum().backward()  # type: ignore[arg-type]
    return round(float(clip_grad_norm_(parameters, 1.0, cube)), 12)


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients_of_an_input_alone(cube: Cube) -> Any:
    """Whoever asks for the gradient of an input finds `.grad` of the parameters as it was."""
    layer = TransformerLayer3D(16, 4, cube)
    x = torch.randn(4, 16 // cube.shape.z, requires_grad=True)
    sequences = Sequences.from_lengths([4 * cube.shape.y // cube.shape.z])
    (wanted,) = torch.autograd.grad(layer(x, sequences).square().sum(), x)
    layer(x, sequences).square().sum().backward(inputs=[x])
    untouched = all(p.grad is None for p in layer.parameters())
    return untouched, torch.equal(wanted, x.grad)  # type: ignore[arg-type]


def gradients_of_some_parameters(cube: Cube) -> Any:
    layers = nn.Sequential(Linear3D(8, 8, cube, "z", std=0.5), Linear3D(8, 8, cube, "y", std=0.5))
    x = torch.randn(4, 8 // cube.shape.z)
    found = []
    for inputs in ([layers[0].weight, layers[1].bias], None):
        layers(x).square().sum().backward(inputs=inputs)
        found.append({n: local(p.grad).clone() for n, p in layers.named_parameters() if p.grad is not None})
        layers.zero_grad()
    some, every = found
    return sorted(some), len(every), all(torch.equal(some[name], every[name]) for name in some)


def frozen_before_the_backward_pass(cube: Cube) -> Any:
    """As torch's own node, which adds nothing to a parameter that is frozen by then."""
    layers = nn.Sequential(Linear3D(8, 8, cube, "z", std=0.5), Linear3D(8, 8, cube, "y", std=0.5))
    loss = layers(torch.randn(4, 8 // cube.shape.z)).square().sum()
    for frozen in (layers[0].weight, layers[1].bias):
        frozen.requires_grad_(False)
    loss.backward()
    return [name for name, parameter in layers.named_parameters() if parameter.grad is not None]


def stepped_before_the_backward_pass(cube: Cube) -> Any:
    """A graph from before a step goes back through weights that are gone: torch refuses it."""
    layer = Linear3D(8, 8, cube, "z", std=0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, fused=True)  # which leaves the counters of a DTensor alone
    loss = layer(torch.randn(4, 8 // cube.shape.z, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    begin_adam(optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError) as refused:
        loss.backward()
    return "modified by an inplace operation" in str(refused.value)


def autograd_grad_of_a_parameter(cube: Cube) -> Any:
    layer = Linear3D(8, 8, cube)
    message = refusal(lambda: torch.autograd.grad(layer(torch.ones(4, 8 // cube.shape.z)).sum(), layer.weight))
    return message, layer.weight.grad


def gradients_to_differentiate_again(cube: Cube) -> Any:
    """A penalty of gradients would be a constant without a word. That of an input alone fails in its second pass."""
    layer, x = Linear3D(8, 8, cube), torch.ones(4, 8 // cube.shape.z, requires_grad=True)
    loss = layer(x).square().sum()
    message = refusal(lambda: loss.backward(create_graph=True, retain_graph=True))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward(retain_graph=True)
    loss.backward()
    return message, layer.weight.grad is not None


def gradients_in_the_order_of_their_parameter(cube: Cube) -> Any:
    """A gradient that comes transposed out of autograd: fused optimisers read memory as it lies."""
    layout = Layout(cut=(("y", 1),), sum_over=())
    parameter = distribute(torch.zeros(4, 6), layout, cube)
    block = local_param(parameter, layout, cube)
    (block.t() * torch.arange(block.numel(), dtype=block.dtype).view(block.t().shape)).sum().backward()
    assert parameter.grad is not None
    return local(parameter.grad).stride() == local(parameter).stride()


def gradients_that_travel(cube: Cube) -> Any:
    """The most slabs that wait for their reduce-scatter at any time of a pass through six layers."""
    issued: list[CommHandle] = []
    most = 0

    def noted(parts: Tensor, axis: Any) -> CommHandle:
        nonlocal most
        pending = reduce_scatter(parts, axis)
        if axis.name == "x":
            issued.append(pending)
            most = max(most, sum(each._inputs is not None for each in issued))
        return pending

    layers = nn.Sequential(*(Linear3D(8, 8, cube, face) for face in ("z", "y") * 3))
    with mock.patch("tensor3d.sharding.weight_slabs.reduce_scatter", noted):
        layers(torch.ones(4, 8 // cube.shape.z)).sum().backward()
    return len(issued), most


def clipping_what_is_held_back(cube: Cube) -> Any:
    layer = Linear3D(8, 8, cube)
    with cube.no_sync():
        layer(torch.ones(4, 8 // cube.shape.z)).sum().backward()
    message = refusal(lambda: clip_grad_norm_(layer.parameters(), 1.0, cube))
    cube.ledger.discard()
    layer.zero_grad()
    layer(torch.ones(4, 8 // cube.shape.z)).sum().backward()
    return message, bool(clip_grad_norm_(layer.parameters(), 1.0, cube) > 0)


# --- what does not fit ---------------------------------------------------------------------------------------------


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as problem:  # noqa: PT011
        action()
    return str(problem.value)


def refusals(cube: Cube) -> list[str]:
    """On 2x2x2 all of these have sizes that fit."""
    layer, square = Linear3D(8, 8, cube, "z"), torch.ones(4, 4)
    gain = constant((8,), vector("z"), cube, 1.0)
    twice = gain * 2
    return [
        refusal(lambda: local_param(gain, vector("y"), cube)),
        refusal(lambda: local_param(twice, vector("z"), cube)),  # type: ignore[arg-type]
        refusal(lambda: matmul(square, layer.weight, cube, "y")),
        refusal(lambda: matmul(square, layer.weight, cube, "z", gain)),
        refusal(lambda: matmul(square, nn.Parameter(torch.ones(8, 8)), cube, "z")),
        refusal(lambda: cross_entropy(torch.zeros(2, 4), torch.tensor([8, 0]), 8, cube)),
        refusal(lambda: cross_entropy(torch.zeros(2, 4), torch.tensor([0, -1]), 8, cube)),
        refusal(lambda: local_rows(torch.arange(5), cube)),
        refusal(lambda: Attention3D(16, 4, cube, dropout=1.5)),
    ]


REFUSALS = (
    "lies on axis y as R, and S(0) is needed here",
    "was computed from others",
    "lies on axis y as S(0), and S(1) is needed here",
    "lies on axis y as R, and S(0) is needed here",
    "is a plain tensor on 2x2x2",
    "below 8, or -100. Got 8.",
    "below 8, or -100. Got -1.",
    "must divide by z=2. Got 5.",
    "Got 1.5.",
)


def layouts_that_differ_in_name_alone(cube: Cube) -> Any:
    """What an axis of one member does to a parameter does not matter."""
    flat = Cube(8, 1, 1)
    parameter = distribute(torch.ones(3, 4), table("y"), flat)
    return local_param(parameter, Layout(sum_over=("data", "x")), flat).shape


def banned_entry(cube: Cube) -> Any:
    """A logit of -inf at the head of a slice that does not own the label."""
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, [0, 5]] = -math.inf
    labels = torch.tensor([7, 3])
    own = logits.chunk(cube.shape.y, 1)[cube.coordinate["y"]].clone().requires_grad_()
    losses, _ = cross_entropy(own, labels, 10, cube)
    losses.sum().backward()
    wanted = F.cross_entropy(logits, labels, reduction="none")
    assert own.grad is not None
    return error(losses, wanted) <= 1e-12, bool(own.grad.isfinite().all())


def uneven_columns(cube: Cube) -> Any:
    """Logits of an odd vocabulary, with an empty slice, put together; the gradient finds its way back."""
    flat, errors = Cube(1, 8, 1), []
    for width in (13, 9):
        whole = torch.arange(4.0 * width).view(4, width)
        step = -(-width // 8)
        own = whole[:, flat.rank * step : (flat.rank + 1) * step].clone().requires_grad_()
        found = gather(own, flat, "y")
        (found * whole).sum().backward()
        errors += [error(found, whole), error(own.grad, own)]  # type: ignore[arg-type]
    source = torch.ones(16, 8, requires_grad=True)
    shard(source, cube, "z").sum().backward()
    return [*errors, error(source.grad, torch.ones(16, 8))]  # type: ignore[arg-type]


# --- one rank alone ------------------------------------------------------------------------------------------------


def groups_at_first_use(cube: Cube) -> Any:
    """A rank that looks at a plane on its own must not wait for the others: the groups are there."""
    with mock.patch.object(dist, "new_subgroups_by_enumeration", side_effect=AssertionError("a group was made")):
        sums = [cube.over(*layout.sum_over).size for layout in (vector("y"), vector("z"), matrix("z"))]
        return [cube.plane.size, *sums]


CASES: dict[Callable[[Cube], Any], Any] = {
    narrow_head_of_bf16: (torch.float32, torch.float32, 0.0),
    autocast: True,
    autocast_of_a_transformer_layer: [True] * 12,
    clipping_of_two_types: 4.0,
    gradients_of_an_input_alone: (True, True),
    gradients_of_some_parameters: (["0.weight", "1.bias"], 4, True),
    frozen_before_the_backward_pass: ["0.bias", "1.weight"],
    stepped_before_the_backward_pass: True,
    gradients_in_the_order_of_their_parameter: True,
    gradients_that_travel: (6, 2),
    layouts_that_differ_in_name_alone: torch.Size((3, 4)),
    banned_entry: (True, True),
    uneven_columns: [0.0] * 5,
    groups_at_first_use: [4, 4, 4, 1],
}
TOLD = (autograd_grad_of_a_parameter, clipping_what_is_held_back, gradients_to_differentiate_again, refusals)


def _all_cases() -> dict[str, Any]:
    cube = Cube(2, 2, 2)
    cube.manual_seed(0)
    found = {case.__name__: case(cube) for case in CASES}
    return found | {case.__name__: case(cube) for case in TOLD}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(8, _all_cases, timeout=60)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_unusual_use(case: Callable[[Cube], Any], results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found[case.__name__] == CASES[case]


def test_misuse_is_refused_on_every_rank(results: list[dict[str, Any]]) -> None:
    for found in results:
        (asked, gradient), (clipped, later), (again, once) = (found[case.__name__] for case in TOLD[:3])
        assert "Leave create_graph=True out" in again
        assert once
        assert "Call backward" in asked
        assert gradient is None
        assert "held back by Cube.no_sync" in clipped
        assert later
        for message, part in zip(found["refusals"], REFUSALS, strict=True):
            assert part in message


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("compiled", [False, True])
def test_no_layer_takes_a_parameter_that_was_computed(compiled: bool) -> None:
    """As parametrizations and pruning give it: what it was computed from would get no gradient, without a word."""
    cube = Cube.single()
    cube.speed = ExecutionPolicy(compile=compiled)
    rows, ids, sequences = torch.ones(4, 8), torch.arange(4), Sequences.from_lengths([4])
    uses: list[tuple[Callable[[], nn.Module], tuple[Any, ...]]] = [
        (lambda: LayerNorm3D(8, cube, "z"), (rows,)),
        (lambda: LayerNorm3D(8, cube, "z"), (rows, rows)),
        (lambda: RMSNorm3D(8, cube), (rows,)),
        (lambda: Embedding3D(10, 8, cube), (ids,)),
        (lambda: LookupEmbedding3D(10, 8, cube), (ids,)),
        (lambda: SmallHead3D(8, 2, cube, "z"), (rows,)),
        (lambda: Projection3D(8, 10, cube, bias=True), (rows,)),
        (lambda: GatedMLP3D(8, cube, 16), (rows,)),
        (lambda: TransformerLayer3D(8, 2, cube), (rows, sequences)),
    ]
    for make, given in uses:
        for name, _ in make().named_parameters():
            layer = make()
            module, _, own = name.rpartition(".")
            parametrize.register_parametrization(layer.get_submodule(module), own, _Twice())
            with pytest.raises(ValueError, match="was computed from others, as parametrizations and pruning"):
                layer(*given)


def _saved_in_vain(folder: Path) -> str:
    cube = Cube(2, 1, 1)
    layer = Linear3D(4, 4, cube)
    with pytest.raises(OSError, match="Not a directory") as problem:
        checkpoint.save(folder / "file" / "inside", 1, layer, torch.optim.SGD(layer.parameters(), 0.1), cube, {})
    return type(problem.value).__name__


def test_a_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = run_ranks(2, _saved_in_vain, tmp_path, timeout=20)
    assert first == second == "NotADirectoryError"

"""Weights that travel over x together: the bits, bytes and memory of one after another, with fewer collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import (
    CommStats,
    Cube,
    ExecutionPolicy,
    Linear3D,
    Sequences,
    TransformerLayer3D,
    gather_together,
    local,
    shard,
)
from tensor3d.cost_model.comm_volume import CommModel, transformer_layer
from tensor3d.distributed.cube_shape import CubeShape, travel_together
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of

ROWS, HIDDEN, HEADS, INNER = 24, 16, 4, 40  # over x = 3, no matrix divides
ALWAYS = 2**40


class _Two(nn.Module):
    """Two blocks, the second one twice; one of their weights is frozen."""

    def __init__(self, cube: Cube, **options: Any) -> None:
        super().__init__()
        self.first, self.second = (TransformerLayer3D(HIDDEN, HEADS, cube, INNER, **options) for _ in range(2))
        self.first.mlp.up.weight.requires_grad_(False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        return self.second(self.second(self.first(x, sequences), sequences), sequences)


def _plainly(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    model(x, sequences).square().sum().backward()


def _of_some(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    """Gradients of a few alone: no group is complete before the end of the pass."""
    asked = [parameter for name, parameter in model.named_parameters() if name.endswith(("qkv.weight", "down.bias"))]
    model(x, sequences).square().sum().backward(inputs=asked)


def _of_the_input(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    model(x, sequences).square().sum().backward(inputs=[x])


def _twice(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    loss = model(x, sequences).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _accumulated(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    with cube.no_sync():
        _plainly(cube, model, x, sequences)
    _plainly(cube, model, x, sequences)


def _failed(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    """A pass that ends in the midst of a block, and one after it."""

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    between = model.get_submodule("first.attention")
    handle = between.register_forward_hook(lambda module, given, result: result.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="on purpose"):
        _plainly(cube, model, x, sequences)
    handle.remove()
    model.zero_grad()
    x.grad = None
    _plainly(cube, model, x, sequences)


def _hooked(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    weight = model.get_parameter("first.mlp.down.weight")
    seen: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad is not None))
    weight.register_hook(lambda gradient: 2 * gradient)
    _plainly(cube, model, x, sequences)
    assert seen == [True], "a hook is called once, when the sum is there"


def _autocast(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result = model(x, sequences)
    result.float().square().sum().backward()


def _kept_in_part(cube: Cube, model: nn.Module, x: Tensor, sequences: Sequences) -> None:
    for name, reshard in (("first.attention.qkv", "input"), ("second.mlp.up", False), ("second.mlp.down", "weight")):
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear3D)
        layer.reshard_after_forward = reshard  # type: ignore[assignment]
    _plainly(cube, model, x, sequences)


USES: dict[str, tuple[Callable[[Cube, nn.Module, Tensor, Sequences], None], dict[str, Any]]] = {
    "plain": (_plainly, {}),
    "kept": (_plainly, {"reshard_after_forward": False}),
    "kept in part": (_kept_in_part, {}),
    "recomputed layers": (_plainly, {"recompute": "layer"}),
    "recomputed attention": (_plainly, {"recompute": "attention", "norm": "pre"}),
    "gradients of some": (_of_some, {}),
    "gradient of the input": (_of_the_input, {}),
    "backward twice": (_twice, {}),
    "micro-batches": (_accumulated, {}),
    "after a failed pass": (_failed, {}),
    "hooks": (_hooked, {}),
    "autocast": (_autocast, {}),
}


def _trained(cube: Cube, use: str) -> dict[str, Any]:
    """Three steps; everything that a group could change."""
    cube.manual_seed(0)
    run, options = USES[use]
    model = _Two(cube, **options)
    drawn = torch.randn(ROWS * cube.shape.planes, HIDDEN, generator=torch.Generator().manual_seed(1))
    x = shard(drawn, cube, "z").requires_grad_()
    rows = ROWS // cube.shape.z
    sequences = Sequences.from_lengths([rows - 3, 3], device="cpu")
    with torch.no_grad():
        results = [model(x, sequences)]
    with cube.traffic.counting() as count:
        for _ in range(3):
            run(cube, model, x, sequences)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results += [local(gradient).detach().clone() for gradient in gradients]
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        local(parameter).sub_(0.01 * local(parameter.grad))
            model.zero_grad()
    assert not cube.open_groups
    results += [] if x.grad is None else [x.grad]
    return {"results": results, "bytes": count.received, "calls": count.calls, "dropped": cube.ahead.dropped}


FEW = ("kept in part", "recomputed layers", "gradients of some", "hooks")
"""Of which each goes another way; the slow tests have all on one cube."""
OTHERS = tuple(use for use in USES if use not in FEW)
_ON_3X1X1 = pytest.mark.long(reason="3x1x1 has these uses too, and on this cube a few go each another way")


def _compared(shape: Shape, overlap: bool, dtype: torch.dtype, uses: tuple[str, ...]) -> dict[str, list[str]]:
    """Of each use, what is not as it should be."""
    found: dict[str, list[str]] = {}
    torch.set_default_dtype(dtype)  # to convert a model afterwards takes DTensor seconds
    cube = Cube(*shape)
    for use in uses:
        policies = (ExecutionPolicy(overlap=overlap, weight_group_bytes=limit) for limit in (0, ALWAYS))
        alone, group = (_trained(cube.with_policy(speed=policy), use) for policy in policies)
        wrong = []
        if len(alone["results"]) != len(group["results"]) or not all(
            map(torch.equal, alone["results"], group["results"])
        ):
            wrong.append("bits")
        if alone["bytes"] != group["bytes"] and use not in ("gradients of some", "after a failed pass"):
            wrong.append(f"bytes {alone['bytes']} and {group['bytes']}")
        fewer = sum(alone["calls"].values()) - sum(group["calls"].values())
        if fewer <= 0:
            wrong.append(f"{fewer} collectives less")
        if group["dropped"] > alone["dropped"]:
            wrong.append(f"{group['dropped']} gathers in vain")
        if wrong:
            found[use] = wrong
    return found


@pytest.mark.parametrize(
    ("shape", "overlap", "dtype", "uses"),
    [
        pytest.param((3, 1, 1, 1), True, torch.float32, tuple(USES), marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 1), False, torch.float64, FEW, marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 2), True, torch.float32, FEW, marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 1), False, torch.float64, OTHERS, marks=_ON_3X1X1),
        pytest.param((2, 1, 2, 2), True, torch.float32, OTHERS, marks=_ON_3X1X1),
    ],
    ids=["3x1x1", "2x2x1-few", "2x1x2-data2-few", "2x2x1-others", "2x1x2-data2-others"],
)
def test_the_same_bits_and_bytes(shape: Shape, overlap: bool, dtype: torch.dtype, uses: tuple[str, ...]) -> None:
    for found in run_ranks(ranks_of(shape), _compared, shape, overlap, dtype, uses):
        assert not found


def _over_x(count: CommStats) -> dict[Any, int]:
    """Collectives of weights and their gradients."""
    return {key: calls for key, calls in count.calls.items() if key[0] == "x" and key[1] != "all-reduce"}


def _counted(shape: Shape) -> list[tuple[str, dict[Any, int], dict[Any, int]]]:
    """Of one layer, collectives over x: counted, and by the closed form."""
    found = []
    for limit in (None, 0, ALWAYS):
        for options in ({}, {"reshard_after_forward": False}, {"recompute": "layer"}):
            cube = Cube(*shape, speed=ExecutionPolicy(weight_group_bytes=limit))
            layer = TransformerLayer3D(HIDDEN, HEADS, cube, INNER, **options)
            x = shard(torch.ones(ROWS * cube.shape.planes, HIDDEN), cube, "z").requires_grad_()
            with cube.traffic.counting() as count:
                layer(x, Sequences.from_lengths([ROWS // cube.shape.z], device="cpu")).sum().backward()
            wire = CommModel(shape=cube.shape, rank=cube.rank, unit="calls", weight_group_bytes=limit)
            kept, again = not options.get("reshard_after_forward", True), options.get("recompute") == "layer"
            planned = transformer_layer(wire, ROWS, HIDDEN, INNER, kept=kept, recomputed=again)
            counted = _over_x(count)
            found.append((f"{limit}, {options}", counted, {k: n for k, n in planned.items() if k[0] == "x"}))
    return found


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), pytest.param((2, 2, 1, 1), marks=pytest.mark.slow)])
def test_the_closed_form_counts_them(shape: Shape) -> None:
    for found in run_ranks(ranks_of(shape), _counted, shape):
        for what, counted, planned in found:
            assert counted == planned, what
        by_default, never, always = (sum(found[first][1].values()) for first in (0, 3, 6))
        assert never == 12
        assert always == 3
        assert by_default == (3 if shape[1:3] == (1, 1) else 12)


def test_when_they_travel_together() -> None:
    alone, box = CubeShape(x=8), CubeShape(x=4, y=2)
    assert travel_together(alone, 64 * 2**20)
    assert not travel_together(alone, 64 * 2**20 + 1)
    assert not travel_together(box, 8)
    assert travel_together(box, 8, 8)
    assert not travel_together(alone, 8, 0)
    assert not travel_together(CubeShape(data=8), 8, ALWAYS)


@pytest.mark.parametrize("limit", [-1, True, 1.5, "64"])
def test_a_limit_is_a_number_of_bytes(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"weight_group_bytes must be a number of bytes.*Got"):
        ExecutionPolicy(weight_group_bytes=limit)


def _by_hand() -> tuple[int, int, bool]:
    """Two layers of a user's own module, together and alone: collectives, and whether the result is the same."""
    cube = Cube(2, 1, 1)
    up, down = Linear3D(8, 16, cube, "z"), Linear3D(16, 8, cube, "y")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with cube.traffic.counting() as together, gather_together([up, down], cube):
        one = down(torch.relu(up(x)))
        one.sum().backward()
    with cube.traffic.counting() as alone:
        two = down(torch.relu(up(x)))
        two.sum().backward()
    return sum(_over_x(together).values()), sum(_over_x(alone).values()), torch.equal(one, two)


def test_layers_of_a_users_own_block() -> None:
    # Forward 1 and 2, backward 1 (the input asks for no gradient, so "up" alone is spared) and 1, sums 1 and 2.
    assert run_ranks(2, _by_hand) == [(3, 5, True)] * 2


def _kept_twice() -> tuple[bool, int, int]:
    """Two backward passes of one graph whose gathered weights were kept, and freed by the first one."""
    cube = Cube(2, 1, 1)
    layer = Linear3D(8, 8, cube, reshard_after_forward=False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = layer(x).square().sum()
    gradients, calls = [], []
    for _ in range(2):
        x.grad, layer.weight.grad = None, None
        with cube.traffic.counting() as count:
            loss.backward(retain_graph=True)
        assert x.grad is not None
        gradients.append(torch.cat([x.grad, local(layer.weight.grad)]))
        calls.append(count.calls["x", "all-gather"])
    return torch.equal(*gradients), calls[0], calls[1]


def test_a_kept_weight_is_freed_and_gathered_again_for_a_second_pass() -> None:
    assert run_ranks(2, _kept_twice) == [(True, 0, 1)] * 2


def _order_of_a_first_pass() -> list[str]:
    cube = Cube(2, 1, 1)
    model = nn.ModuleList(TransformerLayer3D(HIDDEN, HEADS, cube, INNER) for _ in range(2))
    x, sequences = torch.ones(ROWS, HIDDEN, requires_grad=True), Sequences.from_lengths([ROWS], device="cpu")
    with cube.traffic.counting() as count:
        model[1](model[0](x, sequences), sequences).sum().backward()
    return [kind for _, kind, _ in count.order if kind != "all-reduce"]


def test_sums_leave_before_the_pass_ends() -> None:
    each = ["all-gather", "reduce-scatter"]
    assert run_ranks(2, _order_of_a_first_pass) == [["all-gather", "all-gather", *each, *each]] * 2

"""Delayed scaling: what the scales are made of, and what changes them; the same on any cube."""

from __future__ import annotations

import copy
import gc
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, ExecutionPolicy, Linear3D, MixedPrecisionPolicy, gather, local, shard
from tensor3d.cost_model.product_operators import scale_bytes
from tensor3d.distributed.fp8_scales import GRADIENT, INPUT, WEIGHT, history_tensor, kept_bytes, restore_history
from tensor3d.ops.fp8 import E4M3, E5M2, scale_of
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, ranks_of

DELAYED = MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed", fp8_history=3)
ROWS, SIDE = 16, 64


def _layer(cube: Cube) -> Linear3D:
    cube.manual_seed(3)
    return Linear3D(SIDE, SIDE, cube, "z", std=0.3)


def _pass(layer: nn.Module, cube: Cube, size: float = 1.0, seed: int = 0) -> Tensor:
    """Forward and backward; the largest magnitude of the input is `size`, that of the gradient a power of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(ROWS, SIDE, generator=generator) * size
    x[5, 7] = size
    dy = torch.rand(ROWS, SIDE, generator=generator) * 2.0**-9
    dy[9, 3] = 2.0**-8
    y = gather(layer(shard(x, cube, "z")), cube, "y")
    (y * dy).sum().backward()
    return y.detach()


def _rows(layer: Linear3D) -> list[list[float]]:
    found = history_tensor(layer.weight)
    assert found is not None
    rows: list[list[float]] = found.tolist()
    return rows


def test_a_scale_is_of_the_passes_before() -> None:
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    most = float(local(layer.weight).detach().bfloat16().abs().max())
    assert cube.fp8_scales.of(layer.weight) == [None] * 3
    for size in (2.0, 8.0, 1.0, 1.0, 1.0):
        _pass(layer, cube, size)
    assert _rows(layer) == [[1.0] * 3, [most] * 3, [2.0**-8] * 3]
    _pass(layer, cube, 4.0)
    assert _rows(layer)[INPUT] == [4.0, 1.0, 1.0]
    scales = cube.fp8_scales.of(layer.weight)
    for role, (largest, kind) in enumerate(((4.0, E4M3), (most, E4M3), (2.0**-8, E5M2))):
        assert scales[role] == scale_of(torch.tensor(largest), kind)
    assert cube.fp8_scales.cut == 2, "8 after 2, and 4 after 1: more than the factor of 1.75 that is left at most"


def test_scales_lie_as_memory_of_their_own_does() -> None:
    """Compiled code for a GPU copies an input that begins at no multiple of 16 bytes, each time, where the one that it
    was compiled for does: a launch more for each matrix that is rounded."""
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    _pass(layer, cube)
    scales = [scale for scale in cube.fp8_scales.of(layer.weight) if scale is not None]
    assert len(scales) == 3
    assert [scale.data_ptr() % 16 for scale in scales] == [0, 0, 0]


def test_memory_of_what_is_known() -> None:
    """To the byte as the planner has it: of nothing before the first pass."""
    cube = Cube.single(precision=DELAYED)
    layers = nn.Sequential(_layer(cube), nn.Identity(), _layer(cube))
    assert kept_bytes(layers.parameters()) == 0
    for _ in range(5):  # more than are remembered
        _pass(layers[0], cube)
    assert kept_bytes(layers.parameters()) == scale_bytes(1, 3) == 3 * (3 * 4 + 16)
    _pass(layers[2], cube)
    assert kept_bytes(layers.parameters()) == scale_bytes(2, 3)


def test_what_is_too_large_for_an_old_scale_is_cut_off_and_counted() -> None:
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    _pass(layer, cube)
    first = _pass(layer, cube)
    assert cube.fp8_scales.cut == 0
    cut = _pass(layer, cube, 1e6)
    assert cube.fp8_scales.cut == 1
    assert cut.abs().max() < 10 * first.abs().max(), "cut off"
    right = _pass(layer, cube, 1e6)
    assert right.abs().max() > 1e4 * first.abs().max(), "by a new scale"
    assert cube.fp8_scales.cut == 1


def test_who_writes_nothing() -> None:
    """Evaluations, forward passes alone, and micro-batches before the last one."""
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    _pass(layer, cube)
    before = _rows(layer)
    with torch.no_grad():
        layer(torch.full((ROWS, SIDE), 100.0))
    layer(torch.full((ROWS, SIDE), 100.0))
    with cube.no_sync():
        _pass(layer, cube, 4.0)
    assert _rows(layer) == before
    _pass(layer, cube, 2.0)
    assert _rows(layer)[INPUT] == [4.0, 1.0, -1.0], "micro-batches of a step are one"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("first", [False, True], ids=["later", "in the first pass"])
def test_what_is_not_finite_is_seen_and_forgotten(bad: float, first: bool) -> None:
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    assert layer.weight is not None
    if not first:
        _pass(layer, cube)
    x = torch.ones(ROWS, SIDE).requires_grad_()
    with torch.no_grad():
        x[2, 5] = bad
    y = layer(x)
    assert not y[2].isfinite().any()
    (y * 2.0**-8).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad[:, 5].isfinite().any()
    found = history_tensor(layer.weight)
    assert found is not None
    assert found.isfinite().all()
    layer.weight.grad = None
    after, exact = _pass(layer, cube), _pass(layer, Cube.single(precision=MixedPrecisionPolicy(compute=torch.bfloat16)))
    assert after.isfinite().all()
    assert float((after.float() - exact.float()).norm() / exact.float().norm()) < 0.06
    assert local(layer.weight.grad).isfinite().all()
    assert cube.fp8_scales.cut == 0


def test_nothing_but_zero() -> None:
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    layer(torch.zeros(ROWS, SIDE)).sum().backward()
    assert cube.fp8_scales.of(layer.weight)[INPUT] == 1.0
    assert layer(torch.zeros(0, SIDE)).shape == (0, SIDE)
    _pass(layer, cube)
    assert _rows(layer)[INPUT] == [1.0, 0.0, -1.0]


def test_a_copy_and_what_is_stored_go_on_alike() -> None:
    cube = Cube.single(precision=DELAYED)
    layer = _layer(cube)
    _pass(layer, cube, 3.0)
    twin, other, file = copy.deepcopy(layer), _layer(cube), io.BytesIO()
    restore_history(other.weight, history_tensor(layer.weight))
    torch.save(nn.Sequential(layer), file)
    file.seek(0)
    (loaded,) = torch.load(file, weights_only=False)
    for each in (twin, other, loaded):
        assert _pass(each, cube, 2.0, seed=1).equal(_pass(copy.deepcopy(layer), cube, 2.0, seed=1))
        assert _rows(each)[INPUT] == [2.0, 3.0, -1.0]
    assert _rows(layer)[INPUT] == [3.0, -1.0, -1.0]
    restore_history(other.weight, None)
    assert history_tensor(other.weight) is None


def test_another_length_of_history() -> None:
    longer = MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed", fp8_history=5)
    layer = _layer(Cube.single(precision=DELAYED))
    _pass(layer, layer.cube, 4.0)
    for policy, wanted in ((longer, [2.0, 4.0, -1.0, -1.0, -1.0]), (DELAYED, [1.0, 2.0, 4.0])):
        layer.cube = Cube.single(precision=policy)
        _pass(layer, layer.cube, wanted[0])
        assert _rows(layer)[INPUT] == wanted


class _Model(nn.Module):
    """Two layers that are used twice, one of them frozen, and one that some ranks use alone."""

    def __init__(self, cube: Cube, way: str) -> None:
        super().__init__()
        cube.manual_seed(1)
        self.first, self.second = Linear3D(SIDE, 96, cube, "z", std=0.2), Linear3D(96, SIDE, cube, "y", std=0.2)
        self.second.weight.requires_grad_(False)
        self.extra = Linear3D(SIDE, SIDE, cube, "z", std=0.2)
        self.cube, self.way = cube, way

    def block(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x)))
        return result

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        for _ in range(2):
            if self.way in ("recomputed", "reentrant"):
                x = checkpoint(self.block, x, use_reentrant=self.way == "reentrant")
            else:
                x = self.block(x)
        result = x.float().square().sum() / (32 * SIDE)
        if uses_extra:
            result = result + self.extra(x).float().square().sum() / (32 * SIDE)
        return result


def _trained(cube: Cube, way: str, steps: int, uses_extra: bool) -> tuple[_Model, list[float]]:
    model, losses = _Model(cube, way), []
    for step in range(steps):
        x = torch.randn(32, SIDE, generator=torch.Generator().manual_seed(step))
        # Nothing but gradients travels over data while a pass runs: ranks are not in step where they differ.
        loss = model(shard(x, cube, "z").detach().requires_grad_(), uses_extra and step > 0)
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    local(parameter).sub_(local(parameter.grad), alpha=0.01)
                    parameter.grad = None
    return model, losses


def _histories(model: nn.Module) -> dict[str, Tensor]:
    found = {name: history_tensor(each) for name, each in model.named_parameters()}
    return {name: each for name, each in found.items() if each is not None}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"weight_group_bytes": 0},
    "recomputed": {},
    "reentrant": {"shadow_weights": True, "overlap": False},
}


def _on_a_cube(shape: Shape) -> tuple[list[float], dict[str, Tensor], int]:
    found: list[tuple[list[float], dict[str, Tensor], int]] = []
    for way, speed in WAYS.items():
        cube = Cube(*shape, precision=DELAYED, speed=ExecutionPolicy(**speed))
        uses = cube.coordinate["data"] == 0
        model, losses = _trained(cube, way, 4, uses)
        found.append((losses, _histories(model), cube.fp8_scales.cut))
        cube.close()
        del model  # parameters are found by their numbers among all of the process
        gc.collect()
    plain, *others = found
    for other in others:
        assert other[1].keys() == plain[1].keys()
        assert all(other[1][name].equal(row) for name, row in plain[1].items())
        assert other[::2] == plain[::2]
    return plain


@pytest.mark.parametrize("shape", fast_alone((1, 1, 1, 2), (1, 1, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1)))
def test_scales_are_of_logical_matrices(shape: Shape) -> None:
    """On any cube, and by any way of working: histories have the same numbers but for rounding, on all ranks the same
    bits; a layer that some ranks alone use goes on everywhere."""
    model, _ = _trained(Cube.single(precision=DELAYED), "plain", 4, True)
    wanted = _histories(model)
    by_rank = run_ranks(ranks_of(shape), _on_a_cube, shape, timeout=40)
    _, rows, cut = by_rank[0]
    for _, others, other_cut in by_rank:
        assert other_cut == cut
        assert all(others[name].equal(row) for name, row in rows.items())
    assert rows.keys() == wanted.keys() == {"first.weight", "second.weight", "extra.weight"}
    for name, row in rows.items():
        if name == "extra.weight" and shape[3] > 1:
            continue  # of half of the rows
        roles = (INPUT, WEIGHT) if shape[3] > 1 else (INPUT, WEIGHT, GRADIENT)  # losses of both copies are summed
        for role in roles:
            off = (row[role] - wanted[name][role]).abs() / wanted[name][role]
            assert (off <= (0.3 if role == GRADIENT else 0.1)).all(), (name, role)

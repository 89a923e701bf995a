"""Linear layers in FP8: every number within the bound that the formats give, on any box; the same bits by any way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import (
    Cube,
    ExecutionPolicy,
    Face,
    Linear3D,
    MixedPrecisionPolicy,
    Projection3D,
    Sequences,
    TransformerLayer3D,
    gather,
    local,
    shard,
)
from tensor3d.ops.fp8 import Scaling
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, fill, full, name_of, ranks_of

SCALINGS: tuple[Scaling, ...] = ("rowwise", "tensorwise")
ROWS, COLUMNS, OUT = 24, 64, 96
BF16 = 2.0**-8
"""Its largest rounding error, of the number."""


def in_fp8(scaling: Scaling | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(compute=torch.bfloat16, fp8=scaling)


def _numbers(*shape: int) -> Tensor:
    """Rows of different sizes, the same on every rank, which bf16 has exactly."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp()
    return x.bfloat16().float()


def _linear(cube: Cube, face: Face) -> tuple[Linear3D, dict[str, Tensor], dict[str, Tensor]]:
    """A layer, and what came of it: results, and what a bound is made of."""
    cube.manual_seed(3)
    layer, out = Linear3D(COLUMNS, OUT, cube, face, std=0.3), "y" if face == "z" else "z"
    assert layer.bias is not None
    with torch.no_grad():
        local(layer.weight).copy_(local(layer.weight).bfloat16())  # which bf16 has exactly
    fill(layer.bias, _numbers(OUT, 1).flatten())
    x, dy = _numbers(ROWS, COLUMNS).requires_grad_(), _numbers(ROWS + 1, OUT)[:ROWS]
    y = gather(layer(shard(x, cube, face)), cube, out)  # type: ignore[arg-type]
    (y * dy).sum().backward()
    assert x.grad is not None
    w, b = full(layer.weight), full(layer.bias)
    got = {"y": y.detach(), "x": x.grad, "weight": full(layer.weight.grad), "bias": full(layer.bias.grad)}
    return layer, got, {"x": x.detach(), "w": w, "b": b, "dy": dy}


def _off(x: Tensor, dim: int, kind: str, scaling: Scaling | None) -> Tensor:
    """By how much an element may be off: a part of it, and of the largest one that its scale is for."""
    if scaling is None:
        return torch.zeros_like(x)
    unit, least = {"e4m3": (2.0**-4, 2.0**-10 / 224), "e5m2": (2.0**-3, 2.0**-17 / 28672)}[kind]
    return unit * x + least * (x.amax(dim, keepdim=True) if scaling == "rowwise" else x.amax())


def _bound(a: Tensor, b: Tensor, scaling: Scaling | None, kind: str, ranks: int) -> Tensor:
    """Of an error of a @ b: each of so many ranks rounds its part to bf16, and so are the sums."""
    a, b = a.abs(), b.abs()
    of_a, of_b = _off(a, 1, kind, scaling), _off(b, 0, "e4m3", scaling)
    by_rounding = of_a @ b + a @ of_b + of_a @ of_b
    return by_rounding + ranks * BF16 * (a @ b + by_rounding)


def _within(shape: Shape, scaling: Scaling) -> None:
    cube = Cube(*shape, precision=in_fp8(scaling))
    for face in ("z", "y"):
        _, got, of = _linear(cube, face)  # type: ignore[arg-type]
        x, w, b, dy = (of[name].double() for name in ("x", "w", "b", "dy"))
        n, kind = max(shape) + 1, "e4m3" if scaling == "rowwise" else "e5m2"
        wanted = {"y": x @ w.t() + b, "x": dy @ w, "weight": dy.t() @ x, "bias": dy.sum(0)}
        most = {
            "y": _bound(x, w.t(), scaling, "e4m3", n) + n * BF16 * b.abs(),
            "x": _bound(dy, w, scaling, kind, n),
            "weight": _bound(dy.t(), x, None if scaling == "rowwise" else scaling, kind, n),
            "bias": n * BF16 * dy.abs().sum(0),
        }
        for name, value in got.items():
            off = (value.double() - wanted[name]).abs()
            assert (off <= most[name]).all(), f"{face} {name}: {float((off / most[name]).max())} of the bound"
            in_fp8_too = name in ("y", "x") or (name == "weight" and scaling == "tensorwise")
            exact = float(off.norm() / wanted[name].norm())
            assert (exact > 0.01) == in_fp8_too, f"{name} is off by {exact}: the wrong products are in FP8"
    assert cube.fp8_uses == {"fp8": 2}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), *fast_alone((1, 2, 2, 1), (2, 2, 1, 1), (2, 2, 2, 1))], ids=str)
def test_every_number_is_within_its_bound(shape: Shape, scaling: Scaling) -> None:
    run_ranks(ranks_of(shape), _within, shape, scaling)


def _beside_one_device(shape: Shape, scaling: Scaling) -> dict[str, float]:
    _, got, _ = _linear(Cube(*shape, precision=in_fp8(scaling)), "z")
    _, alone, _ = _linear(Cube.single(precision=in_fp8(scaling)), "z")
    return {name: float((got[name] - alone[name]).norm() / alone[name].norm()) for name in got}


@pytest.mark.parametrize("shape", fast_alone((2, 1, 1, 1), (1, 2, 2, 1)))
def test_the_cube_matters_by_rounding_alone(shape: Shape) -> None:
    """Where rows alone are split, row-wise scales are the same, and bf16's roundings are all that is left."""
    most = BF16 if shape[1] == shape[2] == 1 else 0.05
    for off in run_ranks(ranks_of(shape), _beside_one_device, shape, "rowwise"):
        assert max(off.values()) <= most, off
    for off in run_ranks(ranks_of(shape), _beside_one_device, shape, "tensorwise"):
        assert max(off.values()) <= 0.06, off


class _Model(nn.Module):
    """A block twice, with a frozen weight, and a projection."""

    def __init__(self, cube: Cube, **options: Any) -> None:
        super().__init__()
        self.layer = TransformerLayer3D(64, 4, cube, 128, std=0.2, **options)
        self.projection = Projection3D(64, 67, cube)
        self.layer.mlp.up.weight.requires_grad_(False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        result: Tensor = self.projection(self.layer(self.layer(x, sequences), sequences))
        return result


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"weight_group_bytes": 0}, {}),
    "no overlap": ({"overlap": False, "weight_group_bytes": 0}, {}),
    "groups": ({"weight_group_bytes": 2**40}, {}),
    "shadows": ({"shadow_weights": True}, {}),
    "kept": ({}, {"reshard_after_forward": False}),
    "recomputed": ({}, {"recompute": "layer"}),
    "attention recomputed": ({"weight_group_bytes": 2**40}, {"recompute": "attention"}),
}


def _by_all_ways(shape: Shape, scaling: Scaling) -> None:
    first: list[Tensor] = []
    for name, (speed, options) in WAYS.items():
        cube = Cube(*shape, precision=in_fp8(scaling), speed=ExecutionPolicy(**speed))
        cube.manual_seed(0)
        model = _Model(cube, **options)
        rows = 16 // (shape[0] * shape[1])  # of x on face z
        x = torch.randn(rows, 64 // shape[2], generator=torch.Generator().manual_seed(cube.rank)).requires_grad_()
        sequences = Sequences.from_lengths([16 // (shape[0] * shape[2])])
        for _ in range(2):
            y = model(x, sequences)
            y.float().square().sum().backward()
        found = [y.detach(), x.grad, *(local(p.grad) for p in model.parameters() if p.requires_grad)]
        assert cube.fp8_uses["fp8"] >= 16
        assert cube.fp8_uses["kept out"] == 2
        assert cube.fp8_uses.keys() == {"fp8", "kept out"}
        if not first:
            first = found
        for number, (one, other) in enumerate(itertools.zip_longest(found, first)):
            assert torch.equal(one, other), f"{name}: tensor {number}"
        cube.close()


@pytest.mark.parametrize("scaling", [*SCALINGS, "delayed"])
@pytest.mark.parametrize(
    "shape", [pytest.param(s, id=name_of(s), marks=pytest.mark.slow) for s in [(2, 1, 1, 1), (2, 2, 1, 1)]]
)
def test_the_bits_do_not_depend_on_how_the_work_is_done(shape: Shape, scaling: Scaling) -> None:
    run_ranks(ranks_of(shape), _by_all_ways, shape, scaling)


def test_what_stays_in_bf16_is_counted_and_has_its_bits() -> None:
    exact, rounded = Cube.single(precision=in_fp8(None)), Cube.single(precision=in_fp8("rowwise"))
    for make in (
        lambda cube: Projection3D(32, 48, cube),
        lambda cube: Linear3D(32, 40, cube),  # 40 does not divide by 16
        lambda cube: Linear3D(24, 32, cube),
    ):
        results = []
        for cube in (exact, rounded):
            cube.manual_seed(1)
            layer = make(cube)
            x = torch.ones(3, layer.weight.shape[1]).requires_grad_()
            y = layer(x)
            y.sum().backward()
            results.append((y, x.grad, layer.weight.grad))
        assert all(one.equal(other) for one, other in zip(*results, strict=True))  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.float16):
        Linear3D(32, 32, rounded)(torch.ones(3, 32))
    assert rounded.fp8_uses == {"kept out": 1, "sides": 2, "type": 1}
    assert not exact.fp8_uses


def test_ranks_without_rows() -> None:
    layer = Linear3D(32, 48, Cube.single(precision=in_fp8("tensorwise")))
    layer(torch.zeros(0, 32)).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_overflow_reaches_the_weights_gradient() -> None:
    """By which a loss scale, and clipping, know of it."""
    for scaling in SCALINGS:
        layer = Linear3D(32, 48, Cube.single(precision=in_fp8(scaling)))
        x = torch.randn(5, 32).requires_grad_()
        direction = torch.ones(5, 48)
        direction[2, 7] = torch.inf
        (layer(x) * direction).sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        assert not x.grad[2].isfinite().any()
        assert not layer.weight.grad[7].isfinite().any()

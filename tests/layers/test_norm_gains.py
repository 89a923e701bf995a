"""Norms that multiply by 1 + weight, or by nothing, equal plain PyTorch and themselves on ranks, eager and fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, LayerNorm3D, RMSNorm3D, explain
from tests.ranks import run_ranks
from tests.single_device_reference import compare, error, fast_alone, fused, make_twins, ranks_of, worst

Shape = tuple[int, int, int, int]
H = 24

MADE: dict[str, Callable[[Cube], nn.Module]] = {
    "layer norm, 1 + weight": lambda cube: LayerNorm3D(H, cube, eps=1e-3, zero_centered=True),
    "layer norm, 1 + weight, no bias": lambda cube: LayerNorm3D(H, cube, eps=1e-3, bias=False, zero_centered=True),
    "layer norm, no weight": lambda cube: LayerNorm3D(H, cube, eps=1e-3, elementwise_affine=False),
    "rms norm, 1 + weight": lambda cube: RMSNorm3D(H, cube, eps=1e-3, zero_centered=True),
    "rms norm, no weight": lambda cube: RMSNorm3D(H, cube, eps=1e-3, elementwise_affine=False),
}


def by_torch(norm: nn.Module, x: Tensor) -> Tensor:
    weight, bias = norm.weight, getattr(norm, "bias", None)
    gain = None if weight is None else 1 + weight.to(x.dtype)
    if isinstance(norm, RMSNorm3D):
        return F.rms_norm(x, (H,), gain, 1e-3)
    return F.layer_norm(x, (H,), gain, None if bias is None else bias.to(x.dtype), 1e-3)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_they_equal_torchs(kind: str, dtype: torch.dtype) -> None:
    _, norm, _, _ = make_twins(lambda cube: MADE[kind](cube).to(dtype), Cube.single())
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(0), dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    got, wanted = norm(ours), by_torch(norm, theirs)
    direction = torch.randn(6, H, generator=torch.Generator().manual_seed(1), dtype=dtype)
    got.backward(direction)
    gradients = [each.grad for each in norm.parameters()]
    for each in norm.parameters():
        each.grad = None
    parameters = list(norm.parameters())
    of_torch = torch.autograd.grad(wanted, [theirs, *parameters], direction.double())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    assert error(got.double(), wanted) <= tolerance
    for mine, right in zip([ours.grad, *gradients], of_torch, strict=True):
        assert mine is not None
        assert error(mine.double(), right.double()) <= tolerance


def _on_ranks(shape: Shape) -> dict[str, float]:
    errors, cube = {}, Cube(*shape)
    for whole in (cube, fused(cube)):
        for kind, make in MADE.items():
            found = compare(make, whole, rows=16, columns=H, face_in="z", face_out="z", dtype=torch.float64)
            errors |= {f"{kind} {name} {whole.speed.compile}": value for name, value in found.items()}
    return errors


@pytest.mark.parametrize("shape", fast_alone((1, 1, 2, 1), (1, 2, 2, 2), (2, 2, 2, 1)))
def test_they_equal_themselves_on_ranks(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _on_ranks, shape))
    assert value <= 1e-12, f"{name} differs by {value}"


def test_what_they_say_of_themselves() -> None:
    cube = Cube.single()
    assert "eps=0.001, zero_centered=True" in repr(MADE["layer norm, 1 + weight"](cube))
    assert "eps=0.001, elementwise_affine=False" in repr(MADE["layer norm, no weight"](cube))
    assert not list(MADE["rms norm, no weight"](cube).parameters())
    assert "LayerNorm3D" in str(explain(MADE["layer norm, no weight"](cube), tokens=8))

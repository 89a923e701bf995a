"""Rotary positions: the turn against complex numbers, its gradient, and what it is for: only distances count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tensor3d import Attention3D, Cube, Sequences
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.ops.rotary import rotary, rotary_of_parts
from tests.single_device_reference import CPU


def by_complex_numbers(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """(i, i + d/2) as real and imaginary part, times exp(i * angle)."""
    dim = x.shape[-1]
    speeds = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    angles = positions.float()[:, None] * speeds
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_a_product_of_complex_numbers(base: float, dtype: torch.dtype) -> None:
    positions = Sequences.from_lengths([5, 1, 700]).positions
    x = torch.randn(706, 3, 8, dtype=dtype)
    got = rotary(x, positions, base)
    assert got.dtype == dtype
    assert torch.allclose(got, by_complex_numbers(x, positions, base), atol=1e-5)


def test_the_first_row_of_a_sequence_stays_and_lengths_of_pairs_stay() -> None:
    x = torch.randn(9, 2, 6, dtype=torch.float64)
    got = rotary(x, Sequences.from_lengths([4, 5]).positions)
    assert torch.equal(got[[0, 4]], x[[0, 4]])
    assert not torch.allclose(got[[1, 5]], x[[1, 5]])
    assert torch.allclose(torch.hypot(*got.chunk(2, -1)), torch.hypot(*x.chunk(2, -1)), rtol=1e-6)


def test_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64).expand(2, 50, 1, 16)
    positions = torch.arange(50)
    scores = (rotary(q, positions)[:, 0] @ rotary(k, positions)[:, 0].T).diagonal(3)
    assert torch.allclose(scores, scores[0].expand_as(scores), atol=1e-5)
    assert abs(float((q[0] * k[0]).sum() - scores[0])) > 1e-3, "three places apart is not the same place"


def test_positions_divided_by_a_factor() -> None:
    """Every third place turns as every one does, both ways and in the parts of one product."""
    q, thirds = torch.randn(30, 2, 6, dtype=torch.float64, requires_grad=True), 3 * torch.arange(30)
    got, wanted = rotary(q, thirds, 500.0, 3.0), rotary(q, thirds // 3, 500.0)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    (back,) = torch.autograd.grad(got.square()[:, :, 0].sum(), q, retain_graph=True)
    torch.testing.assert_close(back, torch.autograd.grad(wanted.square()[:, :, 0].sum(), q)[0], rtol=1e-6, atol=1e-6)
    product, regions = torch.stack([q, q, q], 2), CompiledRegions(False, CPU)
    parts = rotary_of_parts(product, thirds, 500.0, regions, 3.0)
    assert torch.equal(parts[0], got)
    (of_parts,) = torch.autograd.grad(parts[1].square()[:, :, 0].sum(), q)
    torch.testing.assert_close(of_parts, back)


def test_the_gradient_is_exact() -> None:
    x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([0, 1, 2, 0, 1, 900])
    assert torch.autograd.gradcheck(lambda t: rotary(t, positions), (x,))


def test_only_positions_are_saved() -> None:
    saved: list[Tensor] = []
    positions = torch.arange(32)
    x = torch.randn(32, 4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        rotary(x, positions)
    assert [t.data_ptr() for t in saved] == [positions.data_ptr()]


def test_bf16_is_turned_in_fp32() -> None:
    x, positions = torch.randn(4096, 1, 8).bfloat16(), torch.arange(4096)
    got = rotary(x, positions)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotary(x.float(), positions).bfloat16())


@pytest.mark.parametrize("each", [1, 3], ids=["a head of keys each", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_parts_of_one_product_are_turned_as_one_by_one(each: int, dtype: torch.dtype) -> None:
    """Forward and backward; values stay, and only positions are saved."""
    groups, d, positions = 2, 6, Sequences.from_lengths([5, 1, 34]).positions
    product = torch.randn(40, groups, each + 2, d).to(dtype).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        got = rotary_of_parts(product, positions, 500.0, CompiledRegions(False, CPU))
    assert [t.data_ptr() for t in saved] == [positions.data_ptr()]
    twin = product.detach().clone().requires_grad_()
    q, k, v = twin.split([each, 1, 1], 2)
    wanted = [rotary(q.flatten(1, 2), positions, 500.0), rotary(k.squeeze(2), positions, 500.0), v.squeeze(2)]
    assert [(part.shape, part.dtype) for part in got] == [(part.shape, dtype) for part in wanted]
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    directions = [torch.randn(part.shape).to(dtype) for part in wanted]
    torch.autograd.backward(got, directions)
    torch.autograd.backward(wanted, directions)
    torch.testing.assert_close(product.grad, twin.grad)


def test_positions_start_again_in_each_sequence() -> None:
    sequences = Sequences.from_lengths([3, 1, 2])
    assert sequences.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert sequences.positions.dtype == torch.int64
    assert sequences.positions is sequences.positions, "made once for all layers"
    assert Sequences.from_lengths([]).positions.shape == (0,)


def test_what_cannot_be_turned_is_refused() -> None:
    positions = torch.arange(3)
    with pytest.raises(ValueError, match=r"must be even\. Got 5"):
        rotary(torch.zeros(3, 1, 5), positions)
    with pytest.raises(ValueError, match=r"above 0\. Got 0\.0"):
        rotary(torch.zeros(3, 1, 4), positions, base=0.0)
    with pytest.raises(ValueError, match=r"factor of rotary positions must be above 0\. Got -1\.0"):
        rotary(torch.zeros(3, 1, 4), positions, factor=-1.0)
    with pytest.raises(ValueError, match=r"rotary_factor=2\.0 needs a rotary_base"):
        Attention3D(8, 2, Cube.single(), rotary_factor=2.0)
    with pytest.raises(ValueError, match=r"Got \(4, 1, 4\) and \(3,\)"):
        rotary(torch.zeros(4, 1, 4), positions)

"""FP8: what is rounded, by what scale, within what error; the emulation and the kernel's call have the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d.ops import fp8
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.ops.fp8 import (
    E4M3,
    E5M2,
    Current,
    _round_by,
    fp8_product,
    product_of_rounded,
    quantise,
    rounded,
    suits_fp8,
)

UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}
LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}
"""Half of the distance between subnormal numbers."""
KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SCALING_NAMES: tuple[Current, ...] = ("rowwise", "tensorwise")
SCALINGS = pytest.mark.parametrize("scaling", SCALING_NAMES)


def _multiplies_on_a_cpu() -> bool:
    """Whether this PyTorch's operator does, with scales of rows, of both types and with a bias."""
    rows, scale = torch.zeros(16, 16), torch.ones(16, 1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            bias = torch.zeros(16, dtype=dtype)
            fp8.scaled_mm(rows.to(E5M2), rows.to(E4M3).t(), scale, scale.view(1, 16), bias=bias, out_dtype=dtype)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


WITH_OPERATOR = pytest.mark.skipif(
    not _multiplies_on_a_cpu(), reason="this PyTorch multiplies FP8 by row-wise scales on GPUs alone"
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def values(*shape: int, wild: bool = True) -> Tensor:
    """Rows and columns of very different sizes, in bf16."""
    x = torch.randn(*shape)
    return (x * torch.exp(4 * torch.randn(shape[0], 1) + 2 * torch.randn(1, shape[1])) if wild else x).bfloat16()


def test_by_hand() -> None:
    found, scale = quantise(torch.tensor([[1.75, 1.0, 0.1, 0.0], [448.0, 16.5, -17.5, 2.0**-10]]), 1, E4M3)
    assert scale.tolist() == [[2.0**-8], [1.0]]
    # 25.6 lies between 24 and 26; 16.5 and 17.5 between numbers 2 apart; half of the least number goes to the even 0.
    assert found.float().tolist() == [[448.0, 256.0, 26.0, 0.0], [448.0, 16.0, -18.0, 0.0]]
    found, scale = quantise(torch.tensor([[1.75, 1.0], [3.5, 0.1]]), None, E5M2)
    assert (scale.item(), found.float().tolist()) == (2.0**-14, [[28672.0, 16384.0], [57344.0, 1536.0]])


@KINDS
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_all_that_is_lost(kind: torch.dtype, dim: int | None, dtype: torch.dtype) -> None:
    x = values(40, 60).to(dtype)
    found, scale = quantise(x, dim, kind)
    mantissa, _ = scale.frexp()
    assert (mantissa == 0.5).all(), "a power of two"
    top = found.double().abs().amax(() if dim is None else dim)
    most = torch.finfo(kind).max
    assert ((top >= most / 2) & (top <= most)).all(), "no bit of the range is left"
    off = (found.double() * scale.double() - x.double()).abs()
    assert (off <= torch.maximum(UNIT[kind] * x.double().abs(), LEAST[kind] * scale.double())).all()
    assert found.stride() == x.stride()
    assert quantise(x.t(), dim if dim is None else 1 - dim, kind)[0].float().equal(found.float().t())


@KINDS
def test_extremes(kind: torch.dtype) -> None:
    rows = torch.tensor([[0.0, -0.0], [1e-42, -1e-43], [3e38, -1.0], [2.0**-126, 0.0]])
    found, scale = quantise(rows, 1, kind)
    back = found.float() * scale
    assert back[0].tolist() == [0.0, 0.0]
    assert back[1].abs().max() < 2.0**-126
    assert back[2] == pytest.approx([3e38, 0.0], rel=UNIT[kind])
    assert back[3].tolist() == [2.0**-126, 0.0]


@SCALINGS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible(scaling: Current, bad: float) -> None:
    a, b = torch.randn(4, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    a[1, 3] = bad
    c = fp8_product(a, b, scaling)
    lost = c.isnan().all(1).tolist()
    assert lost == ([False, True, False, False] if scaling == "rowwise" else [True] * 4)
    c = fp8_product(b.t(), a.t(), scaling)
    assert c.isnan().all(0).tolist() == lost
    assert c[:, 0].isfinite().all() == (scaling == "rowwise")


def bound(a: Tensor, b: Tensor, scaling: Current, kind: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Of |error|, element by element, as `fp8_product` states it; with a last rounding to bf16."""

    def off(x: Tensor, dim: int, kind: torch.dtype) -> Tensor:
        scale = quantise(x, dim if scaling == "rowwise" else None, kind)[1].double()
        return torch.maximum(UNIT[kind] * x.double().abs(), LEAST[kind] * scale)

    of_a, of_b, a, b = off(a, 1, kind), off(b, 0, E4M3), a.double().abs(), b.double().abs()
    by_rounding = of_a @ b + a @ of_b + of_a @ of_b
    most = a @ b + by_rounding + (0 if bias is None else bias.double().abs())
    return by_rounding + (2.0**-8 + a.shape[1] * 2.0**-23) * most


@KINDS
@SCALINGS
@pytest.mark.parametrize("wild", [False, True], ids=["alike", "wild"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_error_is_within_its_bound(kind: torch.dtype, scaling: Current, wild: bool, transposed: bool) -> None:
    a, b, bias = values(30, 80, wild=wild), values(80, 48, wild=wild), torch.randn(48).bfloat16()
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    c = fp8_product(a, b, scaling, bias, kind=kind)
    assert c.dtype == torch.bfloat16
    exact = a.double() @ b.double() + bias.double()
    off, most = (c.double() - exact).abs(), bound(a, b, scaling, kind, bias)
    assert (off <= most).all()
    assert not c.equal((a.float() @ b.float() + bias).bfloat16()), "nothing was rounded"
    if kind == E4M3 and not wild:  # the bound in one number, where nothing is subnormal
        assert (off <= (2 * 2**-4 + 2**-7) * (a.double().abs() @ b.double().abs() + bias.double().abs())).all()


def test_rows_stand_alone() -> None:
    """With row-wise scales a row's result does not depend on which others are there: sharding rows changes nothing."""
    a, b = values(12, 64), values(64, 32)
    whole = fp8_product(a, b, "rowwise")
    parts = torch.cat([fp8_product(part, b, "rowwise") for part in a.split([5, 0, 7])])
    torch.testing.assert_close(parts, whole, rtol=2**-8, atol=0)
    assert not torch.allclose(fp8_product(a[:1], b, "tensorwise"), fp8_product(a, b, "tensorwise")[:1], rtol=2**-4)


@pytest.mark.parametrize("shape", [(0, 32, 16), (3, 0, 16), (3, 32, 0)])
@SCALINGS
def test_nothing_times_something(shape: tuple[int, int, int], scaling: Current) -> None:
    rows, inner, columns = shape
    bias = torch.randn(columns).bfloat16()
    c = fp8_product(torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16(), scaling, bias)
    assert c.equal(bias.expand(rows, columns))


@WITH_OPERATOR
@KINDS
@SCALINGS
@pytest.mark.parametrize(("rows", "inner"), [(20, 48), (20, 37), (1, 48)], ids=["whole", "filled up", "one row"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_is_called_for_the_same_numbers(
    kind: torch.dtype, scaling: Current, rows: int, inner: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operator has a CPU's way, too: without bits to lose in a last rounding, it gives what is emulated."""
    a, b, bias = values(rows, inner), values(inner, 32), torch.randn(32).bfloat16()
    if transposed:
        a, b = values(inner, rows).t(), b.t().contiguous().t()
    emulated, rounded = (
        fp8_product(a.float(), b.float(), scaling, kind=kind),
        fp8_product(a, b, scaling, bias, kind=kind),
    )
    monkeypatch.setattr(fp8, "has_kernel", lambda _: True)
    called = []

    def checked(left: Tensor, right: Tensor, *scales: Tensor, **options: object) -> Tensor:
        assert left.stride() == (left.shape[1], 1)
        assert right.stride() == (1, right.shape[0])
        assert left.shape[1] % 16 == right.shape[1] % 16 == 0
        called.append(options["use_fast_accum"])
        return operator(left, right, *scales, **options)

    operator = fp8.scaled_mm
    monkeypatch.setattr(fp8, "scaled_mm", checked)
    size = a.float().abs() @ b.float().abs() + bias.abs()
    assert ((fp8_product(a.float(), b.float(), scaling, kind=kind) - emulated).abs() <= 2**-20 * size).all()
    assert ((fp8_product(a, b, scaling, bias, kind=kind, fast=True) - rounded).abs() <= 2**-7 * size).all()
    assert called == [False, True]


@WITH_OPERATOR
def test_where_there_is_a_kernel_what_quantises_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def regions(region: Any, x: Tensor, *settings: Any) -> Any:
        asked.append((region, x.is_contiguous()))
        return region(x, *settings)

    a, b = values(20, 48), values(32, 48).t()
    for scaling in SCALING_NAMES:
        wanted = fp8_product(a, b, scaling, regions=regions)
        assert not asked, "only what the kernel is given"
        with monkeypatch.context() as patched:
            patched.setattr(fp8, "has_kernel", lambda _: True)
            got = fp8_product(a, b, scaling, regions=regions)
        assert asked == [(quantise, True)] * 2
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-2)
        asked.clear()


@pytest.mark.slow  # for the seconds that a compiler takes
@KINDS
def test_compiled_rounding_has_the_bits_of_eager(kind: torch.dtype) -> None:
    regions = CompiledRegions(True, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(300, 96) * torch.logspace(-6, 4, 300)[:, None]).to(dtype)
        for call in ((quantise, x, None, kind), (quantise, x, 1, kind), (_round_by, x, torch.tensor(2.0**-6), kind)):
            for got, wanted in zip(regions(*call), call[0](*call[1:]), strict=True):
                assert torch.equal(got.float(), wanted.float())


def test_autocast_does_not_reach_the_emulation() -> None:
    a, b = values(20, 48).float(), values(48, 32).float()
    wanted = fp8_product(a, b, "rowwise")
    with torch.autocast("cpu", torch.bfloat16):
        assert fp8_product(a, b, "rowwise").equal(wanted)


def test_which_sides_and_which_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suits_fp8(32, 16)
    assert not suits_fp8(32, 24)
    assert not suits_fp8(8, 32)
    assert not fp8.has_kernel(torch.device("cpu"))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        fp8._is_new.cache_clear()
        assert fp8.has_kernel(gpu) is has
    fp8._is_new.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert not fp8.has_kernel(gpu)


@KINDS
@pytest.mark.parametrize("transposed", [False, True])
def test_by_an_old_scale(kind: torch.dtype, transposed: bool) -> None:
    """What fits has the bits of current scaling; what does not is the largest number, and NaN what is not finite."""
    x = values(40, 48, wild=False)
    wanted, scale = quantise(x, None, kind)
    laid = x.t().contiguous().t() if transposed else x
    (found, same), largest = rounded(laid, kind, scale)
    assert found.float().equal(wanted.float())
    assert same is scale
    assert largest == x.abs().max()
    (again, current), seen = rounded(laid, kind, None)
    assert again.float().equal(wanted.float())
    assert (current, seen) == (scale, largest)
    laid[3, 5], laid[4, 6], laid[5, 7], laid[6, 8] = 1e30, -1e38, math.inf, math.nan
    (found, _), largest = rounded(laid, kind, scale)
    assert found[3, 5].float() == torch.finfo(kind).max == -found[4, 6].float()
    assert found.float().isnan().nonzero().tolist() == [[5, 7], [6, 8]]
    assert largest == math.inf
    (found, current), largest = rounded(laid, kind, None)
    assert found.float().isnan().all()
    assert current.isnan()
    assert largest == laid[4, 6].abs()


@WITH_OPERATOR
def test_what_was_rounded_before_goes_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = values(20, 48, wild=False), values(32, 48, wild=False).t(), torch.randn(32).bfloat16()
    of_a, of_b = rounded(a, E5M2, None)[0], rounded(b, E4M3, None)[0]
    wanted = product_of_rounded(of_a, of_b, torch.bfloat16, bias)
    assert wanted.equal(fp8_product(a, b, "tensorwise", bias, kind=E5M2))
    monkeypatch.setattr(fp8, "has_kernel", lambda _: True)
    got = product_of_rounded(of_a, of_b, torch.bfloat16, bias)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-2)

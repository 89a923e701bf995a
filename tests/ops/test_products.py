"""Products of fp32 matrices on CPUs: the same by both libraries, and which of them is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tensor3d import Cube, Linear3D
from tensor3d.ops import products
from tensor3d.ops.products import added_product, product, wide_product
from tensor3d.sharding.param_layout import local
from tools.bench.operators import OperatorCounter

WITH_ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of PyTorch comes without oneDNN"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """A processor on which oneDNN is the faster, and the sizes of the products that it is asked for."""
    found = []
    asked = products.by_onednn

    def counted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((*a.shape, b.shape[1]))
        return asked(a, b, bias)

    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(products, "by_onednn", counted)
    return found


def matrix(rows: int, columns: int, *, transposed: bool) -> Tensor:
    return torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)


@WITH_ONEDNN
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_both_libraries_give_the_same(left: bool, right: bool, biased: bool, calls: list[tuple[int, int, int]]) -> None:
    a, b = matrix(261, 130, transposed=left), matrix(130, 259, transposed=right)
    bias = torch.randn(259) if biased else None
    got, wanted = product(a, b, bias), a.double() @ b.double() + (0.0 if bias is None else bias.double())
    assert calls == [(261, 130, 259)]
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert F.mse_loss(got.double(), wanted).sqrt() <= 1e-6 * wanted.std()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.randn(128, 128), torch.randn(128, 128)),  # small
        (torch.randn(8192, 32), torch.randn(32, 8192)),  # thin
        (torch.randn(4096, 128).t(), torch.randn(4096, 128)),  # a small gradient of many rows
        (torch.randn(0, 256), torch.randn(256, 8192)),  # no row
        (torch.randn(256, 0), torch.randn(0, 8192)),
        (torch.randn(512, 512, dtype=torch.float64), torch.randn(512, 512, dtype=torch.float64)),
        (torch.randn(512, 512).bfloat16(), torch.randn(512, 512).bfloat16()),  # PyTorch asks oneDNN itself
    ],
    ids=["small", "thin", "short gradient", "no row", "no column", "fp64", "bf16"],
)
def test_what_pytorch_is_left(a: Tensor, b: Tensor, calls: list[tuple[int, int, int]]) -> None:
    assert torch.equal(product(a, b), a @ b)
    assert calls == []


def test_who_counts_sees_a_plain_product(calls: list[tuple[int, int, int]]) -> None:
    with FlopCounterMode(display=False) as counter:
        product(torch.randn(512, 512), torch.randn(512, 512))
    assert counter.get_total_flops() == 2 * 512**3
    assert calls == []


@WITH_ONEDNN
def test_a_layer_equals_pytorchs(calls: list[tuple[int, int, int]]) -> None:
    cube = Cube.single()
    ours, theirs = Linear3D(256, 320, cube, "z"), nn.Linear(256, 320)
    with torch.no_grad():
        theirs.weight.copy_(local(ours.weight))
        assert ours.bias is not None
        theirs.bias.copy_(local(ours.bias).normal_())
    x = torch.randn(384, 256, requires_grad=True)
    y, weights = x.detach().clone().requires_grad_(), torch.randn(384, 320)
    (ours(x) * weights).sum().backward()
    (theirs(y) * weights).sum().backward()
    assert calls == [(384, 256, 320), (384, 320, 256), (320, 384, 256)], "forward, dA, dW"
    torch.testing.assert_close(ours(x), theirs(y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    for mine, other in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
        assert mine.grad is not None
        torch.testing.assert_close(local(mine.grad), other.grad, rtol=1e-5, atol=1e-4)


def test_onednn_can_be_switched_off(calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    product(torch.randn(512, 512), torch.randn(512, 512))
    assert calls == []


@pytest.mark.parametrize(
    ("vendor", "capability", "slow"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_which_processors(vendor: str, capability: str, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: some\n" if vendor else "processor\t: 0\n"
    # Not `Path.read_text` itself, by which threads of other tests may be reading now.
    monkeypatch.setattr(products, "Path", lambda _: SimpleNamespace(read_text=lambda: text))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert products._mkl_is_slow.__wrapped__() is slow


def test_a_device_adds_where_it_multiplies() -> None:
    """On a CPU the bits are those of a product and a sum."""
    addend, a, b = torch.randn(8, 40).bfloat16(), torch.randn(8, 24).bfloat16(), torch.randn(24, 40).bfloat16()
    before = addend.clone()
    assert torch.equal(added_product(addend, a, b), product(a, b) + addend)
    assert torch.equal(added_product(None, a, b), product(a, b))
    assert torch.equal(addend, before)
    with OperatorCounter() as counter:
        added_product(*(each.to("meta") for each in (addend, a, b)))
    assert counter.operators == {"addmm": 1}


def test_sums_of_narrow_products_are_wide_where_a_gpu_writes_them() -> None:
    """By the one operator, without a conversion; on a CPU what the narrow product gives."""
    a, b = torch.randn(8, 24).bfloat16(), torch.randn(8, 40).bfloat16()
    assert torch.equal(wide_product(a.t(), b, torch.float32), product(a.t(), b).float())
    assert wide_product(a.t(), b, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(wide_product(a.t().double(), b.double(), torch.float64), a.t().double() @ b.double())
    with OperatorCounter() as counter:
        result = wide_product(a.t().to("meta"), b.to("meta"), torch.float32)
    assert (result.dtype, result.shape) == (torch.float32, (24, 40))
    assert counter.operators == {"mm": 1}

"""Sequences that attend where they lie, on a CPU: the same as each alone, in less memory, by one kernel call each."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tensor3d import Sequences, attention
from tools.bench.harness.memory import peak_bytes

CPU = sys.modules["tensor3d.attention.cpu"]
LENGTHS = (130, 200, 200, 151)
"""Long enough to be left where they lie; the two in the middle are one call."""
ROWS, HEADS, DIM = sum(LENGTHS), 3, 16


class Kernels(TorchDispatchMode):
    """Counts the calls of PyTorch's kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, HEADS, DIM, dtype=dtype, requires_grad=True) for _ in range(3)]


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Each sequence by itself, in whole products."""
    parts = zip(*(t.transpose(0, 1).split(LENGTHS, 1) for t in (q, k, v)), strict=True)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.cat([F.scaled_dot_product_attention(*part, is_causal=causal) for part in parts], 1).transpose(0, 1)


def check_equals_each_alone(dtype: torch.dtype, tolerance: float, causal: bool, calls: list[int]) -> None:
    q, k, v = inputs(dtype)
    weights = torch.randn(ROWS, HEADS, DIM, dtype=dtype)
    with Kernels() as kernels:
        mine = attention(q, k, v, Sequences.from_lengths(LENGTHS), causal=causal)
        mine_gradients = torch.autograd.grad(mine, (q, k, v), weights)
    assert list(kernels.calls.values()) == calls
    theirs = alone(q.double(), k.double(), v.double(), causal)
    torch.testing.assert_close(mine.double(), theirs, atol=tolerance, rtol=tolerance)
    for a, b in zip(mine_gradients, torch.autograd.grad(theirs, (q, k, v), weights.double()), strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=5 * tolerance, rtol=5 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_equals_each_alone(dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    """By one call of the kernel each way for each run of equal lengths."""
    check_equals_each_alone(dtype, tolerance, causal, [3, 3])


@pytest.mark.parametrize("at_once", [1, 2 * 200**2, 4 * 200**2], ids=["a head", "two heads", "a member and more"])
@pytest.mark.parametrize(
    ("dtype", "has_products", "bounds", "backward"),
    [
        (torch.bfloat16, True, (140, 180), 2),  # one of three runs is of middling length
        (torch.bfloat16, True, (0, 999), 0),
        (torch.bfloat16, False, (140, 180), 3),
        (torch.float16, True, (140, 180), 3),
    ],
    ids=str,
)
def test_narrow_types_on_any_processor(
    dtype: torch.dtype,
    has_products: bool,
    bounds: tuple[int, int],
    backward: int,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short sequences go back by the kernel in fp32, middling ones in products, long ones by the kernel."""
    monkeypatch.setattr(CPU, "SHORT", bounds[0])
    monkeypatch.setattr(CPU, "MIDDLING", bounds[1])
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_products)
    monkeypatch.setattr(CPU, "_AT_ONCE", at_once)
    for causal in (False, True):
        check_equals_each_alone(dtype, 4e-2, causal, [3, backward] if backward else [3])


@pytest.mark.parametrize("bounds", [(999, 999), (0, 999), (0, 0)], ids=["fp32", "products", "kernel"])
def test_bf16_of_any_strides(bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one fused tensor, and a gradient that is one number everywhere."""
    monkeypatch.setattr(CPU, "SHORT", bounds[0])
    monkeypatch.setattr(CPU, "MIDDLING", bounds[1])
    fused = torch.stack(inputs(torch.bfloat16), 1).detach().requires_grad_()
    wide = fused.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(alone(*wide.unbind(1), False).sum(), wide)
    (gradient,) = torch.autograd.grad(attention(*fused.unbind(1), Sequences.from_lengths(LENGTHS)).sum(), fused)
    torch.testing.assert_close(gradient.double(), expected, atol=3e-2, rtol=3e-2)


def test_scores_are_wide_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass may be called inside of it, too."""
    monkeypatch.setattr(CPU, "SHORT", 0)
    q, k, v = (3 * t.detach() for t in inputs(torch.bfloat16))
    found = []
    for enabled in (False, True):
        leaf = q.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            (gradient,) = torch.autograd.grad(attention(leaf, k, v, Sequences.from_lengths(LENGTHS)).sum(), leaf)
        found.append(gradient)
    assert torch.equal(*found)


def test_whatever_the_strides() -> None:
    """Parts of one fused tensor, columns that do not lie together, and a gradient that is one number everywhere."""
    q, k, v = inputs()
    fused = torch.stack([q, k, v], 1).detach().requires_grad_()
    spread = torch.stack([q, k, v], -1).detach().requires_grad_()
    (expected,) = torch.autograd.grad(alone(*fused.unbind(1), False).sum(), fused)
    for whole, dim in ((fused, 1), (spread, -1)):
        result = attention(*whole.unbind(dim), Sequences.from_lengths(LENGTHS))
        (gradient,) = torch.autograd.grad(result.sum(), whole)
        torch.testing.assert_close(gradient.movedim(dim, 1), expected, atol=1e-12, rtol=1e-12)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    q, k, v = inputs()
    result = attention(q.detach(), k, v.detach(), Sequences.from_lengths(LENGTHS))
    result.sum().backward()
    assert (q.grad, v.grad) == (None, None)
    assert k.grad is not None
    assert not attention(q.detach(), k.detach(), v.detach(), Sequences.from_lengths(LENGTHS)).requires_grad


def test_a_kernel_that_is_forbidden_is_not_called() -> None:
    with sdpa_kernel(SDPBackend.MATH), Kernels() as kernels:
        result = attention(*inputs(), Sequences.from_lengths(LENGTHS))
    assert not [name for name in kernels.calls if "flash" in name]
    torch.testing.assert_close(result, alone(*inputs(), False), atol=1e-12, rtol=1e-12)


def test_keeps_no_second_result() -> None:
    """Kept for backward: q, k and v, the result itself, statistics."""
    q, k, v = inputs(torch.float32)
    sequences, kept = Sequences.from_lengths(LENGTHS), {}
    sequences.grouping  # noqa: B018 (made once for all layers)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = attention(q, k, v, sequences)
    whole, statistics = result.nbytes, ROWS * HEADS * 4
    assert sum(kept.values()) == 4 * whole + statistics
    assert result.untyped_storage().data_ptr() in kept


def test_holds_no_second_result() -> None:
    """At once: the result, statistics, one sequence's own result and the kernel's scratch; not all of them twice."""
    lengths = range(180, 196)
    q = torch.randn(sum(lengths), 8, 64)
    sequences = Sequences.from_lengths(lengths)
    assert sequences.grouping.gather is None, "as they lie"
    with torch.no_grad():
        peak = peak_bytes(lambda: attention(q, q, q, sequences))
    statistics, one = sum(lengths) * 8 * 4, max(lengths) * 8 * 64 * 4
    assert q.nbytes + statistics + one <= peak < 1.5 * q.nbytes

"""Attention with dropout on a CPU: beside autograd with the same draws, whatever is computed at once."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d import Sequences, attention
from tensor3d.attention.cpu import with_dropout
from tensor3d.batches.row_selection import RowSelection
from tools.bench.harness.memory import peak_bytes

CPU = sys.modules["tensor3d.attention.cpu"]
P = 0.25
LENGTHS = {
    "as they lie": (130, 200, 200, 151),
    "in classes": (3, 9, 5, 7, 4, 9),
    "one": (40,),
}


class Draws:
    """Every draw of dropout, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Tensor] = []
        draw = CPU.keep_mask

        def drawn(like: Tensor, p: float) -> Tensor:
            self.made.append(draw(like, p))
            return self.made[-1]

        monkeypatch.setattr(CPU, "keep_mask", drawn)

    def whole(self, q: Tensor, k: Tensor) -> Tensor:
        """(members, heads, rows of q, rows of k)"""
        found = torch.full((*q.shape[:3], k.shape[2]), 2, dtype=torch.uint8)
        for part, own in zip(CPU.parts(q, k), self.made, strict=True):
            found[part] = own.view(found[part].shape)
        assert found.max() <= 1, "each has been drawn"
        return found


def by_autograd(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) * kept / (1 - P)) @ v


# 1: one head; 250: some heads of one of 7 x 9 probabilities each; 600: two members; all of them.
@pytest.mark.parametrize("at_once", [1, 250, 600, 10**6])
@pytest.mark.parametrize("masked", [None, "keys", "causal"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=str
)
def test_equals_autograd(
    dtype: torch.dtype, tolerance: float, masked: str | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows, keys = (9, 9) if masked == "causal" else (7, 9)
    # Rows before heads, as they come in.
    q, k, v = (torch.randn(5, n, 4, 8).to(dtype).transpose(1, 2).requires_grad_() for n in (rows, keys, keys))
    above = torch.randn(5, rows, 4, 8).to(dtype).transpose(1, 2)
    mask = {
        None: None,
        "keys": torch.arange(keys) < torch.tensor([9, 4, 1, 7, 2])[:, None, None, None],
        "causal": torch.ones(9, 9, dtype=torch.bool).tril(),
    }[masked]
    monkeypatch.setattr(CPU, "_AT_ONCE", at_once)
    draws = Draws(monkeypatch)
    mine = with_dropout(q, k, v, mask, P)
    gradients = torch.autograd.grad(mine, (q, k, v), above)
    assert len(draws.made) == {1: 20, 250: 10, 600: 3, 10**6: 1}[at_once] or masked == "causal"
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    theirs = by_autograd(*wide, mask, draws.whole(q, k))
    assert (mine.dtype, [t.dtype for t in gradients]) == (dtype, [dtype] * 3)
    torch.testing.assert_close(mine.double(), theirs, atol=tolerance, rtol=tolerance)
    for got, wanted in zip(gradients, torch.autograd.grad(theirs, wide, above.double()), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=3 * tolerance, rtol=3 * tolerance)


def test_without_products_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies fp32 alone."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    test_equals_autograd(torch.bfloat16, 3e-2, None, 250, monkeypatch)


def test_fp16_holds_gradients_of_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are beyond its range where those of q, k and v are not."""
    torch.manual_seed(0)
    q, k, v, above = (torch.randn(1, 2, 64, 64).mul(size).half() for size in (0.1, 0.1, 8, 512))
    assert (above.float() @ v.float().mT).abs().max() > 65504
    leaves = [t.requires_grad_() for t in (q, k, v)]
    draws = Draws(monkeypatch)
    gradients = torch.autograd.grad(with_dropout(*leaves, None, P), leaves, above)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(by_autograd(*wide, None, draws.whole(q, k)), wide, above.double())
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-3 * float(wanted.abs().max()))


def test_scores_are_wide_under_autocast() -> None:
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(1, 2, 50, 16).bfloat16() for _ in range(3))
    found = []
    for enabled in (False, True):
        leaf = q.clone().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = with_dropout(leaf, k, v, None, P)
            found.append((result.detach(), *torch.autograd.grad(result.sum(), leaf)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 3}, {"causal": True, "window": 5}], ids=str)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_where_all_stay_it_is_attention(
    lengths: tuple[int, ...], asked: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, padding, windows and chosen queries: the reference without dropout, scaled."""
    monkeypatch.setattr(CPU, "keep_mask", lambda like, _: torch.ones(like.shape, dtype=torch.uint8))
    torch.manual_seed(0)
    rows = sum(lengths)
    queries = RowSelection.from_numbers([0, rows - 1, -1, rows // 2]) if asked else None
    q, k, v = (
        torch.randn(n, 2, 8, dtype=torch.float64, requires_grad=True) for n in (4 if asked else rows, rows, rows)
    )
    found = []
    for backend, dropout in (("grouped", P), ("reference", 0.0)):
        result = attention(
            q, k, v, Sequences.from_lengths(lengths), backend=backend, dropout=dropout, queries=queries, **options
        )  # type: ignore[arg-type]
        result = result if dropout else result / (1 - P)
        found.append([result, *torch.autograd.grad(result.square().sum(), (q, k, v))])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_probabilities_once_and_a_byte(dtype: torch.dtype) -> None:
    rows, heads, dim, kept = 96, 4, 8, {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    fused = torch.randn(rows, 3, heads, dim).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = attention(*fused.unbind(1), Sequences.from_lengths([rows]), dropout=0.1)
    squares = heads * rows**2
    assert sum(kept.values()) == fused.nbytes + squares * (dtype.itemsize + 1)
    del result


def test_holds_no_scores_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, without a backward pass to come: scores, probabilities and what stays of them, of one head."""
    rows, heads = 128, 16
    monkeypatch.setattr(CPU, "_AT_ONCE", rows**2)
    q, squares = torch.randn(rows, heads, 8, requires_grad=True), rows**2
    sequences = Sequences.from_lengths([rows])
    sequences.grouping  # noqa: B018 (made once for all layers)
    with torch.no_grad():
        peak = peak_bytes(lambda: attention(q, q, q, sequences, dropout=0.1))
    assert peak < 6 * q.nbytes + 4 * squares * 4


def test_a_gradient_of_the_gradient_is_refused() -> None:
    q = torch.randn(5, 2, 8, requires_grad=True)
    result = attention(q, q, q, Sequences.from_lengths([5]), dropout=0.1)
    (gradient,) = torch.autograd.grad(result.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("asked", range(3))
def test_one_gradient_alone_is_that_of_all(asked: int) -> None:
    data, found = torch.randn(3, 5, 2, 8), []
    for wanted in (range(3), [asked]):
        leaves = [each.clone().requires_grad_(number in wanted) for number, each in enumerate(data)]
        torch.manual_seed(1)
        result = attention(*leaves, Sequences.from_lengths([5]), dropout=0.1)
        found += torch.autograd.grad(result.square().sum(), leaves[asked])
    assert torch.equal(*found)

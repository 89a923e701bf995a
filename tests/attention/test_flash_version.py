"""Another FlashAttention in the place of PyTorch's own: what it is given, what it cannot do, and what refuses it.

None runs on a CPU. A kernel by hand is put in its place there, as such packages put theirs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from tensor3d import Sequences, attention
from tensor3d.attention import flash_version as module
from tensor3d.attention.backends import SUPPORT, AttentionArgs, AttentionRequest, choose
from tensor3d.attention.flash_version import flash_version, use_flash_attention
from tensor3d.attention.grouped import suitable_kernels
from tensor3d.batches.row_selection import RowSelection

LENGTHS = (3, 1, 6, 2)


class ByHand:
    """Kernels of the operator's signatures, for CPUs, in wide numbers."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.scale = 1.0
        """What results are multiplied by, to be wrong."""
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("_flash_attention_forward", self.forward, "CPU")
        self._library.impl("_flash_attention_backward", self.backward, "CPU")

    def remove(self) -> None:
        self._library._destroy()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, most: int, longest: int, dropout: float,
        causal: bool, debug: bool, *, window_size_left: int, window_size_right: int, **_: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (dropout, debug) == (0.0, False)
        assert most == (q_ends[1:] - q_ends[:-1]).max()
        assert longest == (k_ends[1:] - k_ends[:-1]).max()
        self.calls["forward"] += 1
        parts = [torch.einsum("hqk,khd->qhd", weights, v[keys].double()) for _, keys, weights in seen(
            q, k, q_ends, k_ends, causal, window_size_left, window_size_right
        )]  # fmt: skip
        none = torch.zeros(2, dtype=torch.uint64)
        return self.scale * torch.cat(parts).to(q), q.new_zeros(q.shape[1], q.shape[0]), none, none[0], q[:0]

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, q_ends: Tensor,
        k_ends: Tensor, most: int, longest: int, dropout: float, causal: bool, *_: Any, window_size_left: int,
        window_size_right: int, **__: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls["backward"] += 1
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        for own, keys, p in seen(q, k, q_ends, k_ends, causal, window_size_left, window_size_right):
            g, a, b, c = (t.double() for t in (gradient[own], q[own], k[keys], v[keys]))
            dp = torch.einsum("qhd,khd->hqk", g, c)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
            dq[own] = torch.einsum("hqk,khd->qhd", ds, b).to(q)
            dk[keys] = torch.einsum("hqk,qhd->khd", ds, a).to(q)
            dv[keys] = torch.einsum("hqk,qhd->khd", p, g).to(q)
        return dq, dk, dv


def seen(
    q: Tensor, k: Tensor, q_ends: Tensor, k_ends: Tensor, causal: bool, left: int, right: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each sequence its queries, its keys and the probabilities (h, queries, keys), as FlashAttention documents
    them: -1 is no limit, causal is none to the right, and places of queries are counted from the end of the keys."""
    for i in range(len(q_ends) - 1):
        own, keys = slice(int(q_ends[i]), int(q_ends[i + 1])), slice(int(k_ends[i]), int(k_ends[i + 1]))
        a, b = q[own].double(), k[keys].double()
        behind = torch.arange(len(b)) - torch.arange(len(a))[:, None] - (len(b) - len(a))
        near = (behind >= -left) | torch.tensor(left < 0)
        near &= (behind <= (0 if causal else right)) | torch.tensor(right < 0 and not causal)
        scores = torch.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5
        yield own, keys, scores.masked_fill(~near, -torch.inf).softmax(-1)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[ByHand]:
    """In the place of FA3, on CPUs, which varlen takes for GPUs."""
    made: list[ByHand] = []

    def register() -> ByHand:
        made.append(ByHand())
        return made[-1]

    registry: dict[str, Any] = importlib.import_module("torch.nn.attention._registry")._FLASH_ATTENTION_IMPLS
    monkeypatch.setitem(registry, "FA3", None)  # put back at the end
    register_flash_attention_impl("FA3", register_fn=register)
    spec = replace(SUPPORT["varlen"], devices=("cpu",), backward=("cpu",), types=None)
    monkeypatch.setitem(SUPPORT, "varlen", spec)
    activate_flash_attention_impl("FA3")
    yield made[0]
    if flash_version() is not None:
        restore_flash_attention_impl()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 2}, {"causal": True, "window": 2}, {"queries": True}]
)
def test_the_whole_way_through_the_operator(options: dict[str, Any], by_hand: ByHand) -> None:
    """Through PyTorch's own derivative, as on a GPU: numbers and gradients of the reference."""
    sequences, random = Sequences.from_lengths(LENGTHS), torch.Generator().manual_seed(0)
    if "queries" in options:
        options = {"queries": RowSelection.from_numbers([11, -1, 0, 4, 5])}
    asking = 5 if "queries" in options else sequences.rows
    found = []
    for backend in ("varlen", "reference"):
        random.manual_seed(0)
        q, k, v = (
            torch.randn(n, 2, 8, generator=random, dtype=torch.float64).requires_grad_()
            for n in (asking, sequences.rows, sequences.rows)
        )
        result = attention(q, k, v, sequences, backend=backend, **options)
        result.backward(torch.randn(result.shape, generator=random, dtype=torch.float64))
        found.append([result, q.grad, k.grad, v.grad])
    assert by_hand.calls == {"forward": 1, "backward": 1}
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_probabilities_are_not_dropped_by_it(by_hand: ByHand) -> None:
    request = AttentionRequest(device="cpu", dtype=torch.bfloat16, head_dim=64, dropout=True)
    assert choose("auto", request) == "varlen"
    assert choose("auto", replace(request, flash="FA3")) == "grouped"
    assert choose("auto", replace(request, flash="FA3", dropout=False)) == "varlen"
    with pytest.raises(ValueError, match=r"has no dropout of the probabilities by FA3\. Take 'grouped'"):
        choose("varlen", replace(request, flash="FA3"))
    assert SUPPORT["grouped"].serves(replace(request, flash="FA3"))


def test_nor_does_sdpa_choose_it_for_that(by_hand: ByHand) -> None:
    def allowed(dropout: float) -> bool:
        with suitable_kernels(dropout):
            return torch.backends.cuda.flash_sdp_enabled()

    assert (allowed(0.0), allowed(0.1)) == (True, False)
    assert torch.backends.cuda.flash_sdp_enabled(), "as it was"
    restore_flash_attention_impl()
    assert (allowed(0.0), allowed(0.1)) == (True, True)


def test_a_call_on_a_gpu_knows_what_is_active(by_hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[AttentionRequest.__module__], "_capability", lambda device: (9, 0))
    call = AttentionArgs(sequences=Sequences.from_lengths([3]), queries=None, dropout=0.1, causal=False, window=None)
    with FakeTensorMode():
        q = torch.empty(3, 2, 8, dtype=torch.bfloat16, device="cuda")
    assert AttentionRequest.of(q, q, q, call).flash == "FA3"
    restore_flash_attention_impl()
    assert AttentionRequest.of(q, q, q, call).flash is None


def test_it_is_tried_before_it_is_used(by_hand: ByHand) -> None:
    module._try(torch.device("cpu"))
    assert by_hand.calls == {"forward": 1, "backward": 1}
    by_hand.scale = 1.2
    with pytest.raises(RuntimeError, match=r"the result of two sequences is 0\.2 of its size away"):
        module._try(torch.device("cpu"))
    by_hand.scale = torch.nan
    with pytest.raises(RuntimeError, match="the result of two sequences is nan"):
        module._try(torch.device("cpu"))


def test_what_fails_is_told_and_pytorchs_own_is_back(by_hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str | None] = []

    def fails(device: torch.device) -> None:
        tried.append(flash_version())
        raise ValueError("too many values to unpack (expected 2)")

    monkeypatch.setattr(module, "_try", fails)
    with pytest.raises(ValueError, match=r"'FA3' needs a package that fits torch .*too many values.*Leave it out"):
        use_flash_attention("FA3", torch.device("cuda"))
    assert (tried, flash_version()) == (["FA3"], None)
    monkeypatch.setattr(module, "_try", lambda device: None)
    use_flash_attention("FA3", torch.device("cuda"))
    assert flash_version() == "FA3"


@pytest.mark.parametrize(
    ("version", "device", "told"),
    [
        ("FA3", "cuda", r"needs the package flash_attn_interface.*hopper.*No module named 'flash_attn_interface'"),
        ("FA4", "cuda", r"needs the package flash_attn\.cute: `pip install --pre flash-attn-4`.*No module named"),
        ("FA3", "cpu", r"'FA3' is for GPUs of NVIDIA\. Got cpu"),
        ("FA2", "cuda", r"must be one of FA3, FA4\. Got 'FA2'"),
    ],
)
def test_refused(version: Any, device: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        use_flash_attention(version, torch.device(device))
    assert flash_version() is None

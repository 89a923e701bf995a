"""PyTorch's attention over sequences of different length, FlashAttention on CUDA: no padding, no way there and back.

T rows of a rank, R rows that ask, h heads of a rank, g of keys and values, d head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.attention.backends import AttentionArgs, apart, served
from tensor3d.batches.row_selection import RowSelection
from tensor3d.batches.sequences import Sequences
from tensor3d.torch_private import flash_attention


def varlen(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """Saved for backward: q, k, v, the result, and the logarithms of the sums of exponentials."""
    v, sequences = apart(v, k), call.sequences
    options: Any = {"dropout": call.dropout, "window_size": window_size(call)}
    ends, longest = sequences.cu_seqlens, sequences.max_seqlen
    if call.queries is None:
        return flash(q, k, v, ends, ends, longest, longest, **options)
    order = order_of(call.queries, sequences)
    asked = q.index_select(0, order.order)
    result = asked
    if order.most:
        result = flash(asked, k, v, order.cu_seqlens, ends, order.most, longest, **options)
    nothing = [served(t[:0], q.shape[1]) for t in (k, v)]
    return torch.cat([result, q.new_zeros(1, *q.shape[1:]), *nothing]).index_select(0, order.restore)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    most: int,
    longest: int,
    *,
    dropout: float,
    window_size: tuple[int, int],
) -> Tensor:
    """PyTorch's own operator of FlashAttention: `torch.nn.attention.varlen` wraps it, but in one of Python's, which
    costs the host a millisecond a layer, without dropout, and takes cuDNN instead where that is newer, which plans
    every shape anew. A test runs it on fake tensors, which check its arguments.

    Args:
        most: rows that ask of one sequence, at most. The kernel is told of two at least: where it is told of one, and
            heads of k and v are fewer, it takes every sequence for one with a row that asks, and there may be others.
    """
    result: Tensor = flash_attention(
        q,
        k,
        v,
        q_ends,
        k_ends,
        max(most, 2),
        longest,
        dropout,
        window_size == (-1, 0),
        False,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )[0]
    return result


def window_size(call: AttentionArgs) -> tuple[int, int]:
    """How many rows before and after itself a row sees, -1: all; (-1, 0) is what the kernel knows as causal."""
    near = -1 if call.window is None else call.window - 1
    return near, 0 if call.causal else near


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryPermutation:
    """Rows that ask, sequence by sequence."""

    order: Tensor
    """int64 (used,): which query comes at each place."""
    restore: Tensor
    """int64 (R,): the place of each query; those that are not used have one beyond the last."""
    cu_seqlens: Tensor
    """int32 (sequences + 1,): the first place of each sequence, then the number of places."""
    most: int
    """Of any sequence."""


def order_of(queries: RowSelection, sequences: Sequences) -> QueryPermutation:
    """Made once for all layers."""
    return sequences.once(
        ("order", queries), lambda: _made_order(queries.numbers, np.asarray(sequences.starts), sequences.device)
    )


def _made_order(numbers: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device) -> QueryPermutation:
    order = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :]
    counts = np.bincount(np.searchsorted(starts, numbers[order], side="right") - 1, minlength=len(starts))
    restore = np.full(len(numbers), len(order), dtype=np.int64)
    restore[order] = np.arange(len(order))
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    there = [torch.from_numpy(each).to(device, non_blocking=True) for each in (order, restore, ends)]
    return QueryPermutation(order=there[0], restore=there[1], cu_seqlens=there[2], most=int(counts.max(initial=0)))

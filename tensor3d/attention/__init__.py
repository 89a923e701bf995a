"""Attention inside sequences that lie one after another: one function, a table of backends.

T rows of a rank, R rows of them that ask, h heads of a rank, g of keys and values, d head dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.attention.backends import SUPPORT, AttentionArgs, AttentionRequest, Backend, Name, choose, named, served
from tensor3d.attention.flex import flex
from tensor3d.attention.grouped import grouped
from tensor3d.attention.relative import RelativeTerms, dense_scores
from tensor3d.attention.varlen import varlen
from tensor3d.batches.row_selection import RowSelection
from tensor3d.batches.sequences import Sequences
from tensor3d.ops.autograd_function import out_of_graphs

# --- Dense attention, sequence by sequence: what every other backend is compared with ---------------------------------
#
# T rows of a rank, R rows that ask, h heads of a rank, d head dimension


def reference(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """One sequence after another: if a mask kept them apart, what is not finite in one (0 times infinity) would reach
    all others."""
    sequences, numbers = call.sequences, None if call.queries is None else call.queries.numbers
    parts, places = [q[:0], k[:0], v[:0]], []
    for start, length in zip(sequences.starts, sequences.lengths, strict=True):
        asking = np.arange(start, start + length) if numbers is None else numbers
        chosen = np.flatnonzero((asking >= start) & (asking < start + length))
        places.append(chosen if numbers is not None else asking)
        own = q[start : start + length] if numbers is None else q[torch.from_numpy(chosen).to(q.device)]
        parts.append(_dense(own, k[start : start + length], v[start : start + length], asking[chosen] - start, call))
    result = torch.cat(parts)
    if numbers is None:
        return result
    # Back into the order of the slots; those that are not used have the row of zeros behind all.
    order = np.full(len(numbers), len(result), dtype=np.int64)
    order[np.concatenate([[], *places]).astype(np.int64)] = np.arange(len(result))
    return torch.cat([result, result.new_zeros(1, *result.shape[1:])])[torch.from_numpy(order).to(q.device)]


def _dense(q: Tensor, k: Tensor, v: Tensor, rows: NDArray[np.int64], call: AttentionArgs) -> Tensor:
    """Of the rows of one sequence that ask, by their places in it."""
    distance = torch.from_numpy(rows).to(k.device)[:, None] - torch.arange(k.shape[0], device=k.device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        allowed &= distance >= 0
    if call.window is not None:
        allowed &= distance.abs() < call.window
    if call.relative is not None:
        scores = dense_scores(q, k, call.relative, distance)
    else:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.where(allowed, scores, -math.inf).softmax(-1, dtype=wide).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", F.dropout(weights, call.dropout), v)


# --- Attention inside sequences that lie one after another ------------------------------------------------------------

__all__ = ["Backend", "attention", "check_cover", "check_probability", "check_queries", "check_window"]

_BACKENDS: Mapping[Name, Callable[[Tensor, Tensor, Tensor, AttentionArgs], Tensor]] = {
    "reference": reference,
    "grouped": grouped,
    "varlen": varlen,
    "flex": flex,
}


@out_of_graphs
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    backend: Backend = "auto",
    dropout: float = 0.0,
    causal: bool = False,
    window: int | None = None,
    queries: RowSelection | None = None,
    relative: RelativeTerms | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v within each sequence; nothing crosses a boundary, and no rank talks to another.

    Args:
        q: (T, h, d), the rows of whole sequences.
        k, v: (T, g, d), where g divides h: each head of theirs serves h/g of q next to one another.
        sequences: where they begin and end; they cover the T rows.
        backend: `"varlen"`: FlashAttention on CUDA. `"flex"`: FlexAttention with a document mask. `"grouped"`: batches
            by length class, one SDPA each. `"reference"`: dense, one sequence after another; for tests.
            `"auto"`: varlen where it can serve, else grouped. `docs/attention.md` says what each can do.
        dropout: of the probabilities, at least 0 and below 1, drawn from torch's default generator.
        causal: a row attends to itself and the rows before it.
        queries: only these rows ask: q is (R, h, d), and so is the result, in their order; keys and values are those of
            all rows. Slots that are not used give zeros.
        window: a row attends only to rows less than this far away (Beltagy et al. 2020, arXiv 2004.05150, §3.1);
            causal: to itself and the `window - 1` rows before it. At least 1.
        relative: what scores have beside q k^T, by the distance of query and key; the scale of products is theirs then.

    Raises:
        ValueError: shapes or types that differ, sequences that do not cover the rows, queries that are not among them,
            a dropout that is no probability, a window below 1, an unknown backend, or one that cannot serve this call,
            with sequences of any length.
    """
    check_window(window)
    check_probability(dropout)
    _check_shapes(q, k, v, sequences, queries)
    if relative is not None:
        relative.check(q)
    near = None if window is None or window >= sequences.max_seqlen else window
    call = AttentionArgs(
        sequences=sequences, queries=queries, dropout=dropout, causal=causal, window=near, relative=relative
    )
    # What this rank's sequences are as long as must not matter: all ranks are to refuse what is named, or none.
    name = _chosen(backend, q, k, v, call, has_window=(near if backend == "auto" else window) is not None)
    if not SUPPORT[name].kv_heads or q.shape[0] == 0:
        k, v = served(k, q.shape[1]), served(v, q.shape[1])
    if q.shape[0] == 0 or k.shape[0] == 0:
        # Nothing, or slots that are not used: zeros. And nothing of q, k and v, for the backward pass.
        nothing = torch.cat([q.new_zeros(q.shape), q[:0], k[:0], v[:0]])
        return nothing if relative is None else relative.without_rows(nothing)
    return _BACKENDS[name](q, k, v, call)


def _chosen(backend: Backend, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, *, has_window: bool) -> Name:
    """Found once for all layers that ask for the same."""
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    masking = call.dropout > 0, call.causal, has_window, call.queries is not None, call.relative is not None
    key = backend, k.dtype, k.shape[-1], k.device, masking, learns
    return call.sequences.once(
        key, lambda: choose(backend, replace(AttentionRequest.of(q, k, v, call), window=has_window))
    )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, queries: RowSelection | None) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        fits = False
    else:
        fits = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and (queries is not None or len(q) == len(k))
    if not fits:
        raise ValueError(
            "q, k and v must have one shape (rows, heads, head dimension); heads of k and v may be fewer, and divide "
            f"those of q. Got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must be of one type. Got {named(q.dtype)}, {named(k.dtype)} and {named(v.dtype)}. Convert "
            "them with `.to`."
        )
    check_cover(sequences, k.shape[0])
    if queries is not None:
        if len(queries) != q.shape[0]:
            raise ValueError(f"q must have a row for each of the queries. Got {q.shape[0]} rows for {len(queries)}.")
        check_queries(queries, k.shape[0])


def check_queries(queries: RowSelection, rows: int) -> None:
    """Raises ValueError unless the queries are among so many rows."""
    if queries.most >= rows:
        raise ValueError(f"queries are numbers of this rank's {rows} rows, from 0. Got {queries.most}.")


def check_cover(sequences: Sequences, rows: int) -> None:
    """Raises ValueError unless the sequences are those of `rows` rows."""
    if sequences.rows != rows:
        raise ValueError(
            f"the sequences must cover the rows of this rank. Got sequences of {sequences.rows} rows for {rows}. "
            "An unused tail of a pack is a sequence of its own."
        )


def check_window(window: int | None) -> None:
    """Raises ValueError for a window in which a row would not even see itself."""
    if window is not None and window < 1:
        raise ValueError(f"an attention window must be at least 1, the row itself; None sees all rows. Got {window}.")


def check_probability(dropout: float) -> None:
    """Raises ValueError for what is no probability of dropout."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"the dropout probability must be at least 0 and below 1. Got {dropout}.")

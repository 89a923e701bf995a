"""Attention inside sequences that lie one after another: one function, a table of backends.

T rows of a rank, h heads of a rank, d head dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.sequences import Sequences

Backend = Literal["reference", "grouped"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    backend: Backend = "grouped",
    dropout: float = 0.0,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v within each sequence; nothing crosses a boundary, and no rank talks to another.

    Args:
        q, k, v: (T, h, d), the rows of whole sequences.
        sequences: where they begin and end; they cover the T rows.
        backend: `"grouped"`: batches by length class, one SDPA each. `"reference"`: dense, with a block-diagonal mask;
            T*T memory, for tests.
        dropout: of the probabilities, drawn from torch's default generator.
        causal: a row attends to itself and the rows before it.
        window: a row attends only to rows less than this far away (Beltagy et al. 2020, arXiv 2004.05150, §3.1);
            causal: to itself and the `window - 1` rows before it. At least 1.

    Raises:
        ValueError: shapes that differ, sequences that do not cover the rows, a window below 1, or an unknown backend.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"attention backend must be one of {sorted(_BACKENDS)}. Got {backend!r}.")
    check_window(window)
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            f"q, k and v must have one shape (rows, heads, head dimension). Got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}."
        )
    check_cover(sequences, q.shape[0])
    return _BACKENDS[backend](q, k, v, sequences, dropout, causal, window)


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


def _reference(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, dropout: float, causal: bool, window: int | None
) -> Tensor:
    member = torch.repeat_interleave(
        torch.arange(len(sequences.lengths), device=q.device), torch.tensor(sequences.lengths, device=q.device)
    )
    allowed = member[:, None] == member[None, :]
    if causal:
        allowed = allowed.tril()
    if window is not None:
        allowed = allowed.tril(window - 1).triu(1 - window)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.where(allowed, scores, -math.inf).softmax(-1, dtype=wide).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", F.dropout(weights, dropout), v)


def _grouped(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, dropout: float, causal: bool, window: int | None
) -> Tensor:
    grouping = sequences.grouping
    slots = [t if grouping.gather is None else t.index_select(0, grouping.gather) for t in (q, k, v)]
    parts = [t.split([group.slots for group in grouping.groups]) for t in slots]
    results = []
    for group, *qkv in zip(grouping.groups, *parts, strict=True):
        q, k, v = (t.view(len(group.members), group.length, *t.shape[1:]).transpose(1, 2) for t in qkv)
        if window is not None and window < group.length:
            mask, whole = group.band(window, causal), False
        else:
            # Padding stands at the end, so a causal mask alone already hides it from real rows.
            mask, whole = None if causal else group.mask, causal
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=whole)
        results.append(result.transpose(1, 2).flatten(0, 1))
    # Slots of padding are not restored, so no gradient comes back through them.
    return torch.cat(results) if grouping.restore is None else torch.cat(results).index_select(0, grouping.restore)


_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Sequences, float, bool, int | None], Tensor]] = {
    "reference": _reference,
    "grouped": _grouped,
}

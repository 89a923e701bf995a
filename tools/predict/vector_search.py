"""The nearest of many vectors, exactly: products of blocks, of which only the best are kept.

q queries, n documents, H columns, k asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_QUERIES, _DOCUMENTS = 1024, 4096
"""Of a block: with these its products take 32 MiB, and what is made of them twice as much."""
_PLACES = 2**32 - 1
_WORST = -(2**63)


class Rows(Protocol):
    """What can be read in blocks, such as a tensor or an array that is mapped into memory."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


def nearest(queries: Tensor, documents: Rows, k: int) -> tuple[Tensor, Tensor]:
    """Cosines (q, k') of each query with its nearest documents, nearest first, and which these are (q, k'); of equal
    ones those that come first. k' is k, or n where that is less.

    Documents that are no numbers (nan) come last, as -1, with a cosine of -inf.

    Products are in fp64: so the cosines with equal documents are equal, which one in fp32 may round in one way here,
    and in another there.

    Args:
        queries: (q, H).
        documents: (n, H), fewer than 2^32.

    Raises:
        ValueError: k below 1, or vectors of other sizes.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1. Got {k}.")
    if queries.shape[1] != documents.shape[1]:
        raise ValueError(
            f"vectors of {documents.shape[1]} numbers cannot be compared with those of {queries.shape[1]}. Make both "
            "with the same model and the same --dimensions."
        )
    parts = F.normalize(queries.double()).split(_QUERIES)
    found = [_best(part, documents, min(k, len(documents))) for part in parts]
    keys = torch.cat(found) if found else torch.empty(0, k, dtype=torch.int64)
    scores = _ordered((keys >> 32).to(torch.int32)).view(torch.float32)
    return scores, torch.where(scores > -torch.inf, _PLACES - (keys & _PLACES), -1)


def _best(queries: Tensor, documents: Rows, k: int) -> Tensor:
    """(q, k): keys in the order of the cosines, and of equal ones in that of the places, the first highest."""
    best = torch.full((len(queries), k), _WORST)
    for start in range(0, len(documents), _DOCUMENTS):
        block = documents[start : start + _DOCUMENTS]
        # What is mapped may not be written to, of which torch would warn.
        block = block if isinstance(block, Tensor) else torch.from_numpy(np.array(block, dtype=np.float32))
        scores = (queries @ F.normalize(block.double()).t()).float() + 0.0  # -0 is 0
        scores = torch.where(scores.isnan(), -torch.inf, scores)
        places = _PLACES - torch.arange(start, start + len(block))
        keys = (_ordered(scores.view(torch.int32)).to(torch.int64) << 32) | places
        best = torch.cat([best, keys], 1).topk(k).values
    return best


def _ordered(bits: Tensor) -> Tensor:
    """int32 in the order of the fp32 numbers with these bits; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

"""What is asked of a backend beside q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tensor3d.queries import Queries
from tensor3d.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class Call:
    sequences: Sequences
    queries: Queries | None
    """None: all rows ask."""
    dropout: float
    causal: bool
    window: int | None
    """None where it is no narrower than the longest sequence, too."""


def apart(v: Tensor, k: Tensor) -> Tensor:
    """Values that will be kept for backward. Where turned queries and keys have left a fused QKV, the whole of it would
    be kept for the values alone; a copy of them is smaller."""
    return v if k._base is not None and k._base is v._base else v.contiguous()

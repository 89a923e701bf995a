"""Rows of different lengths in one flat array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def first_rows(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (n,): where each of `n` parts begins when they lie one after another."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (sum of lengths,): the ranges `starts[i]` to `starts[i] + lengths[i] - 1`, one after another."""
    return np.repeat(starts - first_rows(lengths), lengths) + np.arange(int(np.sum(lengths)))

"""Rows of different lengths in one flat array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# --- Chance that is a function of where it is asked for, not of what was drawn before ---------------------------------


def random_bits(
    key: int, stream: NDArray[np.integer], position: NDArray[np.integer] | int = 0, *, draw: int = 0
) -> NDArray[np.uint64]:
    """uint64 (n,): 64 random bits for each (stream, position, draw); a position has the draws 0, 1 and 2.

    Every stream is a SplitMix64 generator (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number
    generators"), which can be read at any place because its state is a counter.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    begin = _scramble(np.uint64(key) + golden * (stream.astype(np.uint64) + np.uint64(1)))
    place = np.uint64(3) * np.asarray(position).astype(np.uint64) + np.uint64(draw + 1)
    return _scramble(begin + golden * place)


def _scramble(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64: every bit of the result depends on every bit of the argument."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


# --- Rows of different lengths in one flat array ----------------------------------------------------------------------


def first_rows(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (n,): where each of `n` parts begins when they lie one after another."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (sum of lengths,): the ranges `starts[i]` to `starts[i] + lengths[i] - 1`, one after another."""
    return np.repeat(starts - first_rows(lengths), lengths) + np.arange(int(np.sum(lengths)))

"""All ways to fill a pack exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def count_partitions(total: int, parts: int, at_most: int) -> int:
    """Ways to write `total` as a sum of 1 to `parts` numbers; above `at_most`, a lower bound of them.

    Turned around (rows and columns of a Ferrers diagram), these are the ways with numbers of 1 to `parts`.
    """
    ways = np.zeros(total + 1, dtype=np.float64)
    ways[0] = 1
    for number in range(1, min(parts, total) + 1):
        for start in range(number):
            # Every earlier sum, in steps of this number.
            ways[start::number] = np.cumsum(ways[start::number])
        if ways[total] > at_most:
            break
    return int(ways[total])


def partitions(total: int, parts: int) -> NDArray[np.int32]:
    """int32 (parts, ways): each column adds up to `total` and ascends; zeros stand for fewer parts."""
    last, rest = np.zeros(1, dtype=np.int32), np.full(1, total, dtype=np.int32)
    rows: list[NDArray[np.int32]] = []
    for left in range(parts, 1, -1):
        # The next number goes from the last one to an even share of the rest.
        choices = rest // left - last + 1
        origin = np.repeat(np.arange(len(choices), dtype=np.int32), choices)
        first = np.cumsum(choices) - choices
        last = (last[origin] + np.arange(len(origin)) - first[origin]).astype(np.int32)
        rest = rest[origin] - last
        rows = [*(row[origin] for row in rows), last]
    return np.stack([*rows, rest])

"""Texts in batches of about as many token slots, and work in parts of about the same size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split(lengths: Sequence[int], slots: int, *, padded: bool = False) -> list[slice]:
    """Consecutive texts in parts of about `slots` token slots each, at most, and at least a text.

    Args:
        lengths: tokens of each text.
        padded: every text counts with the length of its part's longest.
    """
    parts: list[slice] = []
    start, total, longest = 0, 0, 0
    for place, length in enumerate(lengths):
        total, longest = total + length, max(longest, length)
        needed = longest * (place + 1 - start) if padded else total
        if needed > slots and place > start:
            parts.append(slice(start, place))
            start, total, longest = place, length, length
    return [*parts, slice(start, len(lengths))]


def deal(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of each piece: the largest first, each to the part with the least so far (Graham, 1969).

    So no part is ahead of another by more than its own smallest piece.
    """
    dealt = [0] * len(sizes)
    filled = [(0, part) for part in range(parts)]
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        total, part = filled[0]
        dealt[piece] = part
        heapq.heapreplace(filled, (total + sizes[piece], part))
    return dealt

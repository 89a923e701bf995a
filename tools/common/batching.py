"""Texts in batches of about as many token slots."""

from __future__ import annotations

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

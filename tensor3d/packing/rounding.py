"""From numbers of packs that a programme wishes for to packs of the sequences that there are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping

from tensor3d.packing.limits import Limits
from tensor3d.packing.shelf import Shelf

Column = tuple[int, ...]
"""Lengths of the slots of a pack."""


def round_up(wanted: Mapping[Column, int], counts: Mapping[int, int], limits: Limits) -> dict[Column, int]:
    """Packs of all sequences, most of them begun by columns.

    Args:
        wanted: packs to begin with each column (lengths, longest first), as long as there are sequences for them.
        counts: sequences by length, longest first.

    What finds no slot is packed by best fit, also into the room that is left.
    """
    pool = _Pool(counts, limits)
    started: defaultdict[Column, int] = defaultdict(int)
    for column, packs in sorted(wanted.items(), reverse=True):
        for lengths, used in pool.take(column, packs):
            started[lengths] += used
    shelf = Shelf(limits, started)
    for length, count in pool.rest().items():
        shelf.best_fit(length, count)
    return shelf.packs()


class _Pool:
    """Sequences that are in no pack yet, numbered from the shortest length."""

    def __init__(self, counts: Mapping[int, int], limits: Limits) -> None:
        self._lengths = sorted(counts)
        self._left = [counts[length] for length in self._lengths]
        self._cost_of = limits.cost_of

    def take(self, column: Column, packs: int) -> list[tuple[Column, int]]:
        """Fills the slots of `packs` packs; each takes the longest sequence that fits and costs no more than its own.

        Returns lengths and numbers of packs: fewer than were asked for if there is nothing left to put into them.
        """
        taken = []
        while packs:
            chosen: Counter[int] = Counter()
            for slot in column:
                i = self._longest(slot, chosen)
                if i is not None:
                    chosen[i] += 1
            if not chosen:
                break
            used = min(packs, *(self._left[i] // copies for i, copies in chosen.items()))
            for i, copies in chosen.items():
                self._left[i] -= used * copies
            packs -= used
            taken.append((tuple(self._lengths[i] for i in sorted(chosen.elements(), reverse=True)), used))
        return taken

    def rest(self) -> dict[int, int]:
        """What is left, longest first."""
        pairs = zip(reversed(self._lengths), reversed(self._left), strict=True)
        return {length: count for length, count in pairs if count}

    def _longest(self, slot: int, chosen: Counter[int]) -> int | None:
        """Number of the longest length that a slot can take, after what was chosen for the same pack."""
        for i in range(bisect_right(self._lengths, slot) - 1, -1, -1):
            if self._left[i] > chosen[i] and self._cost_of(self._lengths[i]) <= self._cost_of(slot):
                return i
        return None

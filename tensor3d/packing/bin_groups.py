"""Packs that are being filled, many at a time: those filled alike are one group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from tensor3d.packing.limits import Limits


class _Filling(NamedTuple):
    """What lies in a pack so far."""

    lengths: tuple[int, ...]
    cost: int


class BinGroups:
    """Numbers of packs by filling; those that can still grow are sorted by free slots.

    The time depends on how many lengths and fillings there are and not on how many sequences.

    Args:
        started: packs that hold something already, by the lengths in them.
    """

    def __init__(self, limits: Limits, started: Mapping[tuple[int, ...], int] | None = None) -> None:
        self._limits = limits
        self._growing: defaultdict[int, dict[_Filling, int]] = defaultdict(dict)
        self._full: defaultdict[_Filling, int] = defaultdict(int)
        # By free slots: what the cheapest sequence that fits costs.
        slots = range(1, 1 if limits.budget is None else limits.capacity + 1)
        self._least_cost = list(accumulate((limits.cost_of(length) for length in slots), min))
        for lengths, packs in (started or {}).items():
            cost = sum(map(limits.cost_of, lengths))
            self._put(_Filling(lengths, cost), limits.capacity - sum(lengths), packs)

    def best_fit(self, length: int, count: int) -> None:
        """Puts `count` sequences of one length where the least room is left, what fits nowhere into new packs."""
        for free in sorted(space for space in self._growing if space >= length):
            if not count:
                return
            for filling, packs in reversed(self._growing.pop(free).items()):
                count, unchanged = self._fill(filling, free, packs, length, count)
                self._put(filling, free, unchanged)
        self._fill(_Filling((), 0), self._limits.capacity, count, length, count)

    def worst_fit(self, length: int, count: int) -> None:
        """Puts `count` sequences of one length where the most room is left, what fits nowhere into new packs."""
        free = max(self._growing, default=0)
        while count and free >= length:
            for filling, packs in list(self._growing.get(free, {}).items()):
                # One each: the next may find more room in another pack.
                if count and self._copies(filling, free, length, 1):
                    used = min(packs, count)
                    self._take(filling, free, used)
                    self._put(self._grown(filling, length, 1), free - length, used)
                    count -= used
            free = max((space for space in self._growing if space < free), default=0)
        # One each, as the paper has it: equal sequences are placed at once, before the new packs are there to choose.
        self._put(self._grown(_Filling((), 0), length, 1), self._limits.capacity - length, count)

    def packs(self) -> dict[tuple[int, ...], int]:
        """Packs by the lengths in them, longest first."""
        repeats: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for fillings in (self._full, *self._growing.values()):
            for filling, packs in fillings.items():
                repeats[tuple(sorted(filling.lengths, reverse=True))] += packs
        return dict(repeats)

    def _fill(self, filling: _Filling, free: int, packs: int, length: int, count: int) -> tuple[int, int]:
        """Grows up to `packs` packs of one filling; returns the sequences and the packs that are left."""
        while packs and (copies := self._copies(filling, free, length, count)):
            used = min(packs, count // copies)
            self._put(self._grown(filling, length, copies), free - copies * length, used)
            packs -= used
            count -= used * copies
        return count, packs

    def _copies(self, filling: _Filling, free: int, length: int, count: int) -> int:
        """How many sequences of this length each pack takes; 0 where none fits."""
        limits = self._limits
        copies = min(free // length, limits.max_sequences - len(filling.lengths), count)
        cost = limits.cost_of(length)
        if limits.budget is not None and cost:
            copies = min(copies, (limits.budget - filling.cost) // cost)
        return copies

    def _grown(self, filling: _Filling, length: int, copies: int) -> _Filling:
        cost = filling.cost + copies * self._limits.cost_of(length)
        return _Filling(filling.lengths + (length,) * copies, cost)

    def _put(self, filling: _Filling, free: int, packs: int) -> None:
        if not packs:
            return
        fillings = self._growing[free] if self._can_grow(filling, free) else self._full
        fillings[filling] = fillings.get(filling, 0) + packs

    def _can_grow(self, filling: _Filling, free: int) -> bool:
        limits = self._limits
        if not free or len(filling.lengths) == limits.max_sequences:
            return False
        return limits.budget is None or filling.cost + self._least_cost[free - 1] <= limits.budget

    def _take(self, filling: _Filling, free: int, packs: int) -> None:
        fillings = self._growing[free]
        fillings[filling] -= packs
        if not fillings[filling]:
            del fillings[filling]
        if not fillings:
            del self._growing[free]


def best_fit(counts: Mapping[int, int], limits: Limits) -> dict[tuple[int, ...], int]:
    """Packs by the lengths in them, longest first. `counts`: sequences by length, see `Limits.counts`."""
    shelf = BinGroups(limits)
    for length, count in counts.items():
        shelf.best_fit(length, count)
    return shelf.packs()

"""The best way to fill one pack when every length has a value: dynamic programmes over free slots.

Legend: `n` lengths, `C` capacity, `B` budget. Values are whole numbers, so that every sum is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_NEVER = -(2**62)


@dataclass(frozen=True, kw_only=True, eq=False)
class Knapsack:
    """What one pack may hold."""

    lengths: Ints
    """(n,) ascending."""
    capacity: int
    depth: int
    """Sequences, at most; at least 1."""
    costs: Ints
    """(n,), each at most the budget."""
    budget: int | None
    """None: no limit on costs."""

    @property
    def has_free_depth(self) -> bool:
        """Whether the capacity alone limits the number of sequences."""
        return self.depth >= self.capacity // int(self.lengths[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Fills:
    """What a dynamic programme has found."""

    best: int
    """At least the value of every pack that keeps the limits; exactly that of the best one if no limit was relaxed."""
    columns: Ints
    """(n or fewer, sequences): for each length the most valuable pack with it, as numbers of lengths; -1 is none."""


def fill_by_length(sack: Knapsack, values: Ints) -> Fills:
    """The best packs within capacity and depth; the budget is relaxed. Values at least 0."""
    return _fill_freely(sack, values) if sack.has_free_depth else _fill_to_depth(sack, values)


def _fill_to_depth(sack: Knapsack, values: Ints) -> Fills:
    C, lengths = sack.capacity, sack.lengths
    rooms = np.arange(C + 1)
    # Reading at `room + C - length`, every length is a shift; what would be a negative room is never chosen.
    padded = np.full(2 * C + 1, _NEVER)
    shifted = rooms[:, None] + (C - lengths)
    best, choices = np.zeros(C + 1, dtype=np.int64), []
    for _ in range(sack.depth):
        padded[C:] = best
        totals = padded[shifted] + values
        choice = totals.argmax(1)
        total = totals[rooms, choice]
        better = total > best
        if not better.any():
            break
        best = np.where(better, total, best)
        choices.append(np.where(better, choice, -1))

    room, picks = C - lengths, [np.arange(len(lengths))]
    for choice in reversed(choices[: sack.depth - 1]):
        picks.append(choice[room])
        room = room - np.where(picks[-1] < 0, 0, lengths[picks[-1]])
    return Fills(best=int(best[C]), columns=np.stack(picks, axis=1))


def _fill_freely(sack: Knapsack, values: Ints) -> Fills:
    C, lengths = sack.capacity, sack.lengths
    fitting = np.searchsorted(lengths, np.arange(C + 1), side="right")
    best, choice = np.zeros(C + 1, dtype=np.int64), np.full(C + 1, -1)
    for room in range(int(lengths[0]), C + 1):
        totals = best[room - lengths[: fitting[room]]] + values[: fitting[room]]
        i = int(totals.argmax())
        # Equal is no better: the slot stays empty.
        better = totals[i] > best[room - 1]
        best[room], choice[room] = (totals[i], i) if better else (best[room - 1], choice[room - 1])

    room_left, picks = C - lengths, [np.arange(len(lengths))]
    while (picks[-1] >= 0).any():
        pick = choice[room_left]
        picks.append(pick)
        room_left = room_left - np.where(pick < 0, 0, lengths[pick])
    return Fills(best=int(best[C]), columns=np.stack(picks[:-1], axis=1))

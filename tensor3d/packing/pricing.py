"""The best way to fill one pack when every length has a value: dynamic programmes over free slots.

Legend: `n` lengths, `C` capacity, `B` budget. Values are whole numbers, so that every sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_NEVER = -(2**62)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnapsackSpec:
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
class KnapsackSolution:
    """What a dynamic programme has found."""

    best: int
    """At least the value of every pack that keeps the limits; exactly that of the best one if no limit was relaxed."""
    columns: Ints
    """(n or fewer, sequences): for each length the most valuable pack with it, as numbers of lengths; -1 is none."""


def fill_by_length(sack: KnapsackSpec, values: Ints) -> KnapsackSolution:
    """The best packs within capacity and depth; the budget is relaxed. Values at least 0."""
    return _fill_freely(sack, values) if sack.has_free_depth else _fill_to_depth(sack, values)


def _fill_to_depth(sack: KnapsackSpec, values: Ints) -> KnapsackSolution:
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
    return KnapsackSolution(best=int(best[C]), columns=np.stack(picks, axis=1))


def _fill_freely(sack: KnapsackSpec, values: Ints) -> KnapsackSolution:
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
    return KnapsackSolution(best=int(best[C]), columns=np.stack(picks[:-1], axis=1))


# ----------------------------------------------------------------------------------------------------------------------
# The best way to fill one pack within a budget: dynamic programmes over free slots and what is left of the budget.
#
# Legend: `n` lengths, `C` capacity, `B` budget. A table is (C + 1, B + 1): values of the best packs of so many slots
# and so much budget, which need not be used up.

MIN_CELLS = 256
"""Steps of the budget that a table tells apart in any case. A larger budget is divided where tables would be large."""
_MAX_WORK = 2**29
"""Additions in the making of a table, half a second; a quarter of that where the budget must be divided anyway."""
_MAX_ENTRIES = 2**25
"""Of all layers of a table, 8 bytes each."""


def fill_in_budget(sack: KnapsackSpec, values: Ints) -> KnapsackSolution:
    """The best packs within all limits. Values at least 0.

    A budget may be divided: costs are rounded down for the value of the best pack, which stays an upper bound, and up
    for the packs, which stay within the budget.
    """
    assert sack.budget is not None, "without a budget, fill_by_length is exact"
    step = -(-(sack.budget + 1) // _cells(sack))
    low = _fill(sack, values, sack.costs // step, sack.budget // step)
    if step == 1:
        return low
    high = _fill(sack, values, -(-sack.costs // step), sack.budget // step)
    return KnapsackSolution(best=low.best, columns=high.columns)


def _cells(sack: KnapsackSpec) -> int:
    """Steps of the budget: all, where there is time and memory for them."""
    assert sack.budget is not None
    rows = sack.capacity * (1 if sack.has_free_depth else sack.depth)
    most = min(_MAX_WORK // len(sack.lengths), _MAX_ENTRIES) // rows
    return max(MIN_CELLS, sack.budget + 1 if sack.budget < most else most // 4)


class _Item(NamedTuple):
    length: int
    cost: int
    value: int


class _Step(NamedTuple):
    """How one sequence of a pack is found again: its value makes up the difference of two tables."""

    now: Ints
    """Values with this sequence."""
    rest: Ints
    """Values of what may lie beside it."""
    without: Ints
    """Values without this sequence."""


def _fill(sack: KnapsackSpec, values: Ints, costs: Ints, budget: int) -> KnapsackSolution:
    columns = zip(sack.lengths.tolist(), costs.tolist(), values.tolist(), strict=True)
    # What costs more than a divided budget, by rounding up, fits no pack here.
    items = [item for item in map(_Item._make, columns) if item.cost <= budget and item.value]
    nothing = np.zeros((sack.capacity + 1, budget + 1), dtype=np.int64)
    steps: Iterable[_Step]
    if sack.has_free_depth:
        table = _free_table(items, nothing)
        steps = repeat(_Step(now=table, rest=table, without=nothing))
    else:
        layers = _layers(items, nothing, sack.depth)
        table = layers[-1]
        # One sequence is given, so that the rest has one less.
        layers = layers[: sack.depth]
        steps = [
            _Step(now=now, rest=before, without=before)
            for before, now in zip(layers[-2::-1], layers[:0:-1], strict=True)
        ]
    return KnapsackSolution(best=int(table[-1, -1]), columns=_retrace(sack, values, costs, steps, budget))


def _free_table(items: list[_Item], nothing: Ints) -> Ints:
    """Any number of sequences."""
    table = nothing.copy()
    for length, cost, value in items:
        # In blocks of as many rows as the length has slots: the block before has all packs with one sequence less.
        for first in range(length, len(table), length):
            block = table[first : first + length, cost:]
            before = table[first - length : first - length + len(block), : block.shape[1]]
            np.maximum(block, before + value, out=block)
    return table


def _layers(items: list[_Item], nothing: Ints, depth: int) -> list[Ints]:
    """Tables of at most 0, 1, ... sequences, up to `depth` or until more do not help."""
    layers = [nothing]
    for _ in range(depth):
        before, now = layers[-1], layers[-1].copy()
        for length, cost, value in items:
            part = now[length:, cost:]
            np.maximum(part, before[: part.shape[0], : part.shape[1]] + value, out=part)
        if (now == before).all():
            break
        layers.append(now)
    return layers


def _retrace(sack: KnapsackSpec, values: Ints, costs: Ints, steps: Iterable[_Step], budget: int) -> Ints:
    """(n or fewer, sequences): for each length the best pack with it, one sequence a step."""
    lengths = sack.lengths
    own = np.flatnonzero(costs <= budget)
    room, left, picks = sack.capacity - lengths[own], budget - costs[own], [own]
    for step in steps:
        if not step.now[room, left].any():
            break
        pick = np.full(len(own), -1)
        holding = np.flatnonzero(step.now[room, left] > step.without[room, left])
        rooms, lefts = room[holding, None] - lengths, left[holding, None] - costs
        fits = (rooms >= 0) & (lefts >= 0)
        value = step.now[room[holding], left[holding]]
        found = fits & (step.rest[rooms * fits, lefts * fits] + values == value[:, None]) & (values > 0)
        pick[holding] = found.argmax(1)
        picks.append(pick)
        room = room - np.where(pick < 0, 0, lengths[pick])
        left = left - np.where(pick < 0, 0, costs[pick])
    return np.stack(picks, axis=1)

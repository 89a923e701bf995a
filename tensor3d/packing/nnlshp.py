"""Non-negative least squares histogram packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.extra import require_scipy
from tensor3d.packing.limits import Limits
from tensor3d.packing.partitions import count_partitions, partitions
from tensor3d.packing.plan import Plan
from tensor3d.packing.rounding import round_up

MAX_BYTES = 2**31
"""Memory that the planner may take, as estimated before it starts."""
MAX_CAPACITY = 2048
"""Slots for which least squares take minutes, not hours."""
_SHORT = 8
_SHORT_WEIGHT = 0.09
"""Of the shortest lengths: slots for them that stay empty are short themselves."""
_TOLERANCE = 1e-9

Table = NDArray[np.int32]
Floats = NDArray[np.float64]


def nnlshp(
    histogram: NDArray[np.integer] | Sequence[int],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """Packs sequences by least squares over all full packs (Krell et al., 2021, arXiv 2107.02027, section 3.3).

    Every way to fill a pack exactly is a column; the numbers of packs, at least 0, are those that miss the histogram
    least in squares, short lengths counting less. They are rounded; a slot without a sequence of its length takes a
    shorter one, and sequences without a slot are packed by best fit (in the paper, each alone). Seconds at a capacity
    of 512 and depth 3; `lp` is nearly always better and quicker. The result is a function of the arguments and
    of scipy's version.

    Args:
        histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.
        capacity: token slots of a pack.
        max_sequences: sequences of a pack, at most. None: no limit, for which there is memory at small capacities only.
        budget: a second limit: the sum of the costs over a pack, at most.
        costs: whole numbers (capacity + 1 or more,): cost of a sequence by length.

    Raises:
        ValueError: see `Limits` and `Limits.counts`; scipy is not installed; or it would take too much memory or time.
    """
    limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
    counts = limits.counts(histogram)
    _check_size(limits)
    require_scipy("the planner nnlshp")
    table = _affordable(partitions(limits.capacity, min(limits.max_sequences, limits.capacity)), limits)
    wanted = np.zeros(limits.capacity + 1)
    wanted[list(counts)] = list(counts.values())
    columns, amounts = _least_squares(table, wanted)
    repeats = np.rint(amounts).astype(np.int64).tolist()
    packs = {
        tuple(length for length in reversed(column) if length): repeat
        for column, repeat in zip(table[:, columns].T.tolist(), repeats, strict=True)
        if repeat
    }
    return Plan.of(limits, round_up(packs, counts, limits))


def _check_size(limits: Limits) -> None:
    capacity, depth = limits.capacity, min(limits.max_sequences, limits.capacity)
    if capacity > MAX_CAPACITY:
        raise ValueError(
            f"nnlshp takes hours at a capacity of {capacity}; it may be {MAX_CAPACITY}. Choose the planner lp or lpfhp."
        )
    # The table twice, when it is made, and some numbers for each of its columns.
    column = 8 * depth + 32
    ways = count_partitions(capacity, depth, MAX_BYTES // column)
    if ways * column > MAX_BYTES:
        raise ValueError(
            f"nnlshp would list {ways:.3g} or more ways to fill {capacity} slots with up to {depth} sequences, "
            f"{ways * column / 2**30:.3g} GiB; it may take {MAX_BYTES / 2**30:g} GiB. "
            "Lower max_sequences, or choose the planner lp or lpfhp."
        )


def _affordable(table: Table, limits: Limits) -> Table:
    """The columns within the budget."""
    if limits.budget is None or limits.costs is None:
        return table
    costs = np.array([0, *limits.costs[1:]], dtype=np.int64)
    total = np.zeros(table.shape[1], dtype=np.int64)
    for row in table:
        total += costs[row]
    return table[:, total <= limits.budget]


def _least_squares(table: Table, wanted: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Columns of the table and their amounts, which minimise the weighted squares of what is missed.

    scipy's solver takes minutes for all columns. It is given a few; the gradient says which of the others would help,
    and the best for each length join, until none would: the solution is then that for all columns.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    weights = np.ones(len(wanted))
    weights[1 : 1 + min(_SHORT, len(wanted) // 32)] = _SHORT_WEIGHT
    weights[0] = 0
    columns = np.flatnonzero((table[:-2] == 0).all(0))
    while True:
        matrix = _matrix(table[:, columns], len(wanted)) * weights[:, None]
        amounts: Floats = nnls(matrix, wanted * weights, maxiter=100 * len(wanted))[0] if len(columns) else np.zeros(0)
        misses = (wanted * weights - matrix @ amounts) * weights
        used = amounts > 0
        better = np.setdiff1d(_steepest(table, misses, _TOLERANCE * wanted.max()), columns)
        if not len(better):
            return columns[used], amounts[used]
        columns = np.concatenate([columns[used], better])


def _matrix(table: Table, rows: int) -> Floats:
    """(rows, columns): how often each length occurs in each column."""
    matrix: Any = np.zeros((rows, table.shape[1]))
    for row in table:
        np.add.at(matrix, (row, np.arange(table.shape[1])), 1)
    return np.asarray(matrix)


def _steepest(table: Table, misses: Floats, tolerance: float) -> NDArray[np.int64]:
    """For each length the column with the greatest gain that holds it, where that is above the tolerance."""
    gains = np.zeros(table.shape[1])
    for row in table:
        gains += misses[row]
    best = np.full(len(misses), tolerance)
    for row in table:
        np.maximum.at(best, row, gains)
    best[0] = np.inf
    found = np.zeros(len(misses), dtype=np.int64) - 1
    for row in table:
        hits = np.flatnonzero((gains >= best[row]) & (gains > tolerance))
        found[row[hits]] = hits
    return np.unique(found[found >= 0])

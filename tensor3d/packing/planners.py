"""All planners, by name."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.bin_groups import BinGroups, best_fit
from tensor3d.packing.column_generation import MAX_SIZE, size_of, solve
from tensor3d.packing.limits import Limits, require_scipy
from tensor3d.packing.plan import PackingPlan, lp_bound

# --- What every planner takes -----------------------------------------------------------------------------------------


class Planner(Protocol):
    """Plans the packs of all sequences of a histogram. Deterministic: a function of its arguments alone."""

    def __call__(
        self,
        histogram: NDArray[np.integer] | Sequence[int],
        capacity: int,
        max_sequences: int | None = None,
        *,
        budget: int | None = None,
        costs: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> PackingPlan:
        """The plan.

        Args:
            histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.
            capacity: token slots of a pack.
            max_sequences: sequences of a pack, at most. None: no limit.
            budget: a second limit: the sum of the costs over a pack, at most.
            costs: whole numbers (capacity + 1 or more,): cost of a sequence by length.

        Raises:
            ValueError: see `Limits` and `Limits.counts`.
        """
        ...


def planner(plan: Callable[[dict[int, int], Limits], PackingPlan]) -> Planner:
    """The planner that plans so, once its limits are checked and its sequences counted by length, longest first."""

    @functools.wraps(plan, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def checked(
        histogram: NDArray[np.integer] | Sequence[int],
        capacity: int,
        max_sequences: int | None = None,
        *,
        budget: int | None = None,
        costs: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> PackingPlan:
        limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
        return plan(limits.counts(histogram), limits)

    del checked.__wrapped__  # whose signature is another
    return checked


# --- From numbers of packs that a programme wishes for to packs of the sequences that there are -----------------------

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
    shelf = BinGroups(limits, started)
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


# --- The best planner: the linear programme over all ways to fill a pack, rounded to whole packs ----------------------

_ROUNDINGS = (1e-6, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
"""What is added to every amount before it is rounded down; the first forgives the solver its tolerance."""


@planner
def lp(counts: dict[int, int], limits: Limits) -> PackingPlan:
    """Packs sequences in nearly as few packs as can be: tens above a proven bound, for millions of sequences.

    The linear programme of packing (see column_generation.py) is solved, and its amounts are rounded to whole
    packs; what finds no slot then is packed by best fit, also into the room that is left. Several roundings are tried,
    and `lpfhp`: the plan with the fewest packs is returned, with the programme's bound. The result is a function of
    the arguments and of the versions of scipy and numpy; where several machines need one plan, plan once and store it.

    Args: see `Planner`.

    Raises:
        ValueError: see `Planner`; scipy is not installed; or the programme is too large.
    """
    if (size := size_of(counts, limits)) > MAX_SIZE:
        raise ValueError(
            f"the linear programme of {len(counts)} lengths in {limits.capacity} slots is too large: {size}, and may "
            f"be {MAX_SIZE}. Choose the planner lpfhp or the streaming packer, which fill such large packs well."
        )
    require_scipy("the planner lp")
    relaxation = solve(counts, limits)
    bound = lp_bound(counts, limits, relaxation)
    best = best_fit(counts, limits)
    for rounding in _ROUNDINGS:
        if sum(best.values()) > bound.packs:
            wanted = {column: math.floor(amount + rounding) for column, amount in relaxation.amounts.items()}
            best = min(best, round_up(wanted, counts, limits), key=lambda packs: sum(packs.values()))
    return PackingPlan.of(limits, best, bound)


# --- Longest-pack-first histogram packing: best fit, in one pass over the lengths -------------------------------------


@planner
def lpfhp(counts: dict[int, int], limits: Limits) -> PackingPlan:
    """Packs sequences by best fit, longest first (Krell et al., 2021, arXiv 2107.02027, section 3.2).

    Packs filled alike are moved as one group, so that the time depends on the lengths that occur and not on how many
    sequences there are: milliseconds for 16 million. The result is a function of the arguments alone.

    Args, Raises: see `Planner`.
    """
    return PackingPlan.of(limits, best_fit(counts, limits))


# --- Shortest-pack-first histogram packing: worst fit, in one pass over the lengths -----------------------------------


@planner
def spfhp(counts: dict[int, int], limits: Limits) -> PackingPlan:
    """Packs sequences longest first, each into the pack with the most room (Krell et al., 2021, arXiv 2107.02027, 3.1).

    What fits nowhere begins a pack of its own, also where equal sequences could share one. As quick as `lpfhp`, and
    behind it in efficiency: it serves to compare. The result is a function of the arguments
    alone.

    Args, Raises: see `Planner`.
    """
    shelf = BinGroups(limits)
    for length, count in counts.items():
        shelf.worst_fit(length, count)
    return PackingPlan.of(limits, shelf.packs())


# --- All ways to fill a pack exactly ----------------------------------------------------------------------------------


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


# --- Non-negative least squares histogram packing ---------------------------------------------------------------------

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


@planner
def nnlshp(counts: dict[int, int], limits: Limits) -> PackingPlan:
    """Packs sequences by least squares over all full packs (Krell et al., 2021, arXiv 2107.02027, section 3.3).

    Every way to fill a pack exactly is a column; the numbers of packs, at least 0, are those that miss the histogram
    least in squares, short lengths counting less. They are rounded; a slot without a sequence of its length takes a
    shorter one, and sequences without a slot are packed by best fit (in the paper, each alone). Seconds at a capacity
    of 512 and depth 3; `lp` is nearly always better and quicker. The result is a function of the arguments and
    of scipy's version.

    Args: see `Planner`. Without `max_sequences` there is memory at small capacities only.

    Raises:
        ValueError: see `Planner`; scipy is not installed; or it would take too much memory or time.
    """
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
    return PackingPlan.of(limits, round_up(packs, counts, limits))


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


# --- No packing: the baseline that every other planner is compared with -----------------------------------------------


@planner
def padded(counts: dict[int, int], limits: Limits) -> PackingPlan:
    """One sequence a pack, whatever else the limits allow; the rest of the pack stays empty.

    The plan's lower bound is that of these limits. Args, Raises: see `Planner`.
    """
    return PackingPlan.of(limits, {(length,): count for length, count in counts.items()})


# --- All planners -----------------------------------------------------------------------------------------------------


PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "padded": padded,
        "spfhp": spfhp,
        "lpfhp": lpfhp,
        "nnlshp": nnlshp,
        "lp": lp,
    }
)
"""From the baseline to the best; what each does says its own docstring."""

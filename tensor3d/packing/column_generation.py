"""The linear programme of packing, by column generation (Gilmore and Gomory, 1961).

A column is a way to fill a pack, the amount of it how many packs are filled that way, in fractions:

    minimise    sum of amounts
    subject to  slots of length l in all packs - slots of l that are used for the next shorter length
                + slots that come down from the next longer length  >=  sequences of length l

There are far too many columns to list. The master programme holds some; its dual prices say what a slot of each length
is worth, and the best packs at these prices become new columns until none is worth more than 1, the price of a pack.

- Slots that may hold shorter sequences keep the prices in order of length, which shrinks the search.
- Prices of the master jump from one extreme to another. They are mixed with a running mean of those of earlier rounds
  (Pessoa et al., 2018, "Automation and combination of linear-programming based stabilization techniques in column
  generation"), in several shares at once: pricing is cheap beside another round of the master.
- Any prices give a bound (Farley, 1990): dividing them by the value of the best pack makes them feasible for the dual.
  In whole numbers it is exact, so that it holds however far the generation went and however HiGHS rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.bin_groups import best_fit
from tensor3d.packing.limits import Limits, require_scipy
from tensor3d.packing.pricing import MIN_CELLS, Ints, KnapsackSolution, KnapsackSpec, fill_by_length, fill_in_budget

Floats = NDArray[np.float64]
Column = tuple[int, ...]

MAX_SIZE = 2**20
"""Effort (see `size_of`) up to which the programme is solved. Without a budget, a second or so at a quarter of that."""
_SHARES = (0.0, 0.3, 0.6, 0.9)
"""Of the mean of earlier prices, in the mixtures that are tried each round; the last mixture is the new mean."""
_FULLNESS = 0.1
"""Share of prices in proportion to length in the mean: where the others are equal, fuller packs are found."""
_UNIT = 2**40
"""Price of a pack in whole numbers."""
_ROUNDS = 200
_PACKS_TOLERANCE = 1e-6
_KEPT_PER_LENGTH = 8
"""Columns that the master keeps, the most promising ones, for each length."""
_GAIN = 1e-9
"""A column must be worth this much more than it costs."""


@dataclass(frozen=True, kw_only=True)
class LPRelaxation:
    """A solution of the linear programme."""

    packs: float
    """Sum of the amounts."""
    amounts: dict[Column, float]
    """Packs of each column, lengths longest first; only those above 0."""
    bound: int
    """Packs that no plan can do without: certain, though the generation may have ended early."""


def size_of(counts: dict[int, int], limits: Limits) -> int:
    """Effort of the programme: lengths times capacity, more where the number of sequences or a budget is a limit."""
    layers = 1 if limits.max_sequences >= limits.capacity // min(counts) else limits.max_sequences
    cells = 1 if limits.budget is None else min(limits.budget + 1, MIN_CELLS)
    # Every slot costs something, however few the lengths.
    return max(len(counts), 16) * limits.capacity * max(1, layers // 16, cells // 64)


def solve(counts: dict[int, int], limits: Limits) -> LPRelaxation:
    """Solves the programme. Deterministic: no clock, no chance.

    Args:
        counts: sequences by length, see `Limits.counts`.

    Raises:
        ValueError: scipy is not installed.
    """
    require_scipy("the linear programme of packing")
    return _Generation(counts, limits).run()


class _Generation:
    """Column generation in progress. Lengths are numbered from the shortest, columns are tuples of these numbers."""

    def __init__(self, counts: dict[int, int], limits: Limits) -> None:
        lengths = np.array(sorted(counts), dtype=np.int64)
        self._limits = limits
        self._sack = KnapsackSpec(
            lengths=lengths,
            capacity=limits.capacity,
            depth=min(limits.max_sequences, limits.capacity // int(lengths[0])),
            costs=np.array([limits.cost_of(length) for length in lengths.tolist()], dtype=np.int64),
            budget=limits.budget,
        )
        self._counts = [counts[length] for length in lengths.tolist()]
        number = {length: i for i, length in enumerate(lengths.tolist())}
        start = best_fit(counts, limits)
        self._columns = list(dict.fromkeys(tuple(sorted(number[length] for length in column)) for column in start))
        self._master = _Master(self._counts, follows(self._sack.costs))
        self._fullness = lengths / limits.capacity
        self._mean = self._fullness
        self._bound = 0
        self._fill = fill_by_length
        """The budget is relaxed as long as that finds packs within it, which is much quicker."""

    def run(self) -> LPRelaxation:
        for _ in range(_ROUNDS):
            columns = self._columns
            packs, amounts, prices = self._master.solve(columns)
            found = [] if self._is_tight(packs) else self._price(prices)
            if not found and self._limits.budget is not None and not self._is_tight(packs):
                self._fill = fill_in_budget
                found = self._price(prices)
            if not found or self._is_tight(packs):
                break
            self._columns = self._promising(amounts, prices) + found
        lengths = self._sack.lengths.tolist()
        used = {
            tuple(lengths[i] for i in reversed(column)): float(amount)
            for column, amount in zip(columns, amounts, strict=True)
            if amount > 0
        }
        return LPRelaxation(packs=packs, amounts=used, bound=self._bound)

    def _is_tight(self, packs: float) -> bool:
        """Whether the bound, which is of whole packs, cannot get any better."""
        return math.ceil(packs - _PACKS_TOLERANCE) <= self._bound

    def _price(self, prices: Floats) -> list[Column]:
        """New columns that are worth more than a pack; raises the bound."""
        known = set(self._columns)
        found: dict[Column, None] = {}
        mean = (1 - _FULLNESS) * self._mean + _FULLNESS * self._fullness
        # A table over the budget takes as long as a master.
        for share in _SHARES if self._fill is fill_by_length else _SHARES[::2]:
            mixed = share * mean + (1 - share) * prices
            values = np.floor(mixed * _UNIT).astype(np.int64)
            fills = self._fill(self._sack, values)
            self._bound = max(self._bound, self._bound_of(values, fills))
            found.update(dict.fromkeys(column for column in self._worthy(fills, prices) if column not in known))
        self._mean = mixed
        return list(found)

    def _bound_of(self, values: Ints, fills: KnapsackSolution) -> int:
        # Python's whole numbers do not overflow.
        worth = sum(value * count for value, count in zip(values.tolist(), self._counts, strict=True))
        return -(-worth // fills.best) if fills.best else 0

    def _worthy(self, fills: KnapsackSolution, prices: Floats) -> list[Column]:
        """Those of the columns that gain at these prices and keep the budget."""
        columns = fills.columns
        # Number -1, an empty slot, reads the last entry.
        worth = np.append(prices, 0.0)[columns].sum(1)
        keep = worth > 1 + _GAIN
        if self._limits.budget is not None:
            keep &= np.append(self._sack.costs, 0)[columns].sum(1) <= self._limits.budget
        return [tuple(i for i in row if i >= 0) for row in np.sort(columns[keep], axis=1).tolist()]

    def _promising(self, amounts: Floats, prices: Floats) -> list[Column]:
        """The columns in use, and of the others those that are nearest to it."""
        kept = _KEPT_PER_LENGTH * len(self._counts)
        if len(self._columns) <= kept:
            return self._columns
        worth = np.array([prices[list(column)].sum() for column in self._columns])
        worth[amounts > 0] = np.inf
        order = np.sort(np.argsort(-worth, kind="stable")[: max(kept, int((amounts > 0).sum()))])
        return [self._columns[i] for i in order.tolist()]


def follows(costs: Ints) -> NDArray[np.bool_]:
    """(n - 1,): whether a slot of length number `i + 1` may hold a sequence of number `i`, which must not cost more."""
    return costs[:-1] <= costs[1:]


class _Master:
    """The programme over the columns at hand."""

    def __init__(self, counts: list[int], follows: NDArray[np.bool_]) -> None:
        # HiGHS knows absolute tolerances: the programme is scaled to a fixed number of sequences.
        self._scale = sum(counts) / 1e4
        self._needs = np.array(counts, dtype=np.float64) / self._scale
        self._follows = np.flatnonzero(follows)

    def solve(self, columns: list[Column]) -> tuple[float, Floats, Floats]:
        """Packs, amounts (columns,) and prices (n,), all at least 0.

        Raises:
            ValueError: scipy is not installed.
        """
        matrix = self._matrix(columns)
        costs = np.zeros(matrix.shape[1])
        costs[: len(columns)] = 1
        result = _linprog(costs, matrix, self._needs)
        amounts = np.maximum(result.x[: len(columns)], 0) * self._scale
        return float(result.fun) * self._scale, amounts, np.maximum(-result.ineqlin.marginals, 0)

    def _matrix(self, columns: list[Column]) -> Any:
        """(n, columns + links): slots of each length."""
        from scipy.sparse import csc_array  # type: ignore[import-untyped]

        sizes = np.array([len(column) for column in columns])
        first, links = len(columns), len(self._follows)
        rows = np.concatenate([[i for column in columns for i in column], self._follows, self._follows + 1])
        cells = np.concatenate([np.repeat(np.arange(first), sizes), np.tile(np.arange(first, first + links), 2)])
        values = np.concatenate([np.ones(sizes.sum() + links), -np.ones(links)])
        # Equal cells add up: a column may hold a length several times.
        return csc_array((values, (rows.astype(np.int64), cells)), shape=(len(self._needs), first + links))


def _linprog(costs: Floats, matrix: Any, needs: Floats) -> Any:
    """min costs @ x with matrix @ x >= needs, x >= 0."""
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    tolerances = {"dual_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9}
    # The interior point is quicker here; should it give up, the simplex does not.
    for method, options in (("highs-ipm", tolerances), ("highs-ds", tolerances), ("highs-ds", {})):
        result = linprog(costs, A_ub=-matrix, b_ub=-needs, method=method, options=options)
        if result.status == 0:
            return result
    raise AssertionError(f"a programme that has a solution was not solved: {result.message}")

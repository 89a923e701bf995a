"""Small packing problems for property tests, and their best solution by trying everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tensor3d.packing import Limits


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a planner is given."""

    histogram: tuple[int, ...]
    capacity: int
    max_sequences: int | None
    budget: int | None
    costs: tuple[int, ...] | None

    def call(self, planner: Callable[..., Any]) -> Any:
        return planner(
            np.array(self.histogram), self.capacity, self.max_sequences, budget=self.budget, costs=self.costs
        )

    @property
    def limits(self) -> Limits:
        return Limits.of(self.capacity, self.max_sequences, budget=self.budget, costs=self.costs)


@st.composite
def problems(draw: st.DrawFn, *, capacity: int = 24, count: int = 50, kinds: int = 8) -> Problem:
    """Problems of up to `kinds` lengths in up to `capacity` slots, up to `count` sequences of each."""
    slots = draw(st.integers(1, capacity))
    counts = draw(st.dictionaries(st.integers(1, slots), st.integers(1, count), min_size=1, max_size=kinds))
    budget = costs = None
    if draw(st.booleans()):
        costs = tuple(draw(st.lists(st.integers(0, 9), min_size=slots + 1, max_size=slots + 3)))
        dearest = max(costs[length] for length in counts)
        budget = dearest + draw(st.integers(0, 2 * dearest + 1))
    return Problem(
        histogram=tuple(counts.get(length, 0) for length in range(slots + 1)),
        capacity=slots,
        max_sequences=draw(st.none() | st.integers(1, 6)),
        budget=budget,
        costs=costs,
    )


def fewest_packs(problem: Problem) -> int:
    """The optimum, by trying every way to fill a pack that holds the longest sequence left. For a dozen sequences."""
    limits = problem.limits

    def fills(lengths: tuple[int, ...], pack: tuple[int, ...]) -> set[tuple[int, ...]]:
        """Every pack that `pack` can grow to with some of the lengths, which descend."""
        found = {pack}
        for i, length in enumerate(lengths):
            grown = (*pack, length)
            if (i == 0 or length != lengths[i - 1]) and keeps(grown):
                found |= fills(lengths[i + 1 :], grown)
        return found

    def keeps(pack: tuple[int, ...]) -> bool:
        cost = sum(map(limits.cost_of, pack))
        return (
            len(pack) <= limits.max_sequences
            and sum(pack) <= limits.capacity
            and (limits.budget is None or cost <= limits.budget)
        )

    @cache
    def best(lengths: tuple[int, ...]) -> int:
        if not lengths:
            return 0
        return 1 + min(best(without(lengths, pack)) for pack in fills(lengths[1:], lengths[:1]))

    def without(lengths: tuple[int, ...], pack: tuple[int, ...]) -> tuple[int, ...]:
        rest = list(lengths)
        for length in pack:
            rest.remove(length)
        return tuple(rest)

    counts = limits.counts(np.array(problem.histogram))
    return best(tuple(length for length, count in counts.items() for _ in range(count)))


def web_pages(capacity: int, sequences: int) -> np.ndarray:
    """int64 (capacity + 1,): lengths from 5 on, fewer the longer they are, and a quarter cut to the capacity."""
    lengths = np.arange(capacity + 1)
    weights = np.exp(-3 * lengths / capacity) * (1 + 0.3 * np.sin(lengths / 3))
    weights[:5] = 0
    weights[capacity] = weights.sum() / 3
    return np.floor(weights / weights.sum() * sequences).astype(np.int64)

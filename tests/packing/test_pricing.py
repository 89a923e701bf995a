"""The most valuable pack, against trying every pack."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor3d.packing import pricing
from tensor3d.packing.planners import count_partitions, partitions
from tensor3d.packing.pricing import KnapsackSolution, KnapsackSpec, fill_by_length, fill_in_budget


@st.composite
def sacks(draw: st.DrawFn, *, scale: int = 1) -> tuple[KnapsackSpec, np.ndarray]:
    """A knapsack and the values of its lengths; costs and budget are multiples of `scale`, or one more."""
    capacity = draw(st.integers(1, 12))
    lengths = sorted(draw(st.sets(st.integers(1, capacity), min_size=1, max_size=5)))
    costs = [scale * draw(st.integers(0, 4)) + draw(st.integers(0, 1)) for _ in lengths]
    sack = KnapsackSpec(
        lengths=np.array(lengths),
        capacity=capacity,
        depth=draw(st.integers(1, 6)),
        costs=np.array(costs),
        budget=max(costs) + scale * draw(st.integers(0, 6)),
    )
    return sack, np.array([draw(st.integers(0, 9)) for _ in lengths])


def every_pack(sack: KnapsackSpec, budget: int | None) -> list[tuple[int, ...]]:
    return [
        pack
        for size in range(min(sack.depth, sack.capacity) + 1)
        for pack in combinations_with_replacement(range(len(sack.lengths)), size)
        if sack.lengths[list(pack)].sum() <= sack.capacity
        and (budget is None or sack.costs[list(pack)].sum() <= budget)
    ]


def check_packs(
    sack: KnapsackSpec, values: np.ndarray, fills: KnapsackSolution, budget: int | None, *, exact: bool
) -> None:
    packs = every_pack(sack, budget)
    worth = {pack: int(values[list(pack)].sum()) for pack in packs}
    if exact:
        assert fills.best == max(worth.values())
        assert len(fills.columns) == len(sack.lengths)
    assert fills.best >= max(worth.values())
    for row in fills.columns.tolist():
        pack = tuple(sorted(i for i in row if i >= 0))
        assert pack in worth
        if exact:
            assert worth[pack] == max(value for other, value in worth.items() if row[0] in other)


@given(sacks())
def test_capacity_and_depth(case: tuple[KnapsackSpec, np.ndarray]) -> None:
    sack, values = case
    check_packs(sack, values, fill_by_length(sack, values), None, exact=True)


@given(sacks())
def test_a_small_budget_is_exact(case: tuple[KnapsackSpec, np.ndarray]) -> None:
    sack, values = case
    check_packs(sack, values, fill_in_budget(sack, values), sack.budget, exact=True)


@given(sacks(scale=11))
def test_a_divided_budget_gives_a_bound_and_packs_within_it(case: tuple[KnapsackSpec, np.ndarray]) -> None:
    sack, values = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "MIN_CELLS", 5)
        patch.setattr(pricing, "_MAX_WORK", 1)
        fills = fill_in_budget(sack, values)
    check_packs(sack, values, fills, sack.budget, exact=False)


@pytest.mark.parametrize(
    ("lengths", "depth", "budget", "cells"),
    [
        (43, 6, 4818, 4819),  # exact
        (43, 6, 10**5, 2**29 // 43 // (6 * 247) // 4),  # for time
        (1, 247, 10**6, 2**25 // 247 // 4),  # for memory
        (247, 16, 10**5, 256),  # at least
        (247, 16, 100, 256),
    ],
)
def test_a_budget_is_divided_where_tables_would_be_large(lengths: int, depth: int, budget: int, cells: int) -> None:
    kinds = np.arange(1, 1 + lengths)
    sack = KnapsackSpec(lengths=kinds, capacity=247, depth=depth, costs=kinds, budget=budget)
    assert pricing._cells(sack) == cells


def test_partitions_of_six() -> None:
    assert partitions(6, 3).T.tolist() == [
        [0, 0, 6], [0, 1, 5], [0, 2, 4], [0, 3, 3], [1, 1, 4], [1, 2, 3], [2, 2, 2],
    ]  # fmt: skip
    assert partitions(6, 1).tolist() == [[6]]


@given(st.integers(1, 30), st.integers(1, 8))
def test_partitions_are_counted_before_they_are_listed(total: int, parts: int) -> None:
    table = partitions(total, parts)
    assert table.shape == (parts, count_partitions(total, parts, 10**9))
    assert (table.sum(0) == total).all()
    assert (np.diff(table, axis=0) >= 0).all()
    assert len(set(map(tuple, table.T.tolist()))) == table.shape[1]
    assert count_partitions(total, parts, 3) >= min(4, table.shape[1])

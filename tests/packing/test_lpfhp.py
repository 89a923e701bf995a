"""Longest-pack-first packing against examples by hand, a plain best fit, and its limits."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d.packing import Plan, Strategy, lpfhp


def histogram(*lengths: int) -> np.ndarray:
    return np.bincount(lengths)


def packs(plan: Plan) -> dict[tuple[int, ...], int]:
    return {strategy.lengths: strategy.repeat for strategy in plan.strategies}


def test_a_small_set_by_hand() -> None:
    plan = lpfhp(histogram(6, 6, 4, 3, 1), 10, max_sequences=3)
    assert plan.strategies == (Strategy(lengths=(6, 4), repeat=1), Strategy(lengths=(6, 3, 1), repeat=1))
    assert (plan.packs, plan.sequences, plan.tokens, plan.lower_bound) == (2, 5, 20, 2)
    assert (plan.efficiency, plan.packing_factor) == (1.0, 2.5)


def test_efficiency_counts_unused_slots() -> None:
    plan = lpfhp(histogram(7, 5), 10, max_sequences=2)
    assert (plan.packs, plan.efficiency, plan.packing_factor, plan.lower_bound) == (2, 0.6, 1.0, 2)


def test_a_sequence_goes_where_it_fits_best() -> None:
    assert packs(lpfhp(histogram(7, 6, 3), 10, max_sequences=2)) == {(7, 3): 1, (6,): 1}


def test_equal_sequences_share_a_pack() -> None:
    assert packs(lpfhp(histogram(*[3] * 8), 10, max_sequences=9)) == {(3, 3, 3): 2, (3, 3): 1}
    assert packs(lpfhp(histogram(*[3] * 7), 10, max_sequences=2)) == {(3, 3): 3, (3,): 1}


def test_what_is_left_of_a_length_stays_in_the_tightest_packs() -> None:
    assert packs(lpfhp(histogram(6, 6, 6, 2, 2, 2), 10, max_sequences=3)) == {(6, 2, 2): 1, (6, 2): 1, (6,): 1}


def test_the_number_of_sequences_is_limited() -> None:
    assert packs(lpfhp(histogram(5, 1, 1, 1, 1), 10, max_sequences=3)) == {(5, 1, 1): 1, (1, 1): 1}
    assert packs(lpfhp(histogram(5, 1, 1), 10, max_sequences=1)) == {(5,): 1, (1,): 2}


def test_the_budget_is_a_second_limit() -> None:
    # By tokens all four would fit into one pack; each costs 1 and a pack may cost 2.
    plan = lpfhp(histogram(4, 3, 2, 1), 10, max_sequences=4, budget=2, cost=lambda length: 1)
    assert packs(plan) == {(4, 3): 1, (2, 1): 1}


def test_sequences_without_cost_do_not_use_the_budget() -> None:
    plan = lpfhp(histogram(4, 3, 2, 1), 10, max_sequences=4, budget=0, cost=lambda length: 0)
    assert packs(plan) == {(4, 3, 2, 1): 1}


def best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Free slots of every pack when sequences are put one by one, longest first, where the least is left."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else capacity) - length)
    return sorted(free)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_limit_on_sequences_it_is_best_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(5, 40))
    lengths = rng.integers(1, capacity + 1, size=60).tolist()
    plan = lpfhp(histogram(*lengths), capacity, max_sequences=capacity)
    free = [capacity - sum(s.lengths) for s in plan.strategies for _ in range(s.repeat)]
    assert sorted(free) == best_fit(lengths, capacity)


@pytest.mark.parametrize("seed", range(30))
def test_every_plan_keeps_its_limits_and_its_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity, max_sequences = int(rng.integers(4, 60)), int(rng.integers(1, 9))
    counts = rng.integers(0, 200, size=capacity + 1) * (rng.random(capacity + 1) < 0.4)
    counts[0], counts[capacity] = 0, 1
    budget = int(rng.integers(capacity // 2 + 1, capacity + 1))

    def cost(length: int) -> int:
        return length // 2 + 1

    plan = lpfhp(counts, capacity, max_sequences, budget=budget, cost=cost)
    np.testing.assert_array_equal(plan.histogram(), counts)
    for strategy in plan.strategies:
        assert strategy.repeat >= 1
        assert list(strategy.lengths) == sorted(strategy.lengths, reverse=True)
        assert sum(strategy.lengths) <= capacity
        assert len(strategy.lengths) <= max_sequences
        assert sum(map(cost, strategy.lengths)) <= budget
    assert len({strategy.lengths for strategy in plan.strategies}) == len(plan.strategies)
    assert plan.lower_bound <= plan.packs <= plan.sequences
    assert plan == lpfhp(counts, capacity, max_sequences, budget=budget, cost=cost)


def test_the_work_does_not_grow_with_the_number_of_sequences() -> None:
    counts = np.zeros(513, dtype=np.int64)
    counts[5:] = 10**12 + np.arange(508) ** 3
    plan = lpfhp(counts, 512, max_sequences=12)
    np.testing.assert_array_equal(plan.histogram(), counts)
    assert len(plan.strategies) < 2000


@pytest.mark.parametrize(
    ("counts", "capacity", "max_sequences", "message"),
    [
        ([0, 1], 0, 1, "capacity must be at least 1 token slot. Got 0"),
        ([0, 1], 4, 0, "max_sequences must be at least 1.*Got 0"),
        ([1, 1], 4, 1, "at least 1 token. Got 1 sequences of length 0"),
        ([0, 0, 0, 0, 0, 2], 4, 1, "a sequence of 5 tokens does not fit a capacity of 4"),
        ([0, -3, 1], 4, 1, "counts must be at least 0. Got -3 of length 1"),
        ([0, 0, 0], 4, 1, "counts no sequence at all"),
        ([], 4, 1, "one-dimensional array of whole numbers"),
        ([[0, 1]], 4, 1, r"whole numbers. Got int64, shape \(1, 2\)"),
        ([0.0, 1.0], 4, 1, "whole numbers. Got float64"),
    ],
)
def test_what_cannot_be_packed_is_named(counts: list, capacity: int, max_sequences: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lpfhp(np.array(counts), capacity, max_sequences)


def test_a_sequence_dearer_than_a_pack_is_named() -> None:
    with pytest.raises(ValueError, match="a sequence of 7 tokens costs 3, more than the budget of 2"):
        lpfhp(histogram(7, 4), 10, 2, budget=2, cost=lambda length: length // 2)
    with pytest.raises(ValueError, match=r"a cost must be at least 0. Got -1 for length 4"):
        lpfhp(histogram(4), 10, 2, budget=2, cost=lambda length: -1)


def test_budget_and_cost_come_together() -> None:
    with pytest.raises(ValueError, match="budget is given without cost"):
        lpfhp(histogram(4), 10, 2, budget=2)
    with pytest.raises(ValueError, match="cost is given without budget"):
        lpfhp(histogram(4), 10, 2, cost=lambda length: 1)

"""Longest-pack-first packing against examples by hand, a plain best fit, and its limits."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d.packing import LowerBound, PackingPlan, PackPattern, lpfhp


def histogram(*lengths: int) -> np.ndarray:
    return np.bincount(lengths)


def packs(plan: PackingPlan) -> dict[tuple[int, ...], int]:
    return {strategy.lengths: strategy.repeat for strategy in plan.strategies}


def test_a_small_set_by_hand() -> None:
    plan = lpfhp(histogram(6, 6, 4, 3, 1), 10, max_sequences=3)
    assert plan.strategies == (PackPattern(lengths=(6, 4), repeat=1), PackPattern(lengths=(6, 3, 1), repeat=1))
    assert (plan.packs, plan.sequences, plan.tokens) == (2, 5, 20)
    assert (plan.efficiency, plan.packing_factor) == (1.0, 2.5)
    assert plan.lower_bound == LowerBound(packs=2, kind="lp")


def test_efficiency_counts_unused_slots() -> None:
    plan = lpfhp(histogram(7, 5), 10, max_sequences=2)
    assert (plan.packs, plan.efficiency, plan.packing_factor) == (2, 0.6, 1.0)


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
    plan = lpfhp(histogram(4, 3, 2, 1), 10, max_sequences=4, budget=2, costs=[1] * 11)
    assert packs(plan) == {(4, 3): 1, (2, 1): 1}


def test_sequences_without_cost_do_not_use_the_budget() -> None:
    plan = lpfhp(histogram(4, 3, 2, 1), 10, max_sequences=4, budget=0, costs=[0] * 11)
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


def test_the_work_does_not_grow_with_the_number_of_sequences() -> None:
    counts = np.zeros(513, dtype=np.int64)
    counts[5:] = 10**12 + np.arange(508) ** 3
    plan = lpfhp(counts, 512, max_sequences=12)
    np.testing.assert_array_equal(plan.histogram(), counts)
    assert len(plan.strategies) < 2000

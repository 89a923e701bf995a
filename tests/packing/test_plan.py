"""Plans and limits as data: what they count, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensor3d.packing import Limits, LowerBound, PackingPlan, PackPattern, lpfhp
from tensor3d.packing.plan import token_bound

LIMITS = Limits(capacity=10, max_sequences=3, budget=4, costs=(0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2))


def plan(*strategies: tuple[int, ...], limits: Limits = LIMITS) -> PackingPlan:
    """Each strategy: repeat, then lengths."""
    return PackingPlan(
        limits=limits, strategies=tuple(PackPattern(repeat=row[0], lengths=row[1:]) for row in strategies)
    )


def test_what_a_plan_counts() -> None:
    made = plan((3, 6, 4), (2, 5, 2, 1))
    assert (made.capacity, made.packs, made.sequences, made.tokens) == (10, 5, 12, 46)
    assert (made.efficiency, made.packing_factor) == (46 / 50, 12 / 5)
    assert made.histogram().tolist() == [0, 2, 2, 0, 3, 2, 3, 0, 0, 0, 0]
    made.check([0, 2, 2, 0, 3, 2, 3])
    assert made.lower_bound == LowerBound(packs=5, kind="lp")


def test_plans_are_equal_by_what_they_hold() -> None:
    made = PackingPlan.of(LIMITS, {(2, 1): 4, (6, 4): 1, (5,): 0})
    assert made == plan((1, 6, 4), (4, 2, 1))
    assert made == PackingPlan.of(LIMITS, {(6, 4): 1, (2, 1): 4}, LowerBound(packs=3, kind="lp"))


@pytest.mark.parametrize(
    ("histogram", "message"),
    [
        ([0, 0, 0, 0, 3, 0, 4], r"3 sequences of length 6.*\b4; plan again"),
        ([0, 0, 0, 0, 3, 1, 3], r"0 sequences of length 5.*\b1"),
        ([0, 0, 0, 0, 0, 0, 3], r"3 sequences of length 4.*\b0"),
        ([0] * 11 + [1], "does not fit a capacity of 10"),
    ],
)
def test_the_histogram_of_other_sequences(histogram: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan((3, 6, 4)).check(np.array(histogram))


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ([], "needs at least one strategy. Got none"),
        ([(0, 6, 4)], "repeated at least once. Got .*repeat=0"),
        ([(1,)], r"the lengths of a pack, longest first. Got \(\)"),
        ([(1, 4, 6)], r"longest first. Got \(4, 6\)"),
        ([(1, 6, 5)], r"11 tokens in a pack of 10 slots: \(6, 5\)"),
        ([(1, 1, 1, 1, 1)], r"4 sequences in a pack that may hold 3: \(1, 1, 1, 1\)"),
        ([(1, 4, 4, 1)], r"a cost of 5 in a pack with a budget of 4: \(4, 4, 1\)"),
        ([(1, 4, 0)], r"at least 1 token. Got 0 in \(4, 0\)"),
    ],
)
def test_plans_that_break_their_limits(strategies: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(*strategies)


def test_limits_as_planners_take_them() -> None:
    assert Limits.of(10) == Limits(capacity=10, max_sequences=10)
    # What lies beyond the capacity is no part of the limits.
    costs = np.arange(20)
    assert Limits.of(np.int64(3), 2, budget=9, costs=costs) == Limits(
        capacity=3, max_sequences=2, budget=9, costs=(0, 1, 2, 3)
    )
    assert Limits.of(10).cost_of(7) == 0
    assert LIMITS.cost_of(7) == 2
    assert lpfhp([0, 3], 2, None).limits == Limits(capacity=2, max_sequences=2)


def test_counts_come_longest_first() -> None:
    assert list(LIMITS.counts(np.array([0, 5, 0, 2], dtype=np.uint16)).items()) == [(3, 2), (1, 5)]


def test_a_sequence_that_fills_a_pack_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"0.*length 10.*\b1\b"):
        plan((1, 6, 4)).check([0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("counts", "limits", "packs"),
    [
        ({6: 5}, Limits.of(10), 3),  # 30 tokens
        ({7: 3}, Limits.of(10), 3),  # 21 tokens: two packs and a token
        ({1: 7}, Limits.of(10, 3), 3),  # seven sequences, at most three a pack
        ({1: 5}, Limits.of(10, budget=2, costs=[1] * 11), 3),  # a cost of five, of two a pack
    ],
)
def test_the_token_bound_is_rounded_up(counts: dict[int, int], limits: Limits, packs: int) -> None:
    assert token_bound(counts, limits) == LowerBound(packs=packs, kind="tokens")

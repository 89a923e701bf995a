"""The linear programme: against every solution of tiny problems, against its bound on large ones."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import assume, given

from tensor3d.packing import Limits, LowerBound, PackingPlan, lp, lpfhp, nnlshp, padded
from tensor3d.packing.column_generation import MAX_SIZE, follows, size_of, solve
from tests.packing.cases import Problem, fewest_packs, problems, web_pages

MASKED = tuple(max(1, round(0.15 * length)) for length in range(513))


def packs(plan: PackingPlan) -> dict[tuple[int, ...], int]:
    return {strategy.lengths: strategy.repeat for strategy in plan.strategies}


def test_a_set_that_best_fit_gets_wrong() -> None:
    histogram = np.bincount([6, 5, 4, 4, 3, 3, 3, 2])
    # Best fit begins with (6, 4), (5, 4) and cannot fill the rest.
    assert lpfhp(histogram, 10).packs == 4
    plan = lp(histogram, 10)
    assert (plan.packs, plan.efficiency) == (3, 1.0)


def test_a_slot_may_hold_a_shorter_sequence() -> None:
    assert packs(lp(np.bincount([7, 7, 7, 3, 3, 2]), 10, 2)) == {(7, 3): 2, (7, 2): 1}


def test_the_number_of_sequences_is_part_of_the_programme() -> None:
    plan = lp(np.bincount([3] * 6 + [1] * 6), 10, 3)
    assert (plan.packs, plan.lower_bound) == (4, LowerBound(packs=4, kind="lp"))


def test_the_budget_is_part_of_the_programme() -> None:
    # Tokens alone would allow (5, 5); 5 is dear, and a pack can afford one.
    plan = lp(np.bincount([5] * 10 + [2] * 20), 10, budget=3, costs=[0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2])
    assert packs(plan) == {(5, 2, 2): 10}
    assert plan.lower_bound == LowerBound(packs=10, kind="lp")


def test_a_slot_holds_no_dearer_sequence() -> None:
    # The shorter ones cost more: a slot of 5 is none of 4.
    costs = [0, 0, 0, 0, 3, 1, 1, 1, 1, 1, 1]
    plan = lp(np.bincount([5] * 4 + [4] * 4), 10, budget=4, costs=costs)
    assert plan.packs == 4
    assert max(sum(costs[length] for length in lengths) for lengths in packs(plan)) <= 4


@given(problems(capacity=12, count=3, kinds=4))
def test_one_pack_from_the_optimum_at_most_and_a_bound_that_holds(problem: Problem) -> None:
    assume(sum(problem.histogram) <= 10)
    optimum = fewest_packs(problem)
    plan = problem.call(lp)
    assert optimum <= plan.packs <= optimum + 1
    assert plan.lower_bound.packs <= optimum


@given(problems(capacity=40, count=1000, kinds=20))
def test_no_worse_than_best_fit_and_near_the_bound(problem: Problem) -> None:
    plan = problem.call(lp)
    assert plan.lower_bound.packs <= plan.packs <= problem.call(lpfhp).packs
    assert plan.packs <= plan.lower_bound.packs + 4


@given(problems(capacity=40, count=1000, kinds=20))
def test_bounds_agree_whoever_asks(problem: Problem) -> None:
    assert problem.call(lp).lower_bound == problem.call(padded).lower_bound


@pytest.mark.parametrize("max_sequences", [2, 3, 4, 8, None])
def test_an_encyclopedia_within_five_packs_of_its_bound(max_sequences: int | None) -> None:
    counts = web_pages(128, 3_000_000)
    plan = lp(counts, 128, max_sequences)
    plan.check(counts)
    assert plan.lower_bound.kind == "lp"
    assert plan.packs - plan.lower_bound.packs <= 5
    if max_sequences != 2:
        assert plan.packs < lpfhp(counts, 128, max_sequences).packs


def test_an_encyclopedia_with_a_budget() -> None:
    counts = web_pages(128, 3_000_000)
    plan = lp(counts, 128, 8, budget=22, costs=MASKED)
    plan.check(counts)
    assert plan.packs - plan.lower_bound.packs <= 5


def test_a_budget_that_binds_every_pack() -> None:
    # Squared lengths, as of attention: long sequences cannot share a pack, and the budget is larger than its table.
    counts = web_pages(64, 100_000)
    costs = np.arange(65) ** 2
    plan = lp(counts, 64, 6, budget=64**2, costs=costs)
    plan.check(counts)
    assert plan.packs - plan.lower_bound.packs <= 5


def test_counts_of_any_size() -> None:
    counts = web_pages(64, 1000) * 10**12
    plan = lp(counts, 64, 5)
    plan.check(counts)
    # As near as the solver's arithmetic can tell.
    assert plan.packs <= plan.lower_bound.packs * (1 + 1e-11)


def test_least_squares_do_not_beat_the_bound() -> None:
    counts = web_pages(128, 1_000_000)
    bound = lp(counts, 128, 3).lower_bound
    assert bound.packs <= nnlshp(counts, 128, 3).packs <= 1.005 * bound.packs


def test_the_bound_holds_when_the_generation_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = web_pages(64, 100_000)
    limits = Limits.of(64, 4)
    final = solve(limits.counts(counts), limits)
    columns = importlib.import_module("tensor3d.packing.column_generation")
    bounds = []
    for rounds in (1, 2, 3):
        monkeypatch.setattr(columns, "_ROUNDS", rounds)
        early = solve(limits.counts(counts), limits)
        assert early.bound <= final.bound <= early.packs + 1
        bounds.append(early.bound)
    assert bounds == sorted(bounds)
    assert bounds[0] < final.bound


@pytest.mark.parametrize("max_sequences", [3, 4, 8, None])
def test_few_masters_are_solved(max_sequences: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Six at the most here; without prices of earlier rounds it takes dozens, and at 512 slots minutes.
    monkeypatch.setattr(importlib.import_module("tensor3d.packing.column_generation"), "_ROUNDS", 9)
    limits = Limits.of(128, max_sequences)
    found = solve(limits.counts(web_pages(128, 3_000_000)), limits)
    assert found.bound - 1 < found.packs <= found.bound + 1e-6


def test_shorter_sequences_follow_where_they_are_no_dearer() -> None:
    assert follows(np.array([1, 3, 2, 2])).tolist() == [True, False, True]


def test_too_large_a_programme_is_refused_by_name() -> None:
    counts = np.ones(8193, dtype=np.int64)
    counts[0] = 0
    with pytest.raises(ValueError, match=r"\b8192\b lengths in \b8192\b.*large.*lpfhp"):
        lp(counts, 8192)
    plan = lpfhp(counts, 8192, 8)
    assert plan.lower_bound == LowerBound(packs=-(-8192 * 8193 // 2 // 8192), kind="tokens")


def test_a_large_capacity_with_few_lengths_is_none() -> None:
    counts = np.bincount([5000] * 10 + [3000] * 10 + [192] * 10, minlength=8193)
    limits = Limits.of(8192)
    assert size_of(limits.counts(counts), limits) <= MAX_SIZE
    assert packs(lp(counts, 8192)) == {(5000, 3000, 192): 10}


def test_the_token_bound_knows_every_limit() -> None:
    huge = np.zeros(8193, dtype=np.int64)
    huge[1:] = 2
    costs = [1] * 8193
    assert lpfhp(huge, 8192, 1).lower_bound == LowerBound(packs=2 * 8192, kind="tokens")
    assert lpfhp(huge, 8192, budget=1, costs=costs).lower_bound.packs == 2 * 8192


@pytest.fixture
def no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = sys.modules["tensor3d.packing.limits"]
    assert isinstance(extra, ModuleType)
    monkeypatch.setattr(extra, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_scipy")
def test_without_scipy_planners_say_what_to_install() -> None:
    for planner in (lp, nnlshp):
        with pytest.raises(ValueError, match=r"scipy.*'tensor3d\[packing\]', or"):
            planner(np.bincount([6, 4]), 10, 2)
    assert lpfhp(np.bincount([6, 4]), 10, 2).lower_bound == LowerBound(packs=1, kind="tokens")

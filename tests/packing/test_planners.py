"""What every planner promises, and small sets by hand for the simple ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given

from tensor3d.packing import PLANNERS, Limits, Planner, lpfhp, nnlshp, padded, spfhp
from tests.packing.cases import Problem, problems

MASKED = tuple(max(1, round(0.15 * length)) for length in range(129))


def packs(planner: Planner, *lengths: int, **limits: Any) -> dict[tuple[int, ...], int]:
    plan = planner(np.bincount(lengths), 10, **limits)
    return {strategy.lengths: strategy.repeat for strategy in plan.strategies}


# By hand, in packs of 10


def test_the_baseline_packs_nothing() -> None:
    assert packs(padded, 6, 4, 4) == {(6,): 1, (4,): 2}
    plan = padded([0, 0, 0, 0, 2, 0, 1], 10, 3)
    assert (plan.packs, plan.packing_factor, plan.efficiency) == (3, 1.0, 14 / 30)
    # What can be done is asked of the limits, not of the planner.
    assert plan.lower_bound.packs == 2


def test_worst_fit_takes_the_pack_with_the_most_room() -> None:
    assert packs(spfhp, 7, 6, 3) == {(7,): 1, (6, 3): 1}
    assert packs(lpfhp, 7, 6, 3) == {(7, 3): 1, (6,): 1}


def test_worst_fit_gives_every_pack_one_before_it_gives_one_two() -> None:
    assert packs(spfhp, 6, 6, 6, 2, 2, 2) == {(6, 2): 3}
    assert packs(spfhp, 7, 6, 1, 1, 1) == {(7, 1): 1, (6, 1, 1): 1}


def test_worst_fit_passes_over_full_packs() -> None:
    assert packs(spfhp, 7, 6, 2, 1, 1, max_sequences=2) == {(7, 1): 1, (6, 2): 1, (1,): 1}
    # 5 and 3 cost 2 each, and a pack may cost 3: there is more room beside 5, but no budget.
    assert packs(spfhp, 6, 5, 3, budget=3, costs=[1, 1, 1, 2, 1, 2, 1, 1, 1, 1, 1]) == {(6, 3): 1, (5,): 1}


def test_worst_fit_opens_a_pack_for_each_sequence_that_fits_nowhere() -> None:
    assert packs(spfhp, *[3] * 8) == {(3,): 8}
    assert packs(spfhp, *[3] * 8, *[2] * 9) == {(3, 2, 2): 1, (3, 2): 7}


def test_least_squares_finds_what_fits_exactly() -> None:
    # Best fit would put 3 with 7 and leave the fours alone; all packs can be full.
    lengths = [6] * 5 + [4] * 5 + [5] * 4 + [3] * 9 + [1] * 3
    assert packs(nnlshp, *lengths, max_sequences=4) == {(6, 4): 5, (5, 5): 2, (3, 3, 3, 1): 3}


def test_least_squares_packs_what_is_left_by_best_fit() -> None:
    # No two of these fill a pack: one slot of each pack holds nothing of its length.
    assert packs(nnlshp, 7, 7, 2, 2, max_sequences=2) == {(7, 2): 2}


# Properties


@pytest.mark.parametrize("name", PLANNERS)
@given(problems())
@example(Problem(histogram=(0, 1), capacity=1, max_sequences=None, budget=None, costs=None))
@example(Problem(histogram=(0, 0, 0, 7), capacity=10, max_sequences=1, budget=0, costs=(0,) * 11))
def test_every_plan_holds_every_sequence_within_all_limits(name: str, problem: Problem) -> None:
    if name == "nnlshp" and problem.max_sequences is None:
        return  # thousands of partitions; its own test has a few
    plan = problem.call(PLANNERS[name])
    held = [0] * len(problem.histogram)
    for strategy in plan.strategies:
        assert strategy.repeat >= 1
        assert list(strategy.lengths) == sorted(strategy.lengths, reverse=True)
        assert sum(strategy.lengths) <= problem.capacity
        assert len(strategy.lengths) <= (problem.max_sequences or problem.capacity)
        if problem.costs is not None and problem.budget is not None:
            assert sum(problem.costs[length] for length in strategy.lengths) <= problem.budget
        for length in strategy.lengths:
            held[length] += strategy.repeat
    assert tuple(held) == problem.histogram
    assert len({strategy.lengths for strategy in plan.strategies}) == len(plan.strategies)
    assert plan.lower_bound.packs <= plan.packs <= plan.sequences
    assert plan == problem.call(PLANNERS[name])


@pytest.mark.parametrize("name", PLANNERS)
def test_limits_that_training_uses(name: str) -> None:
    # Partitions of 128 into 8 are too many for least squares.
    depth = 4 if name == "nnlshp" else 8
    counts = np.zeros(129, dtype=np.int64)
    counts[5:] = 1000 - 7 * np.arange(124)
    plan = PLANNERS[name](counts, 128, depth, budget=22, costs=MASKED)
    plan.check(counts)
    assert max(sum(MASKED[length] for length in strategy.lengths) for strategy in plan.strategies) <= 22
    assert plan.lower_bound.kind == "lp"
    assert plan.lower_bound.packs <= plan.packs


@pytest.mark.parametrize(
    ("counts", "capacity", "max_sequences", "message"),
    [
        ([0, 1], 0, 1, r"capacity.*\b1.*\b0"),
        ([0, 1], -3, None, r"capacity.*\b1.*-3"),
        ([0, 1], 10**9, 1, r"capacity.*\b16777216.*\b1000000000"),
        ([0, 2**62, 1], 4, 1, r"up to 2\*\*62 tokens. Got 4611686018427387906"),
        ([0, 1], 4.0, 1, r"capacity must be a whole number. Got 4\.0"),
        ([0, 1], float("nan"), 1, "capacity.*nan"),
        ([0, 1], 4, 0, r"max_sequences.*\b1.*Got 0"),
        ([0, 1], 4, 1.5, r"max_sequences.*\b1\.5"),
        ([1, 1], 4, 1, "at least 1 token.*length 0"),
        ([0, 0, 0, 0, 0, 2], 4, 1, "a sequence of 5 tokens does not fit a capacity of 4"),
        ([0, -3, 1], 4, 1, r"counts.*\b0.*-3.*length 1"),
        ([0, 0, 0], 4, 1, "counts no sequence at all"),
        ([], 4, 1, "one-dimensional array of whole numbers"),
        ([[0, 1]], 4, 1, r"whole numbers. Got int64, shape \(1, 2\)"),
        ([0.0, 1.0], 4, 1, "whole numbers. Got float64"),
        ([0.0, float("nan")], 4, 1, "whole numbers. Got float64"),
    ],
)
def test_what_cannot_be_packed_is_named(counts: Any, capacity: Any, max_sequences: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits.of(capacity, max_sequences).counts(np.array(counts))


@pytest.mark.parametrize(
    ("budget", "costs", "message"),
    [
        (2, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5], "a sequence of 7 tokens costs 3, more than the budget of 2"),
        (2, [0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0], r"cost.*\b0.*-1.*length 4"),
        (-1, [0] * 11, "budget must be at least 0. Got -1"),
        (2, [0] * 10, r"from 0 to.*\b10.*11 numbers.*\b10"),
        (2, [0.5] * 11, r"a cost must be a whole number. Got 0\.5"),
        (2.5, [0] * 11, r"budget must be a whole number. Got 2\.5"),
        (2, None, "budget is given without costs"),
        (None, [0] * 11, "costs is given without budget"),
    ],
)
def test_budgets_that_cannot_be(budget: Any, costs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits.of(10, 2, budget=budget, costs=costs).counts(np.bincount([7, 4]))


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_asks_the_limits(name: str) -> None:
    """With all that it is given: whatever is wrong of it is refused by name, and before anything is planned."""
    planner = PLANNERS[name]
    for arguments, second, message in (
        (([0, 1], 0, 1), {}, "capacity must be at least 1 token slot. Got 0"),
        (([0, 1], 4, 0), {}, "max_sequences must be at least 1.*Got 0"),
        (([0.0, 1.0], 4, 1), {}, "whole numbers. Got float64"),
        (([0, 0, 0, 0, 0, 2], 4, 1), {}, "a sequence of 5 tokens does not fit a capacity of 4"),
        (([0, 1], 4, 1), {"budget": -1, "costs": [0] * 5}, "budget must be at least 0. Got -1"),
        (([0, 1], 4, 1), {"budget": 2, "costs": [0, 3, 0, 0, 0]}, "a sequence of 1 tokens costs 3, more than"),
        (([0, 1], 4, 1), {"costs": [0] * 5}, "costs is given without budget"),
    ):
        with pytest.raises(ValueError, match=message):
            planner(np.array(arguments[0]), *arguments[1:], **second)


def test_the_table_of_planners_cannot_be_changed() -> None:
    assert list(PLANNERS) == ["padded", "spfhp", "lpfhp", "nnlshp", "lp"]
    with pytest.raises(TypeError):
        PLANNERS["mine"] = lpfhp  # type: ignore[index]


# Least squares at its limits


def test_least_squares_take_no_more_memory_than_they_say() -> None:
    with pytest.raises(ValueError, match=r"\b512\b.*6 sequences, 33\.6 GiB.*2 GiB"):
        nnlshp([0, 1], 512, 6)
    with pytest.raises(ValueError, match=r"ways.*200.*200"):
        nnlshp([0, 1], 200)
    with pytest.raises(ValueError, match=r"hours.*8192.*2048"):
        nnlshp([0, 1], 8192, 2)


def test_least_squares_without_a_limit_on_sequences() -> None:
    plan = nnlshp(np.bincount([5, 2, 2, 1, 4, 3, 3]), 10)
    assert (plan.packs, plan.efficiency) == (2, 1.0)

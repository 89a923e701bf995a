"""Dealing items to bins: small cases by eye, brute force, properties, bad input."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tensor3d.packing.balance import Method, Work, deal, exchange_schedule, imbalance

METHODS: tuple[Method, ...] = get_args(Method)


def dealt(costs: list[int], bins: int, method: Method = "refined") -> list[list[int]]:
    """The costs in each bin, as they are dealt."""
    return np.array(costs)[deal(costs, bins, method)].tolist()


def heaviest(costs: list[int], bins: int, method: Method = "refined") -> int:
    return max(map(sum, dealt(costs, bins, method)))


# --- by eye --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("order", [[8, 9, 6], [7, 4, 5]]),
        ("deal", [[9, 7, 5], [8, 6, 4]]),
        ("snake", [[9, 6, 5], [8, 7, 4]]),
        ("lpt", [[9, 6, 5], [8, 7, 4]]),
        # 9 8, 7 6 and 5 4: folded to 15 15, and 4 5 added, heavier to lighter
        ("kk", [[8, 7, 5], [9, 6, 4]]),
        ("refined", [[8, 7, 5], [9, 6, 4]]),
    ],
)
def test_each_method_by_hand(method: Method, expected: list[list[int]]) -> None:
    assert dealt([8, 9, 6, 7, 4, 5], 2, method) == expected


def test_a_full_bin_gets_no_more_however_light() -> None:
    assert dealt([10, 3, 2, 2, 1, 1], 2, "lpt") == [[10, 1, 1], [3, 2, 2]]


def test_swaps_mend_what_differencing_leaves() -> None:
    # Differencing takes one of each of 10 3, 2 2 and 1 1 for either bin.
    costs = [10, 3, 2, 2, 1, 1]
    assert (heaviest(costs, 2, "kk"), heaviest(costs, 2, "refined")) == (13, 12)


def test_an_order_that_is_better_is_kept() -> None:
    costs = [5, 7, 5, 8, 7, 2, 4, 9, 4]  # 17, 17, 17
    assert heaviest(costs[::-1], 3) == heaviest(costs, 3) == 17
    shuffled = [costs[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    assert heaviest(shuffled, 3) == 18  # nobody promised the optimum


def test_heavy_bins_meet_others_in_every_pass() -> None:
    score = np.array([9.0, 5, 10, *[5.0] * 9])
    met = []
    for turn in (0, 8):
        heavy, light = exchange_schedule(score, mean=5.75, limit=8, turn=turn)  # above 5.75 + 0.75 * 4.25
        assert heavy.tolist() == [2, 0]
        assert light.shape == (2, 4)
        assert len(set(light.ravel().tolist())) == 8
        met += light.ravel().tolist()
    assert set(met) == {1, *range(3, 12)}


def test_pairs_are_the_heaviest_with_the_lightest() -> None:
    for method in ("snake", "lpt", "kk", "refined"):
        assert sorted(map(sorted, dealt([1, 2, 3, 10, 20, 30], 3, method))) == [[1, 30], [2, 20], [3, 10]]


def test_items_of_a_bin_ascend_and_ties_go_by_index() -> None:
    assert deal([5, 5, 5, 5], 2, "deal").tolist() == [[0, 2], [1, 3]]
    assert deal([5, 5, 5, 5], 2, "snake").tolist() == [[0, 3], [1, 2]]
    result = deal(np.random.default_rng(0).random(60), 5)
    assert (np.diff(result, axis=1) > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_where_there_is_no_choice_items_stay_in_order(method: Method) -> None:
    assert deal([3, 1, 2], 1, method).tolist() == [[0, 1, 2]]
    assert deal([3, 1, 2], 3, method).tolist() == [[0], [1], [2]]


def test_two_objectives_are_both_even() -> None:
    costs = [[300, 0], [300, 0], [0, 1], [0, 1]]  # in shares of their means the second counts as much as the first
    result = deal(costs, 2)
    assert np.array(costs)[result].sum(axis=1).tolist() == [[300, 1], [300, 1]]
    assert imbalance(costs, result) == 1.0


def test_an_objective_that_cannot_be_even_does_not_hold_up_the_other() -> None:
    # By the first objective one bin has 9 and the other 1 to 3, whatever is done; by the second both can have 12.
    costs = np.array([[9, 5], [0, 4], [0, 4], [0, 3], [1, 7], [0, 1]])
    result = deal(costs, 2)
    assert costs[result].sum(axis=1).max(axis=0).tolist() == [9, 12]


def test_an_objective_without_any_cost_is_ignored() -> None:
    costs = [[0, 4], [0, 3], [0, 2], [0, 1]]
    assert deal(costs, 2).tolist() == deal([4, 3, 2, 1], 2).tolist() == [[0, 3], [1, 2]]
    assert imbalance(costs, np.array([[0, 1], [2, 3]])) == 7 / 5
    assert imbalance([0, 0], np.array([[0], [1]])) == 1.0


def test_imbalance_is_the_worst_over_the_mean() -> None:
    assert imbalance([1, 2, 3, 6], np.array([[0, 1], [2, 3]])) == 9 / 6
    assert imbalance([[1, 1], [1, 3]], np.array([[0], [1]])) == 3 / 2


# --- against brute force -------------------------------------------------------------------------------------------


def optimum(costs: tuple[int, ...], count: int) -> int:
    """The least heaviest bin over all ways to fill bins with `count` items each."""
    if not costs:
        return 0
    first, rest = costs[0], costs[1:]
    best = sum(costs)
    for chosen in combinations(range(len(rest)), count - 1):
        load = first + sum(rest[i] for i in chosen)
        if load < best:
            left = tuple(cost for i, cost in enumerate(rest) if i not in chosen)
            best = min(best, max(load, optimum(left, count)))
    return best


SIZES = [(2, 2), (2, 3), (2, 4), (2, 5), (3, 2), (3, 3), (4, 2), (3, 4)]


@pytest.mark.parametrize(("bins", "count"), SIZES)
def test_differencing_and_longest_first_keep_their_bounds(bins: int, count: int) -> None:
    rng = np.random.default_rng(bins * 10 + count)
    # Michiels et al. 2003: 2 - 1/b for any count, and by count
    bound = min(2 - 1 / bins, {2: 1, 3: 4 / 3, 4: 19 / 12, 5: 103 / 60}[count])
    gaps = []
    for _ in range(40):
        costs = rng.integers(1, int(rng.choice([6, 30, 1000])), size=bins * count).tolist()
        best = optimum(tuple(costs), count)
        kk, lpt, refined = (heaviest(costs, bins, method) for method in ("kk", "lpt", "refined"))
        assert best <= kk <= bound * best + 1e-9
        assert best <= refined <= kk
        if count <= 3:  # Kellerer and Woeginger 1993, for three items a bin
            assert best <= lpt <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9
        gaps.append(refined / best - 1)
    assert np.mean(gaps) <= 0.01


# --- properties ----------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> tuple[NDArray[np.float64], int]:
    bins, count, objectives = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    cost = st.one_of(st.integers(0, 9), st.floats(0, 1e12, allow_subnormal=False))
    rows = st.lists(cost, min_size=objectives, max_size=objectives)
    table = draw(st.lists(rows, min_size=bins * count, max_size=bins * count))
    return np.array(table, dtype=np.float64), bins


@given(tables(), st.sampled_from(METHODS))
def test_every_item_is_dealt_once_and_bins_are_equal(table: tuple[NDArray[np.float64], int], method: Method) -> None:
    costs, bins = table
    result = deal(costs, bins, method)
    assert result.shape == (bins, len(costs) // bins)
    np.testing.assert_array_equal(np.sort(result, axis=None), np.arange(len(costs)))
    np.testing.assert_array_equal(result, deal(costs.copy(), bins, method))


@given(tables())
def test_refined_is_never_worse_than_order(table: tuple[NDArray[np.float64], int]) -> None:
    costs, bins = table
    assert imbalance(costs, deal(costs, bins)) <= imbalance(costs, deal(costs, bins, "order")) * (1 + 1e-6)


@given(tables())
def test_swaps_make_the_worst_no_worse(table: tuple[NDArray[np.float64], int]) -> None:
    costs, bins = table
    for objectives in (costs, *costs.T):
        differenced = imbalance(objectives, deal(objectives, bins, "kk"))
        assert imbalance(objectives, deal(objectives, bins)) <= differenced + 1e-6


@given(tables(), st.sampled_from([2.0**-900, 3.0, 2.0**40]))
def test_units_do_not_matter(table: tuple[NDArray[np.float64], int], unit: float) -> None:
    costs, bins = table
    whole = np.rint(np.minimum(costs, 1e6))
    np.testing.assert_array_equal(deal(whole * unit, bins), deal(whole, bins))


def test_a_bin_of_many_items_is_dealt_too() -> None:
    costs = np.random.default_rng(3).random(4 * 3000)
    assert imbalance(costs, deal(costs, 4)) < 1.0001


# --- work, and what is refused -------------------------------------------------------------------------------------


def test_work_is_linear_in_tokens_and_squares() -> None:
    work = Work(per_token=10, per_square=0.5).of(np.array([4, 6]), np.array([16, 20]))
    assert work.dtype == np.float64
    assert work.tolist() == [48.0, 70.0]


@pytest.mark.parametrize(
    ("per_token", "per_square", "message"),
    [
        (-1.0, 1.0, r"per_token.*\b0.*-1.0"),
        (1.0, float("nan"), "per_square must be a finite number.*Got nan"),
        (float("inf"), 1.0, "per_token must be.*Got inf"),
        (0.0, 0.0, "both 0"),
    ],
)
def test_work_that_cannot_be_is_refused(per_token: float, per_square: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Work(per_token=per_token, per_square=per_square)


def test_tokens_and_squares_of_other_packs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Got shapes \(2,\) and \(3,\)"):
        Work(per_token=1, per_square=1).of([1, 2], [1, 2, 3])


@pytest.mark.parametrize(
    ("costs", "bins", "message"),
    [
        ([1.0, float("nan")], 2, "at least 0.*nan.*item 1"),
        ([1.0, float("inf")], 2, "Got inf for item 1"),
        ([[1.0, 2.0], [3.0, -4.0]], 2, "Got -4.0 for item 1"),
        ([1, 2, 3, 4, 5], 2, "5 items.*2 bins.*Take 4 or 6"),
        ([1, 2], 4, "2 items.*4 bins.*Take 4"),
        ([], 3, "0 items.*3 bins.*Take 3"),
        ([1, 2], 0, "bins must be at least 1. Got 0"),
        ([1, 2], -2, "bins must be at least 1. Got -2"),
        (3.0, 1, r"shape \(items,\).*objectives\).*\(\)"),
        (np.zeros((2, 0)), 1, r"Got \(2, 0\)"),
        (np.zeros((2, 2, 2)), 2, r"Got \(2, 2, 2\)"),
    ],
)
def test_what_cannot_be_dealt_is_named(costs: Any, bins: int, message: str) -> None:
    for method in METHODS:
        with pytest.raises(ValueError, match=message):
            deal(costs, bins, method)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match=r"order, deal, snake, lpt, kk, refined.*'random'"):
        deal([1, 2], 2, "random")  # type: ignore[arg-type]


def test_an_assignment_that_is_no_table_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(bins, items of a bin\). Got \(2,\)"):
        imbalance([1, 2], np.array([0, 1]))

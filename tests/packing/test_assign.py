"""Sequences in the packs of a plan."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from tensor3d.packing import PackAssignment, assign, lpfhp


def test_sequences_of_a_small_plan_by_hand() -> None:
    lengths = np.array([3, 6, 1, 6, 4])
    packs = assign(lpfhp(np.bincount(lengths), 10, 3), lengths, np.random.default_rng(0))
    # (6, 4) holds sequence 4 and one of the two sixes, (6, 3, 1) the other one with sequences 0 and 2.
    contents = {frozenset(packs[i].tolist()) for i in range(len(packs))}
    assert contents in ({frozenset({1, 4}), frozenset({3, 0, 2})}, {frozenset({3, 4}), frozenset({1, 0, 2})})


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("capacity", [40, 70_000])  # below and above what 16-bit keys hold
def test_every_sequence_is_in_one_pack_of_the_plan(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, capacity + 1, size=500)
    plan = lpfhp(np.bincount(lengths), capacity, max_sequences=5)
    packs = assign(plan, lengths, rng)
    np.testing.assert_array_equal(np.sort(packs.sequences), np.arange(500))
    held = Counter(tuple(lengths[packs[i]].tolist()) for i in range(len(packs)))
    assert held == {strategy.lengths: strategy.repeat for strategy in plan.strategies}
    np.testing.assert_array_equal(packs.totals(lengths), [lengths[packs[i]].sum() for i in range(len(packs))])


def test_packs_and_sequences_are_shuffled_by_the_generator_alone() -> None:
    lengths = np.repeat([6, 4, 3], 200)
    plan = lpfhp(np.bincount(lengths), 10, 3)
    first, again, other = (assign(plan, lengths, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.sequences, again.sequences)
    np.testing.assert_array_equal(first.offsets, again.offsets)
    assert (first.sequences != other.sequences).any()
    kinds = np.diff(first.offsets)
    # (6, 4) and (3, 3, 3) alternate at random: one run each would mean that the packs lie as planned.
    assert (np.diff(kinds) != 0).sum() > 20
    sixes = first.sequences[lengths[first.sequences] == 6]
    assert (np.diff(sixes) < 0).sum() > 50


def test_every_sequence_may_come_into_any_pack_of_its_length() -> None:
    lengths = np.array([6, 4, 4, 6])
    plan = lpfhp(np.bincount(lengths), 10, 2)
    seen = {tuple(assign(plan, lengths, np.random.default_rng(seed)).sequences.tolist()) for seed in range(100)}
    # Two packs in either order, one of two sixes first, one of two fours.
    assert seen == {(0, 1, 3, 2), (0, 2, 3, 1), (3, 1, 0, 2), (3, 2, 0, 1)}


def test_more_packs_than_are_ordered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.repeat([6, 4, 3], 50)
    plan = lpfhp(np.bincount(lengths), 10, 3)
    whole = assign(plan, lengths, np.random.default_rng(3))
    monkeypatch.setattr(sys.modules["tensor3d.packing.assign"], "_PACKS_AT_ONCE", 7)
    parts = assign(plan, lengths, np.random.default_rng(3))
    np.testing.assert_array_equal(whole.sequences, parts.sequences)
    np.testing.assert_array_equal(whole.offsets, parts.offsets)


def test_packs_outside_are_refused() -> None:
    packs = PackAssignment(offsets=np.array([0, 2]), sequences=np.array([1, 0]))
    assert packs[0].tolist() == [1, 0]
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"pack {index} of 1"):
            packs[index]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([6, 4, 4], r"holds 2 sequences.*lengths"),
        ([6, 5], r"1 sequences of length 4.*\b0; plan again"),
        ([6, 11], r"capacity of 10.*\b11"),
        ([6, 0], r"capacity of 10.*\b0"),
        ([6.0, 4.0], "lengths.*float64"),
    ],
)
def test_lengths_of_another_set_are_refused(lengths: list[int], message: str) -> None:
    plan = lpfhp(np.bincount([6, 4]), 10, 3)
    with pytest.raises(ValueError, match=message):
        assign(plan, np.array(lengths), np.random.default_rng(0))

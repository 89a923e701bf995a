"""A batch in a given number of packs: the capacity is the least with which they suffice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor3d.packing import pack_evenly
from tensor3d.packing.one_batch import _capacity_bound


def least_capacity(lengths: list[int], packs: int) -> int:
    """Of all assignments, tried out."""
    loads = {(0,) * packs}
    for length in lengths:
        loads = {
            tuple(sorted(load[i] + length if i == chosen else load[i] for i in range(packs)))
            for load in loads
            for chosen in range(packs)
        }
    return min(max(load) for load in loads)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 5))
def test_every_sequence_once_in_packs_that_are_no_larger_than_need_be(
    lengths: list[int], packs: int, multiple: int
) -> None:
    capacity, found = pack_evenly(lengths, packs, multiple_of=multiple)
    assert len(found) == packs
    assert capacity % multiple == 0
    assert sorted(found.sequences.tolist()) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in found[number].tolist()) for number in range(packs)]
    assert max(filled) <= capacity
    # Graham's bound for longest first, which the search only lowers.
    assert capacity < 4 / 3 * least_capacity(lengths, packs) + multiple


def test_by_hand() -> None:
    capacity, packs = pack_evenly([5, 1, 4, 2], 2)
    assert capacity == 6
    assert [sorted(packs[i].tolist()) for i in range(2)] == [[0, 1], [2, 3]]
    assert pack_evenly([5, 1, 4, 2], 2, multiple_of=4)[0] == 8
    # Fewer sequences than packs: the others are empty.
    capacity, packs = pack_evenly(np.array([3]), 4)
    assert capacity == 3
    assert np.diff(packs.offsets).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("texts", "packs"), [(64, 32), (400, 8), (37, 36)])
def test_near_the_bound(texts: int, packs: int) -> None:
    """Few long texts a pack, where best fit alone leaves gaps, and many, where it leaves none."""
    lengths = np.random.default_rng(5).integers(8, 513, texts)
    capacity, found = pack_evenly(lengths, packs)
    assert capacity == int(found.totals(lengths).max())
    assert capacity <= 1.02 * _capacity_bound(lengths, packs)


def test_more_tokens_than_a_planned_pack_may_have() -> None:
    capacity, packs = pack_evenly(np.full(40_000, 500), 1)
    assert capacity == 20_000_000
    assert len(packs) == 1


@pytest.mark.parametrize(
    ("lengths", "packs", "multiple", "message"),
    [
        ([], 2, 1, "there is no sequence to pack"),
        ([3, 0], 2, 1, r"Got 0 for sequence 1"),
        ([1.5], 1, 1, "one-dimensional array of whole numbers"),
        ([3], 0, 1, r"packs.*multiple_of.*\b1.*\b0.*\b1"),
        ([3], 1, 0, r"packs.*multiple_of.*\b1.*\b1.*\b0"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], packs: int, multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_evenly(lengths, packs, multiple_of=multiple)

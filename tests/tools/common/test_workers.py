"""Texts in batches by their token slots."""

from __future__ import annotations

from tools.common.workers import split, split_groups


def test_a_batch_is_split_by_its_slots() -> None:
    lengths = [3, 4, 5, 6, 20, 1]
    assert split(lengths, 12) == [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    assert split(lengths, 10, padded=True) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    assert split(lengths, 1000) == [slice(0, 6)]


def test_groups_of_texts_stay_whole() -> None:
    groups = [[2, 3], [4], [9, 9], [1, 1, 1]]
    assert split_groups(groups, 10) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    # With padding the first two need 3 * 4 slots, and the first alone 2 * 3.
    assert split_groups(groups, 11, padded=True) == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]
    assert split_groups(groups, 12, padded=True) == [slice(0, 2), slice(2, 3), slice(3, 4)]

"""Texts in batches by their token slots."""

from __future__ import annotations

from tools.common.workers import split


def test_a_batch_is_split_by_its_slots() -> None:
    lengths = [3, 4, 5, 6, 20, 1]
    assert split(lengths, 12) == [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    assert split(lengths, 10, padded=True) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    assert split(lengths, 1000) == [slice(0, 6)]

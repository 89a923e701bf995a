"""Shards drawn each by itself, and read as one set of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d.data import IndexedDataset, ShardedPairs, sample_pairs
from tests.data.samples import VOCABULARY, write_random


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    folder = tmp_path_factory.mktemp("shards")
    return [write_random(folder / f"{n}", documents=20 + n, seed=n) for n in range(3)]


def test_sequences_are_numbered_shard_after_shard(shards: list[IndexedDataset]) -> None:
    drawing = ShardedPairs(shards, max_length=40, seed=3).draw(2)
    assert len(drawing.offsets) == 4
    assert len(drawing.lengths) == drawing.offsets[-1]
    chosen = np.array([drawing.offsets[2], 0, drawing.offsets[1] + 4, drawing.offsets[2] + 1])
    segments = drawing.segments(chosen)
    np.testing.assert_array_equal(segments.lengths, drawing.lengths[chosen])
    tokens = segments.tokens(VOCABULARY)
    for place, number in enumerate(chosen):
        alone = drawing.segments(np.array([number]))
        start = segments.lengths[:place].sum()
        np.testing.assert_array_equal(alone.tokens(VOCABULARY).ids, tokens.ids[start : start + alone.lengths[0]])
        shard = np.searchsorted(drawing.offsets, number, side="right") - 1
        text = set(zip(alone.ids[:-1].tolist(), alone.ids[1:].tolist(), strict=True))
        known = set(zip(shards[shard].ids[:-1].tolist(), shards[shard].ids[1:].tolist(), strict=True))
        assert len(text - known) <= 1  # the seam of A and B


def test_one_shard_is_drawn_as_if_there_were_no_shards(shards: list[IndexedDataset]) -> None:
    drawing = ShardedPairs(shards[:1], max_length=40, seed=3).draw(1)
    np.testing.assert_array_equal(drawing.lengths, sample_pairs(shards[0], max_length=40, seed=3, epoch=1).lengths)


def test_equal_shards_are_drawn_differently(shards: list[IndexedDataset]) -> None:
    drawing = ShardedPairs([shards[0], shards[0]], max_length=40, seed=3).draw(0)
    first, second = np.split(drawing.lengths, drawing.offsets[1:-1])
    assert first.tolist() != second.tolist()


def test_a_shard_that_is_not_here_is_named(shards: list[IndexedDataset]) -> None:
    with pytest.raises(ValueError, match=r"of \b3\b shards, shard \b1\b"):
        ShardedPairs([shards[0], None, shards[2]], max_length=40, seed=3)
    with pytest.raises(ValueError, match=r"seed.*0.*-1"):
        ShardedPairs(shards, max_length=40, seed=-1)

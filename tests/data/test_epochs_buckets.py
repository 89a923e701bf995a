"""Batches of like length."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d import CubeShape
from tensor3d.data import IndexedDataset, LengthBuckets, Loader
from tests.data.samples import pretraining, write_random

ONE_DEVICE = {"shape": CubeShape(), "rank": 0}
LIMITS = {"capacity": 64, "max_length": 50, "max_sequences": 4, "seed": 5, "method": "padded"}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_random(tmp_path_factory.mktemp("set") / "set", documents=120)


def test_batches_are_of_one_bin_and_the_rest_comes_together() -> None:
    #             0  1   2  3   4   5  6  7
    lengths = np.array([3, 12, 4, 11, 20, 1, 2, 19])  # bins of 10: five, two, two... in batches of two
    order = LengthBuckets(width=10, batch=2).order(lengths, np.random.default_rng(0))
    batches = [tuple(sorted((lengths[pair] - 1).tolist())) for pair in order.reshape(-1, 2)]
    assert sorted(batches) == [(0, 1), (2, 3), (10, 11), (18, 19)]
    assert sorted(order.tolist()) == list(range(8))


def test_what_is_left_of_several_bins_is_mixed_shortest_first() -> None:
    lengths = np.array([25, 15, 5, 35])
    order = LengthBuckets(width=10, batch=2).order(lengths, np.random.default_rng(0))
    assert sorted(tuple(sorted(lengths[pair].tolist())) for pair in order.reshape(-1, 2)) == [(5, 15), (25, 35)]


def test_the_edge_is_the_longest_length_of_a_bin() -> None:
    assert [LengthBuckets(width=10, batch=1).edge(length) for length in (1, 10, 11)] == [10, 10, 20]


def test_a_step_is_as_wide_as_its_bin(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS, bins=LengthBuckets(width=16, batch=8))
    widths = []
    per_epoch = data.packs_per_epoch // 8
    with Loader(data, global_batch=8, **ONE_DEVICE) as loader:
        for step, _ in zip(loader, range(2 * per_epoch), strict=False):
            rows = step.batches[0].ids.view(8, -1)
            longest = int((rows != 0).sum(1).max())
            assert rows.shape[1] == min(64, -(-longest // 16) * 16)
            assert step.fill == pytest.approx(step.tokens / rows.numel())
            widths.append(rows.shape[1])
    # Bins fill up in any order, in both epochs.
    assert set(widths) == {16, 32, 48, 64}
    assert widths[:per_epoch] != sorted(widths[:per_epoch])


def test_an_epoch_is_whole_batches(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS, bins=LengthBuckets(width=16, batch=8))
    assert data.packs_per_epoch == len(data.epochs[0].packs) // 8 * 8
    assert len(set(data.epochs[0].order.tolist())) == data.packs_per_epoch


def test_what_cannot_be_is_named(documents: IndexedDataset) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1. Got 0 and 8"):
        LengthBuckets(width=0, batch=8)
    with pytest.raises(ValueError, match=r"bins.*.padded..*.lpfhp"):
        pretraining(documents, **{**LIMITS, "method": "lpfhp"}, bins=LengthBuckets(width=16, batch=8))
    data = pretraining(documents, **LIMITS, bins=LengthBuckets(width=5, batch=8))
    with pytest.raises(ValueError, match=r"bins.*8.*6"):
        Loader(data, global_batch=6, **ONE_DEVICE)
    with pytest.raises(ValueError, match=r"8 packs per rank \* z=1 \* capacity 5 has 40 rows, .* y=16"):
        Loader(data, global_batch=8, **{**ONE_DEVICE, "shape": CubeShape(y=16)})

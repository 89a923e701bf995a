"""Epochs of packs."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tensor3d.data import IndexedDataset, Pack, masked_count
from tensor3d.data.dataset import default_masked_per_pack
from tests.data.samples import VOCABULARY, pretraining, write_random

LIMITS = {"capacity": 64, "max_length": 48, "max_sequences": 4, "seed": 5}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_random(tmp_path_factory.mktemp("set") / "set", documents=120)


def same(left: Pack, right: Pack) -> bool:
    return all(np.array_equal(getattr(left, field.name), getattr(right, field.name)) for field in fields(Pack))


def test_an_epoch_holds_every_pair_once_within_the_limits(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS)
    epoch = data.epochs[0]
    np.testing.assert_array_equal(np.sort(epoch.packs.sequences), np.arange(len(epoch.drawing.lengths)))
    assert len(epoch.packs) == data.packs_per_epoch
    assert epoch.tokens.sum() > 0.9 * 64 * len(epoch.packs)
    np.testing.assert_array_equal(epoch.order, np.arange(len(epoch.packs)))
    for index in range(len(epoch.packs)):
        pack = data.pack(0, index)
        assert sum(pack.lengths) == len(pack.ids) == len(pack.types) == epoch.tokens[index] <= 64
        assert len(pack.lengths) == len(pack.next_labels) == epoch.sequences[index] <= 4
        assert len(pack.masked) == len(pack.masked_labels) == epoch.targets[index] <= data.masked_per_pack
        assert len(pack.masked) == sum(masked_count(int(length)) for length in pack.lengths)


def test_a_pack_shows_its_pairs(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS)
    epoch = data.epochs[2]
    for index in (0, 7):
        pack = data.pack(2, index)
        unmasked = pack.ids.copy()
        unmasked[pack.masked] = pack.masked_labels
        segments = epoch.drawing.segments(epoch.packs[index])
        tokens = segments.tokens(VOCABULARY)
        np.testing.assert_array_equal(unmasked, tokens.ids)
        np.testing.assert_array_equal(pack.types, tokens.types)
        np.testing.assert_array_equal(pack.next_labels, segments.label)
        firsts = np.cumsum(pack.lengths) - pack.lengths
        assert (pack.ids[firsts] == VOCABULARY.cls).all()


def test_packs_are_the_same_together_alone_and_elsewhere(documents: IndexedDataset) -> None:
    data, elsewhere = (pretraining(documents, **LIMITS) for _ in range(2))
    together = data.packs(1, [4, 0, 9])
    for pack, index in zip(together, (4, 0, 9), strict=True):
        assert same(pack, data.pack(1, index))
        assert same(pack, elsewhere.pack(1, index))


def test_random_bits_of_masked_places_do_not_depend_on_the_packing(documents: IndexedDataset) -> None:
    def by_place(epoch: int, **limits: Any) -> dict[tuple[int, int], int]:
        data = pretraining(documents, **{**LIMITS, **limits}, with_draws=True)
        found = {}
        for index in range(len(data.epochs[epoch].packs)):
            pack, numbers = data.pack(epoch, index), data.epochs[epoch].packs[index]
            assert pack.draws is not None
            ends = np.cumsum(pack.lengths)
            owner = np.searchsorted(ends, pack.masked, side="right")
            places = pack.masked - (ends - pack.lengths)[owner]
            found |= dict(
                zip(zip(numbers[owner].tolist(), places.tolist(), strict=True), pack.draws.tolist(), strict=True)
            )
        return found

    planned, streamed, other = by_place(1), by_place(1, method="stream", capacity=96), by_place(1, seed=6)
    both = planned.keys() & streamed.keys()
    assert len(both) == len(planned) == len(streamed) > 20
    assert all(planned[each] == streamed[each] for each in both)
    assert len({*planned.values(), *other.values()}) == len(planned) + len(other)
    assert pretraining(documents, **LIMITS).pack(1, 0).draws is None


def test_seed_and_epoch_draw_anew(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS)
    other = pretraining(documents, **{**LIMITS, "seed": 6})
    assert not same(data.pack(0, 0), data.pack(1, 0))
    assert not same(data.pack(0, 0), other.pack(0, 0))


def test_the_order_of_an_epoch_is_as_long_as_that_of_the_first(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS)
    size = data.packs_per_epoch
    for number in range(6):
        epoch = data.epochs[number]
        # An epoch that was packed into fewer packs than the first begins again.
        assert epoch.order.tolist() == [place % len(epoch.packs) for place in range(size)]


def test_epochs_of_other_sizes_than_the_first_occur(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS)
    sizes = [len(data.epochs[number].packs) for number in range(8)]
    assert min(sizes) < sizes[0] or max(sizes) > sizes[0]  # else the test above has less to show than it says
    assert max(sizes) - min(sizes) < 0.1 * sizes[0]


def test_an_epoch_is_drawn_once_for_many_threads(documents: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pretraining(documents, **LIMITS)
    data.packs_per_epoch  # noqa: B018 (draws epoch 0)
    draw, drawn = data.epochs._draw, []
    monkeypatch.setattr(data.epochs, "_draw", lambda number: (drawn.append(number), draw(number))[1])
    threads = [threading.Thread(target=data.epochs.__getitem__, args=(3,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [3]


def test_two_epochs_are_kept(documents: IndexedDataset) -> None:
    data = pretraining(documents, **LIMITS)
    first, second = data.epochs[0], data.epochs[1]
    assert data.epochs[0] is first
    data.epochs[2]
    assert data.epochs[1] is second  # the earliest goes, whoever asked for it last
    assert data.epochs[0] is not first


def test_an_epoch_that_could_not_be_drawn_is_drawn_again(
    documents: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pretraining(documents, **LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr("tensor3d.data.sources.sample_pairs", None)
        with pytest.raises(TypeError):
            data.epochs[0]
    assert len(data.epochs[0].packs) > 0


@pytest.mark.parametrize(
    ("capacity", "max_sequences", "budget"), [(128, 8, 22), (512, 12, 79), (128, 1, 19), (6, 1, 1), (5, 5, 3)]
)
def test_default_budget(capacity: int, max_sequences: int, budget: int) -> None:
    assert default_masked_per_pack(capacity, max_sequences) == budget


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_length": 65}, r"max_length=65.*\b64"),
        ({"max_sequences": 0}, r"max_sequences.*\b1.*\b0"),
        ({"masked_per_pack": 6}, r"max_length=48.*\b7.*masked_per_pack=6"),
        ({"seed": -1}, "seed must be at least 0. Got -1"),
    ],
)
def test_limits_that_contradict_one_another_are_named(
    documents: IndexedDataset, limits: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pretraining(documents, **{**LIMITS, **limits})

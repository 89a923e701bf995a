"""Sentence pairs: what they are made of, how long they are, how they are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensor3d.data import IndexedDataset, Pairs, ShardedPairs, sample_pairs, sample_texts
from tensor3d.data.array_utils import ranges
from tensor3d.data.sampling import IS_NEXT, IS_RANDOM
from tensor3d.data.segments import NO_LABEL
from tensor3d.data.sources import PairSampler
from tests.data.samples import VOCABULARY, write, write_random


def document_of(dataset: IndexedDataset, token: np.ndarray) -> np.ndarray:
    """Document in which each id of the dataset lies."""
    return np.searchsorted(dataset.starts[dataset.documents], token, side="right") - 1


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return write_random(tmp_path / "set", documents=300)


def test_the_tokens_of_a_pair_by_hand(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [[[11, 12], [13]], [[21], [22, 23, 24]]])
    pairs = Pairs(
        a_start=np.array([0, 4]),
        a_length=np.array([2, 1], dtype=np.int32),
        b_start=np.array([2, 3]),
        b_length=np.array([1, 3], dtype=np.int32),
        label=np.array([0, 1], dtype=np.int8),
    )
    assert pairs.lengths.tolist() == [6, 7]
    segments = pairs.segments(dataset, np.array([1, 0]))
    assert segments.ids.tolist() == [22, 21, 22, 23, *(11, 12, 13)]
    assert segments.lengths.tolist() == [7, 6]
    assert segments.label.tolist() == [1, 0]
    ids, types, guessable = segments.tokens(VOCABULARY)
    assert ids.tolist() == [2, 22, 3, 21, 22, 23, 3, *(2, 11, 12, 3, 13, 3)]
    assert types.tolist() == [0, 0, 0, 1, 1, 1, 1, *(0, 0, 0, 0, 1, 1)]
    assert guessable.astype(int).tolist() == [0, 1, 0, 1, 1, 1, 0, *(0, 1, 1, 0, 1, 0)]


@pytest.mark.parametrize("max_length", [5, 6, 17, 32, 64])
def test_no_pair_is_too_long_and_segments_are_runs_of_one_document(dataset: IndexedDataset, max_length: int) -> None:
    pairs = sample_pairs(dataset, max_length=max_length, seed=0, epoch=0)
    assert pairs.lengths.max() == max_length
    for start, length in ((pairs.a_start, pairs.a_length), (pairs.b_start, pairs.b_length)):
        assert (length >= 1).all()
        np.testing.assert_array_equal(document_of(dataset, start), document_of(dataset, start + length - 1))
    a, b = document_of(dataset, pairs.a_start), document_of(dataset, pairs.b_start)
    np.testing.assert_array_equal(a == b, pairs.label == IS_NEXT)


def test_where_nothing_is_cut_b_follows_a_and_whole_sentences_are_used_up(dataset: IndexedDataset) -> None:
    # Longer than any document, so that nothing is cut, and every document is one pair or ends in one at random.
    pairs = sample_pairs(dataset, max_length=500, seed=0, epoch=0, short_probability=0.0)
    follows = pairs.label == IS_NEXT
    np.testing.assert_array_equal((pairs.a_start + pairs.a_length)[follows], pairs.b_start[follows])
    for start, length in ((pairs.a_start, pairs.a_length), (pairs.b_start, pairs.b_length)):
        assert np.isin(start, dataset.starts).all()
        assert np.isin(start + length, dataset.starts).all()
    # What is taken in order (A, and B where it follows) is every id once.
    taken = np.zeros(len(dataset.ids), dtype=int)
    for start, length in [
        *zip(pairs.a_start, pairs.a_length, strict=True),
        *zip(pairs.b_start[follows], pairs.b_length[follows], strict=True),
    ]:
        taken[start : start + length] += 1
    assert (taken == 1).all()


def test_labels_and_lengths_are_distributed_as_they_should(tmp_path: Path) -> None:
    # Long documents of short sentences, so that nearly every chunk has several sentences.
    dataset = write(tmp_path / "set", [[[5, 6, 7]] * 3000] * 4)
    full = sample_pairs(dataset, max_length=64, seed=0, epoch=0, short_probability=0.0)
    assert full.label.mean() == pytest.approx(0.5, abs=0.06)
    assert (full.lengths > 60).mean() > 0.98
    short = sample_pairs(dataset, max_length=64, seed=0, epoch=0, short_probability=1.0)
    # Aims at 2 to 61 tokens of text, rounded up to sentences of three.
    assert np.median(short.lengths) == pytest.approx(3 + 32, abs=4)
    some = sample_pairs(dataset, max_length=64, seed=0, epoch=0)
    assert (some.lengths < 55).mean() == pytest.approx(0.1 * 50 / 60, abs=0.04)


def cut_one_by_one(a: int, b: int, room: int) -> tuple[int, int]:
    """Lengths after the rule of BERT's reference: take a token from the longer segment until both fit."""
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return a, b


def test_lengths_after_cutting_are_those_of_the_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for case in range(60):
        a, b, room = (int(n) for n in rng.integers([1, 1, 2], [40, 40, 60]))
        # Two documents of one sentence: each is A once, and the other one is its random B.
        dataset = write(tmp_path / f"{case}", [[[10] * a], [[20] * b]])
        pairs = sample_pairs(dataset, max_length=room + 3, seed=case, epoch=0, short_probability=0.0)
        lengths = list(zip(pairs.a_length.tolist(), pairs.b_length.tolist(), strict=True))
        assert lengths == [cut_one_by_one(a, b, room), cut_one_by_one(b, a, room)]


def test_both_ends_are_cut(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [[list(range(5, 95))]] * 200)
    pairs = sample_pairs(dataset, max_length=43, seed=0, epoch=0)
    # 70 tokens go from A, each from either end: a standard deviation is 4.2.
    front = pairs.a_start % 90
    assert front.mean() == pytest.approx(35, abs=1.5)
    assert 2.5 < front.std() < 6


def test_documents_of_one_sentence_pair_with_another_document(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [[[11]], [[22, 23]], [[33]]])
    pairs = sample_pairs(dataset, max_length=10, seed=0, epoch=0)
    assert len(pairs) == 3
    assert pairs.label.tolist() == [IS_RANDOM] * 3
    assert (document_of(dataset, pairs.a_start) != document_of(dataset, pairs.b_start)).all()


def test_a_single_document_serves_as_its_own_other(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [[[11, 12], [13], [14, 15, 16]] * 50])
    pairs = sample_pairs(dataset, max_length=16, seed=0, epoch=0)
    assert set(pairs.label.tolist()) == {IS_NEXT, IS_RANDOM}
    assert pairs.lengths.max() <= 16
    alone = write(tmp_path / "alone", [[[11]]])
    assert sample_pairs(alone, max_length=16, seed=0, epoch=0).lengths.tolist() == [5]


def test_empty_documents_are_passed_over(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [[], [[11], [12]], [], [[13], [14]], []])
    pairs = sample_pairs(dataset, max_length=9, seed=1, epoch=0)
    assert set(document_of(dataset, pairs.a_start)) == {1, 3}


def test_a_function_of_seed_and_epoch(dataset: IndexedDataset) -> None:
    def drawn(seed: int, epoch: int) -> list[list[int]]:
        pairs = sample_pairs(dataset, max_length=32, seed=seed, epoch=epoch)
        return [pairs.a_start.tolist(), pairs.b_start.tolist(), pairs.lengths.tolist(), pairs.label.tolist()]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(1, 1)
    assert drawn(1, 0) != drawn(2, 0)


def test_impossible_arguments_are_named(tmp_path: Path, dataset: IndexedDataset) -> None:
    with pytest.raises(ValueError, match=r"max_length.*5.*Got \b4\b"):
        sample_pairs(dataset, max_length=4, seed=0, epoch=0)
    with pytest.raises(ValueError, match=r"short_probability must lie between 0 and 1. Got 1.5"):
        sample_pairs(dataset, max_length=16, seed=0, epoch=0, short_probability=1.5)
    with pytest.raises(ValueError, match="empty holds no sentence"):
        sample_pairs(write(tmp_path / "empty", []), max_length=16, seed=0, epoch=0)


def test_another_vocabulary_is_noticed(dataset: IndexedDataset) -> None:
    pairs = sample_pairs(dataset, max_length=32, seed=0, epoch=0)
    small = type(VOCABULARY)(vocab_size=20, pad=0, cls=2, sep=3, mask=4)
    with pytest.raises(ValueError, match="holds the id 99, which a vocabulary of 20 does not have"):
        pairs.segments(dataset, np.arange(len(pairs))).tokens(small)


# --- single texts -------------------------------------------------------------------------------------------------


def test_documents_are_cut_into_texts_by_hand(tmp_path: Path) -> None:
    """Texts of 8 ids at most: whole sentences, as many as fit; one of 20 ids is cut, and none of its ids is lost."""
    dataset = write(tmp_path / "set", [[[11, 12, 13], [14, 15]], [[21] * 20], [[31] * 5, [32] * 4, [33] * 4]])
    texts = sample_texts(dataset, max_length=10, seed=0, epoch=0, short_probability=0.0)
    order = np.argsort(texts.a_start)
    assert texts.a_start[order].tolist() == [0, 5, 13, 21, 25, 30]
    assert texts.a_length[order].tolist() == [5, 8, 8, 4, 5, 8]
    assert set(texts.label.tolist()) == {NO_LABEL}
    assert texts.lengths.max() == 10


@pytest.mark.parametrize("max_length", [3, 9, 11, 32, 500])
@pytest.mark.parametrize("epoch", [0, 2])
def test_every_id_is_in_one_text(dataset: IndexedDataset, max_length: int, epoch: int) -> None:
    texts = sample_texts(dataset, max_length=max_length, seed=0, epoch=epoch, short_probability=0.3)
    taken = ranges(texts.a_start, texts.a_length.astype(np.int64))
    assert sorted(taken.tolist()) == list(range(len(dataset.ids)))
    assert texts.lengths.max() <= max_length
    last = texts.a_start + texts.a_length - 1
    np.testing.assert_array_equal(document_of(dataset, texts.a_start), document_of(dataset, last))


def test_documents_that_fit_are_texts(dataset: IndexedDataset) -> None:
    texts = sample_texts(dataset, max_length=500, seed=0, epoch=0, short_probability=0.0)
    bounds = dataset.starts[dataset.documents]
    assert sorted(zip(texts.a_start.tolist(), texts.a_length.tolist(), strict=True)) == list(
        zip(bounds[:-1].tolist(), np.diff(bounds).tolist(), strict=True)
    )


def test_a_source_of_texts_draws_each_shard_anew_in_every_epoch(dataset: IndexedDataset) -> None:
    source = ShardedPairs([dataset, dataset], max_length=20, seed=1, single=True)
    first, second = source.draw(0), source.draw(1)
    assert sum(first.lengths) != sum(second.lengths)  # other cuts have other numbers of [CLS] and [SEP]
    found = first.segments(np.arange(len(first.lengths)))
    assert (found.label == NO_LABEL).all()
    assert len(found.ids) == 2 * len(dataset.ids)
    drawn = PairSampler([dataset], max_length=20, seed=1, short_probability=0.1, single=True).draw(0, 0)
    assert len(drawn.labels) == 0

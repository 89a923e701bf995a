"""The corpus that is always there, its figures, and what is held out of it."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d.data import IndexedDataset, PretrainingData, ShardedPairs
from tools.corpus.quick.corpus_info import Corpus, load_corpus
from tools.corpus.quick.prepare import choose_held_out, prepare, unigram_entropy
from tools.corpus.quick.sentencepiece_tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus") / "embedded"
    prepare("embedded", folder, vocab_size=2048)
    return load_corpus(folder)


def whole(corpus: Corpus) -> IndexedDataset:
    (train,) = corpus.train
    assert train is not None
    return train


# The embedded corpus


@pytest.mark.slow
def test_embedded_corpus_is_as_large_as_a_first_run_needs(embedded: Corpus) -> None:
    info = embedded.info
    # Every Python has its own texts; what is asked for holds from 3.10 to 3.13.
    assert 200_000 < info.words < 500_000
    assert 400_000 < info.pieces < 900_000
    assert 5.9 < info.unigram_entropy < 6.5
    assert info.documents > 400
    assert info.vocab_size == embedded.special.vocab_size == 2048


@pytest.mark.slow
def test_figures_are_those_of_the_files(embedded: Corpus) -> None:
    info, train, held_out = embedded.info, whole(embedded), embedded.held_out
    assert (info.train_pieces, info.held_out_pieces) == (len(train.ids), len(held_out.ids))
    assert (info.train_documents, info.held_out_documents) == (len(train.documents) - 1, len(held_out.documents) - 1)
    assert info.pieces == info.train_pieces + info.held_out_pieces
    assert info.documents == info.train_documents + info.held_out_documents
    assert info.sentences == len(train) + len(held_out)
    assert info.held_out_pieces / info.pieces == pytest.approx(0.02, abs=0.004)
    assert info.unigram_entropy == unigram_entropy(train, 2048)
    special = [embedded.special.pad, embedded.special.cls, embedded.special.sep, embedded.special.mask]
    assert not np.isin(train.ids, special).any()
    assert train.ids.max() < 2048
    unknown = load_tokenizer(embedded.tokenizer).unk_id()
    assert (train.ids == unknown).mean() < 0.01


@pytest.mark.slow
def test_embedded_packs_are_full(embedded: Corpus) -> None:
    source = ShardedPairs(embedded.train, max_length=128, seed=0)
    data = PretrainingData(source, embedded.special, capacity=128, max_length=128, max_sequences=8, seed=0)
    for number in range(3):
        assert data.epochs[number].tokens.mean() > 0.98 * data.capacity


@pytest.mark.slow
def test_held_out_text_is_not_trained_on(embedded: Corpus) -> None:
    items = whole(embedded)
    train = {tuple(items[i].tolist()) for i in range(len(items))}
    long = [
        ids
        for ids in map(tuple, (embedded.held_out[i].tolist() for i in range(len(embedded.held_out))))
        if len(ids) > 20
    ]
    assert len(long) > 50
    assert sum(ids in train for ids in long) < 0.03 * len(long)


# Holding out


def test_held_out_documents_keep_to_their_share() -> None:
    words = np.random.default_rng(0).integers(1, 100, size=400)
    chosen = choose_held_out(words, 0.1, seed=1)
    assert 0.09 * words.sum() < words[chosen].sum() <= 0.1 * words.sum()
    np.testing.assert_array_equal(chosen, choose_held_out(words, 0.1, seed=1))
    assert (chosen != choose_held_out(words, 0.1, seed=2)).any()


def test_at_least_one_document_is_held_out_unless_none_is_wanted() -> None:
    words = np.array([50, 20, 30])
    assert choose_held_out(words, 0.02, seed=0).tolist() == [False, True, False]
    assert choose_held_out(words, 0.0, seed=0).tolist() == [False, False, False]
    with pytest.raises(ValueError, match=r"single document.*held out"):
        choose_held_out(np.array([50]), 0.02, seed=0)


@pytest.mark.slow
def test_unigram_entropy_of_equal_shares_is_their_logarithm(embedded: Corpus) -> None:
    class Ids:
        ids = np.repeat(np.arange(8), 1000)

    assert unigram_entropy(Ids, 10) == pytest.approx(np.log(8))  # type: ignore[arg-type]

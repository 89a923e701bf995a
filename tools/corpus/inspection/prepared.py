"""A corpus that `prepare` made in one go, and the sentence pairs that training draws from it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from tensor3d.data.sources import PairSampler
from tensor3d.packing import lpfhp
from tools.corpus.info import load_corpus
from tools.corpus.inspection.histogram import Histogram
from tools.corpus.inspection.ids import document_sizes
from tools.corpus.inspection.report import Report
from tools.corpus.inspection.sequences import Training
from tools.corpus.shards import shard_names
from tools.corpus.tokenizers.sentencepieces import SentencePieceTokenizer

if TYPE_CHECKING:
    from tools.corpus.inspection.command import InspectOptions


def examine(options: InspectOptions) -> Report:
    """Draws the pairs of the first epoch, and plans their packs.

    Raises:
        ValueError: the folder is no prepared corpus, or see `sample_pairs`.
    """
    corpus = load_corpus(options.folder)
    here = [shard for shard in corpus.train if shard is not None]
    tokens = Histogram.of_lengths("tokens of a sentence", (shard.lengths for shard in here), doubling=True)
    sentences = Histogram.of_lengths(
        "sentences of a document", chain.from_iterable(map(document_sizes, here)), doubling=True
    )
    sampler = PairSampler(corpus.train, max_length=options.max_length, seed=options.seed, short_probability=0.1)
    shards = tuple(
        None if shard is None else sampler.draw(number, epoch=0) for number, shard in enumerate(corpus.train)
    )
    pairs = Histogram.of_lengths(
        f"tokens of a pair of at most {options.max_length}",
        (shard.lengths for shard in shards if shard is not None),
        doubling=False,
    )
    training = Training(
        names=tuple(shard_names(len(shards))),
        shards=shards,
        special=corpus.special,
        tokenizer=SentencePieceTokenizer(corpus.tokenizer),
        max_length=options.max_length,
        lengths=pairs,
        plan=lpfhp(pairs.dense(options.max_length), options.max_length),
    )
    report = Report(folder=options.folder, kind="a corpus prepared in one go; sequences are drawn in training")
    report.add("words", corpus.info.words)
    report.add("pieces of the vocabulary", corpus.info.vocab_size)
    report.add("unigram entropy", corpus.info.unigram_entropy, "nats a piece")
    report.add("training documents", sentences.total)
    report.add("training sentences", tokens.total)
    report.add("training tokens", tokens.sum)
    report.add("held-out documents", corpus.info.held_out_documents)
    report.add("held-out tokens", corpus.info.held_out_pieces)
    report.histograms = [tokens, sentences]
    training.describe(report, samples=options.samples, packs=options.packs, seed=options.seed)
    return report

"""What the folders of the preparation hold: one function for each step that makes one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.indexed_dataset import IndexedDataset
from tensor3d.data.sources import PairSampler
from tensor3d.packing import lpfhp
from tools.common.files import parsed_json, read_file, what_is_wrong
from tools.common.log import progress
from tools.corpus.inspect.histogram import Histogram
from tools.corpus.inspect.report import Excerpt, Figure, InspectOptions, Report
from tools.corpus.inspect.sequences import Training
from tools.corpus.inspect.stored_ids import check_ids, check_shards
from tools.corpus.pipeline import read_manifest
from tools.corpus.pipeline.step import LEFT_OUT
from tools.corpus.quick.corpus_info import load_corpus, shard_names
from tools.corpus.samples.reader import open_samples, sample_shard_names
from tools.corpus.tokenizers import SETTINGS, Tokenizer, load_tokenizer
from tools.corpus.tokenizers.sentencepiece import SentencePieceTokenizer

# --- Sentences as ids -------------------------------------------------------------------------------------------------

_BLOCK = 1 << 20
_TEMPLATES = 30
"""That are listed of those that were left out; step.json has more."""
_SENTENCES = 4
"""Of a document that is shown."""


def examine_ids(options: InspectOptions) -> Report:
    """Reads ids and index once.

    Raises:
        ValueError: the folder was not made by `tokenize`, or a file of it is damaged.
    """
    manifest = read_manifest(options.folder, "tokenize")
    dataset = IndexedDataset(options.folder / "documents")
    tokenizer = load_tokenizer(options.folder / "tokenizer")
    tokens = Histogram.of_lengths("tokens of a sentence", [dataset.lengths], doubling=True)
    sentences = Histogram.of_lengths("sentences of a document", document_sizes(dataset), doubling=True)
    report = Report(folder=options.folder, kind="sentences as ids", noted=manifest.counts)
    report.add("documents", sentences.total)
    report.add("sentences", tokens.total)
    report.add("tokens", tokens.sum)
    unknown = check_ids(dataset, tokenizer.vocab_size, "tokenize", tokenizer.unknown)
    if tokenizer.unknown is not None:
        report.add("unknown tokens", unknown)
        report.add("share of unknown tokens", 100 * unknown / max(1, tokens.sum), "%")
    report.add("bytes of an id", dataset.ids.dtype.itemsize)
    report.add("pieces of the vocabulary", tokenizer.vocab_size)
    report.add("left out as bad", manifest.left_out)
    report.histograms = [tokens, sentences]
    report.excerpts["documents, decoded, a sentence a line"] = list(decoded(dataset, tokenizer, options))
    return report


def document_sizes(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Sentences of each document, a block of documents at a time."""
    for begin in range(0, len(dataset.documents) - 1, _BLOCK):
        yield np.diff(dataset.documents[begin : begin + _BLOCK + 1])


def decoded(dataset: IndexedDataset, tokenizer: Tokenizer, options: InspectOptions) -> Iterator[Excerpt]:
    """The first sentences of a few documents."""
    documents = len(dataset.documents) - 1
    rng = np.random.default_rng(options.seed)
    for document in np.sort(rng.choice(documents, min(options.samples, documents), replace=False)).tolist():
        first, end = dataset.documents[document : document + 2].tolist()
        shown = range(first, min(end, first + _SENTENCES))
        lines = [tokenizer.decode(dataset[item].tolist()) for item in shown]
        rest = [f" and {end - shown.stop:,} more"] if end > shown.stop else []
        yield Excerpt(f"document {document:,}, {end - first:,} sentences", (*lines, *rest))


# --- A corpus that `prepare` made in one go, and the sentence pairs that training draws from it -----------------------


def examine_prepared(options: InspectOptions) -> Report:
    """Reads the ids, draws the pairs of the first epoch, and plans their packs.

    Raises:
        ValueError: the folder is no prepared corpus, or has ids beyond its vocabulary, or see `sample_pairs`.
    """
    corpus = load_corpus(options.folder)
    here = [shard for shard in corpus.train if shard is not None]
    for dataset in (*here, corpus.held_out):
        check_ids(dataset, corpus.info.vocab_size, "prepare")
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
    for name, value in corpus.info.left_out.items():
        report.add(name.replace("_", " "), value, "(no text)")
    for name, value in corpus.info.trained_on.items():
        report.add(name.replace("_", " "), value, "(training the tokenizer)")
    report.add("training documents", sentences.total)
    report.add("training sentences", tokens.total)
    report.add("training tokens", tokens.sum)
    report.add("held-out documents", corpus.info.held_out_documents)
    report.add("held-out tokens", corpus.info.held_out_pieces)
    report.histograms = [tokens, sentences]
    training.describe(report, samples=options.samples, packs=options.packs, seed=options.seed)
    return report


# --- Sequences that were drawn ahead of training ----------------------------------------------------------------------


def examine_samples(options: InspectOptions) -> Report:
    """Reads the ids of all shards that are here.

    Raises:
        ValueError: the folder was not made by `samples`, nor is it a copy of such a one without some shards; or has ids
            beyond its vocabulary.
    """
    samples = open_samples(options.folder)
    check_shards((*samples.shards, samples.held_out), samples.vocab_size)
    counts = np.flatnonzero(samples.histogram)
    training = Training(
        names=tuple(sample_shard_names(len(samples.shards))),
        shards=samples.shards,
        special=samples.special,
        tokenizer=load_tokenizer(options.folder / "tokenizer"),
        max_length=samples.max_length,
        lengths=Histogram(
            title="tokens of a sequence", lengths=counts, counts=samples.histogram[counts], doubling=False
        ),
        plan=samples.plan(),
    )
    kind = "single texts" if samples.single else "sentence pairs"
    report = Report(folder=options.folder, kind=f"{kind} in shards, with a plan of their packs", noted=samples.counts)
    words = " of whole words" if samples.continuations is not None else ""
    report.add("what is guessed", ("stored" if samples.static else "drawn in training") + words)
    report.add("method of the plan", samples.packing)
    report.add("held-out sequences", 0 if samples.held_out is None else len(samples.held_out))
    report.add("left out as bad", samples.left_out)
    for number, corpus in enumerate(samples.counts["corpora"], start=1):
        passes = f"{100 * corpus['share']:.1f} %, {corpus['passes']:.2f} times gone through"
        report.add(f"sequences from corpus {number}", corpus["sequences"], passes)
    training.describe(report, samples=options.samples, packs=options.packs, seed=options.seed)
    return report


# --- A tokenizer ------------------------------------------------------------------------------------------------------

_PIECES = 20
"""Shown for each of `--samples`."""


def examine_tokenizer(options: InspectOptions) -> Report:
    """Raises ValueError unless the folder was made by `tokenizer`."""
    manifest = read_manifest(options.folder, "tokenizer")
    tokenizer = load_tokenizer(options.folder)
    report = Report(folder=options.folder, kind="a tokenizer", noted=manifest.counts)
    for name, value in parsed_json(read_file(options.folder / SETTINGS)).items():
        report.add(name.replace("_", " "), "yes" if value is True else "no" if value is False else value)
    report.add("pieces of the vocabulary", tokenizer.vocab_size)
    for name, number in special_ids(tokenizer).items():
        report.add(f"id of {name}", number)
    rng = np.random.default_rng(options.seed)
    chosen = np.sort(rng.choice(tokenizer.vocab_size, min(_PIECES * options.samples, tokenizer.vocab_size), False))
    rows = [chosen[begin : begin + _PIECES].tolist() for begin in range(0, len(chosen), _PIECES)]
    report.excerpts["pieces, drawn at random"] = [
        Excerpt(f"{row[0]:,} to {row[-1]:,}", ("  ".join(tokenizer.pieces(row)),)) for row in rows
    ]
    return report


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special pieces, by their names."""
    numbers = list(tokenizer.special_ids.values())
    if tokenizer.unknown is not None and tokenizer.unknown not in numbers:
        numbers.append(tokenizer.unknown)
    return dict(zip(tokenizer.pieces(numbers), numbers, strict=True))


# --- Files that were fetched ------------------------------------------------------------------------------------------


def examine_downloads(options: InspectOptions) -> Report:
    """Names and sizes."""
    manifest = read_manifest(options.folder, "download")
    report = Report(folder=options.folder, kind="files as they were fetched", noted=manifest.counts)
    for name, size in manifest.files.items():
        if name != LEFT_OUT:
            report.add(name, size, "bytes")
    report.add("left out as bad", manifest.left_out)
    return report


# --- What the folders of the preparation hold -------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A line of a documents file."""

    id: str
    title: str
    text: str


class Drawn(Generic[T]):
    """A few of a stream, each as likely as any other (algorithm R of Vitter, 1985)."""

    def __init__(self, wanted: int, seed: int) -> None:
        self.items: list[T] = []
        self._wanted, self._seen, self._rng = wanted, 0, random.Random(seed)

    def offer(self, item: T) -> None:
        self._seen += 1
        if len(self.items) < self._wanted:
            self.items.append(item)
        elif (place := self._rng.randrange(self._seen)) < self._wanted:
            self.items[place] = item


def examine_documents(options: InspectOptions) -> Report:
    """Reads every document once.

    Raises:
        ValueError: the folder was not made by `extract`, or a line of it is damaged.
    """
    manifest = read_manifest(options.folder, "extract")
    files = [options.folder / name for name in sorted(manifest.files) if name.endswith(".jsonl") and is_documents(name)]
    characters: Counter[int] = Counter()
    words: Counter[int] = Counter()
    drawn: Drawn[Document] = Drawn(options.samples, options.seed)
    titled = paragraphs = 0
    for document in read_documents(files, shown=True):
        characters[len(document.text)] += 1
        words[len(document.text.split())] += 1
        paragraphs += document.text.count("\n\n") + bool(document.text)
        titled += bool(document.title)
        drawn.offer(document)
    by_characters = Histogram.of_counts("characters of a document", characters)
    by_words = Histogram.of_counts("words of a document", words)
    report = Report(folder=options.folder, kind="documents of plain text", noted=manifest.counts)
    report.add("files", len(files))
    report.add("bytes", sum(manifest.files[file.name] for file in files))
    report.add("documents", by_words.total)
    report.add("with a title", titled)
    report.add("paragraphs", paragraphs)
    report.add("words", by_words.sum)
    report.add("characters", by_characters.sum)
    report.add("left out as bad", manifest.left_out)
    dropped: dict[str, int] = manifest.counts.get("commonest_templates_dropped", {})
    listed = [Figure(name, count) for name, count in list(dropped.items())[:_TEMPLATES]]
    report.lists["templates that were left out, the commonest"] = listed
    report.histograms = [by_words, by_characters]
    report.excerpts["first paragraphs"] = [_excerpt(document) for document in drawn.items]
    return report


def is_documents(name: str) -> bool:
    return name.startswith("documents-")


def read_documents(files: Sequence[Path], *, shown: bool = False) -> Iterator[Document]:
    """The documents of these files in order. Raises ValueError for a line that is none; names it."""
    total = sum(file.stat().st_size for file in files)
    with progress(desc="inspect", total=total, unit="B", unit_scale=True, shown=shown) as bar:
        for path in files:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    bar.update(len(line))
                    yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> Document:
    try:
        values = parsed_json(line)
        document = Document(id=values["id"], title=values["title"], text=values["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}, line {number} is no document: {what_is_wrong(error)}. Run `extract` again."
        ) from error
    if not all(isinstance(value, str) for value in (document.id, document.title, document.text)):
        raise ValueError(f"{path}, line {number} is no document: id, title and text must be strings.")
    return document


def _excerpt(document: Document) -> Excerpt:
    name = ", ".join(part for part in (document.title, document.id and f"id {document.id}") if part)
    return Excerpt(name or "without title", (document.text.partition("\n\n")[0],))


EXAMINERS: Mapping[str, Callable[[InspectOptions], Report]] = MappingProxyType(
    {
        "download": examine_downloads,
        "extract": examine_documents,
        "tokenizer": examine_tokenizer,
        "tokenize": examine_ids,
        "samples": examine_samples,
        "prepare": examine_prepared,
    }
)
"""By the step that has made the folder."""

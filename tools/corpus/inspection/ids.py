"""Sentences as ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.indexed import IndexedDataset
from tools.corpus.inspection.histogram import Histogram
from tools.corpus.inspection.report import Excerpt, Report
from tools.corpus.tokenizers import Tokenizer, load_tokenizer
from tools.corpus.work import read_manifest

if TYPE_CHECKING:
    from tools.corpus.inspection.command import InspectOptions

_BLOCK = 1 << 20
_SENTENCES = 4
"""Of a document that is shown."""


def examine(options: InspectOptions) -> Report:
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
    if tokenizer.unknown is not None:
        unknown = count_of(tokenizer.unknown, dataset)
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


def count_of(wanted: int, dataset: IndexedDataset) -> int:
    """How often an id occurs. Read by blocks: what is read of a memory map counts as memory of the process."""
    count = 0
    with dataset.prefix.with_name(f"{dataset.prefix.name}.bin").open("rb") as file:
        while len(block := np.fromfile(file, dtype=dataset.ids.dtype, count=_BLOCK)):
            count += int(np.count_nonzero(block == wanted))
    return count


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

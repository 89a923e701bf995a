"""Sentences to train a tokenizer on: an even sample of the documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.corpus.sentences import split_sentences
from tools.corpus.tokenizing.documents import DocumentRange, parse_text, read_lines
from tools.corpus.work import BadInput, Context, draft


@dataclass(frozen=True, kw_only=True)
class SampledRange(DocumentRange):
    """A range with its share of the sample."""

    sentences: int
    """At most."""


def share_out(ranges: Sequence[DocumentRange], sentences: int) -> list[SampledRange]:
    """Gives each range sentences by its bytes; they add up to `sentences`."""
    ends = np.cumsum([unit.size for unit in ranges], dtype=np.float64)
    bounds = np.rint(ends / ends[-1:] * sentences).astype(np.int64) if len(ends) else ends.astype(np.int64)
    shares = np.diff(bounds, prepend=0).tolist()
    return [
        SampledRange(name=unit.name, size=unit.size, file=unit.file, start=unit.start, end=unit.end, sentences=share)
        for unit, share in zip(ranges, shares, strict=True)
    ]


def write_sample(unit: SampledRange, context: Context, *, seed: int, language: str) -> dict[str, int]:
    """Writes the sentences of documents drawn at random to NAME.txt, a sentence a line, in the order of the corpus.

    Documents are drawn until there are enough sentences; of the last one every n-th is taken.
    """
    lines = list(read_lines(unit))
    drawn: dict[int, list[str]] = {}
    left = unit.sentences
    for number in np.random.default_rng([seed, int(unit.name)]).permutation(len(lines)).tolist():
        if not left:
            break
        at, line = lines[number]
        try:
            text = parse_text(line, unit.file, at)
        except BadInput as error:
            context.bad(error)
            continue
        sentences = split_sentences(text, language)
        sentences = sentences[:: -(-len(sentences) // left) or 1]
        drawn[number] = sentences
        left -= len(sentences)
    with draft(context.scratch / f"{unit.name}.txt") as file:
        for number in sorted(drawn):
            file.writelines(f"{sentence}\n".encode() for sentence in drawn[number])
    return {"sentences": unit.sentences - left}


def read_sample(units: Sequence[SampledRange], scratch: Path) -> Iterator[str]:
    """All sentences that were sampled."""
    for unit in units:
        with (scratch / f"{unit.name}.txt").open(encoding="utf-8", newline="\n") as file:
            yield from (line.removesuffix("\n") for line in file)

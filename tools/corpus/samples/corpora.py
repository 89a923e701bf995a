"""The corpora that samples are drawn from, and how they are cut into runs of documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import IndexedDataset
from tensor3d.seeds import mix
from tools.corpus.samples.runs import Choice, IndexView
from tools.corpus.work import fingerprint_file, read_manifest

DOCUMENTS, TOKENIZER = "documents", "tokenizer"
"""Names in the folder that the step `tokenize` writes."""
_STREAM = 20
_CHUNK = 1 << 18
"""Documents that are looked at together."""
_HELD_OUT_SHARE_OF_RUN = 4
"""A run of held-out documents is so much smaller: it spans many more of those that are not."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents of ids."""

    number: int
    prefix: Path
    """Of the .bin/.idx pair."""
    tokenizer: Path | None
    """Folder of the tokenizer that made it; None where nothing is known of it."""
    weight: float | None
    """Share of the sequences, beside the weights of the other corpora."""

    def fingerprint(self) -> str:
        kinds = (self.prefix.with_name(f"{self.prefix.name}.{kind}") for kind in ("idx", "bin"))
        return "-".join(map(fingerprint_file, kinds))

    def choice(self, seed: int, limit: int) -> Choice:
        return Choice(key=mix(seed, _STREAM, self.number), limit=limit)


class Run(NamedTuple):
    """Documents `first` to `end - 1`, or those of them that are held out, or that are not."""

    first: int
    end: int
    ids: int


class Cut(NamedTuple):
    """The runs of a corpus."""

    training: list[Run]
    held_out: list[Run]


class Survey(NamedTuple):
    """What is known of the corpora before any id is read."""

    limit: int
    """Hashes below it are held out."""
    cuts: list[Cut]


def parse_corpora(texts: Sequence[str]) -> list[Corpus]:
    """FOLDER or PREFIX, each alone or all with =WEIGHT.

    Raises:
        ValueError: no corpus, a weight that is none, weights for some only, a path that is neither, or one
            corpus twice.
    """
    if not texts:
        raise ValueError(
            "samples need at least one corpus. Name the output folder of `python -m tools.corpus tokenize`."
        )
    corpora = [_parse(number, text) for number, text in enumerate(texts)]
    with_weight = sum(corpus.weight is not None for corpus in corpora)
    if 0 < with_weight < len(corpora):
        raise ValueError(f"give a weight to each corpus or to none. Got {with_weight} weights for {len(corpora)}.")
    files = [corpus.prefix.resolve() for corpus in corpora]
    for file in files:
        # Each would hold out other documents, and train on those that the other holds out.
        if files.count(file) > 1:
            raise ValueError(f"{file} is named twice; to draw it several times use --duplicates or a weight.")
    return corpora


def _parse(number: int, text: str) -> Corpus:
    path, weight = Path(text), None
    if not _is_there(path) and "=" in text:
        name, _, last = text.rpartition("=")
        try:
            weight = float(last)
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of a corpus is a number above 0, as in {name}=0.7. Got {last!r}.")
        path = Path(name)
    if path.is_dir():
        read_manifest(path, "tokenize")
        return Corpus(number=number, prefix=path / DOCUMENTS, tokenizer=path / TOKENIZER, weight=weight)
    if not _is_there(path):
        raise ValueError(
            f"{path} is neither a folder nor the prefix of a .bin/.idx pair. Name the output folder of "
            "`python -m tools.corpus tokenize`, or a pair without its .idx."
        )
    return Corpus(number=number, prefix=path, tokenizer=None, weight=weight)


def _is_there(path: Path) -> bool:
    return path.is_dir() or path.with_name(f"{path.name}.idx").is_file()


def survey(corpora: Sequence[Corpus], *, seed: int, held_out: float, run_tokens: int) -> Survey:
    """Checks the corpora and cuts them into runs of about `run_tokens` ids.

    Documents are held out by a hash of their numbers, about `held_out` of them, but one at least if that is not 0.

    Raises:
        ValueError: a damaged pair of files, or a corpus of which no document is left for training.
    """
    for corpus in corpora:
        IndexedDataset(corpus.prefix)
    views = [IndexView(corpus.prefix) for corpus in corpora]
    limit = int(held_out * 2.0**64)
    counts = [_count(v, c.choice(seed, limit)) for v, c in zip(views, corpora, strict=True)]
    held = [count.held_out for count in counts]
    if held_out and not any(held):
        limit = min(count.lowest for count in counts) + 1
        held = [int(count.lowest < limit) for count in counts]
    training = [count.documents - out for count, out in zip(counts, held, strict=True)]
    for corpus, left in zip(corpora, training, strict=True):
        if left < 1:
            raise ValueError(
                f"{corpus.prefix} has no document left for training when held_out is {held_out}; lower that, or add "
                "documents."
            )
    cuts = [_cut(v, c.choice(seed, limit), run_tokens) for v, c in zip(views, corpora, strict=True)]
    return Survey(limit=limit, cuts=cuts)


class _Count(NamedTuple):
    """Of the documents of a corpus that have sentences."""

    documents: int
    held_out: int
    lowest: int
    """Hash."""


def _count(view: IndexView, choice: Choice) -> _Count:
    documents, held_out, lowest = 0, 0, 2**64 - 1
    for numbers, sizes, out in _chunks(view, choice):
        there = sizes > 0
        documents += int(there.sum())
        held_out += int((out & there).sum())
        if there.any():
            lowest = min(lowest, int(choice.bits(numbers[there]).min()))
    return _Count(documents, held_out, lowest)


def _chunks(
    view: IndexView, choice: Choice
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Numbers of documents, their ids, and which are held out; some documents at a time."""
    documents = len(view.documents) - 1
    for first in range(0, documents, _CHUNK):
        numbers = np.arange(first, min(first + _CHUNK, documents))
        bounds = view.first_ids(np.asarray(view.documents[first : numbers[-1] + 2]))
        yield numbers, np.diff(bounds), choice.held_out(numbers)


class _Cutter:
    """Puts documents into runs: of two at least, so that each has another to draw a random segment from."""

    def __init__(self, run_tokens: int) -> None:
        self._run_tokens = run_tokens
        self._runs: list[Run] = []
        self._first = self._documents = self._ids = 0

    def add(self, number: int, ids: int) -> None:
        self._documents += 1
        self._ids += ids
        if self._ids >= self._run_tokens and self._documents > 1:
            self._close(number + 1)

    def _close(self, end: int) -> None:
        self._runs.append(Run(self._first, end, self._ids))
        self._first, self._documents, self._ids = end, 0, 0

    def end(self, end: int) -> list[Run]:
        """All runs. A small rest goes to the last one, and so do documents without ids behind it: somebody has to look
        at their sentences."""
        if self._runs and self._documents and (self._documents < 2 or 2 * self._ids < self._run_tokens):
            last = self._runs.pop()
            self._first, self._ids = last.first, self._ids + last.ids
            self._documents += 1
        if self._documents:
            self._close(end)
        return [*self._runs[:-1], *(last._replace(end=end) for last in self._runs[-1:])]


def _cut(view: IndexView, choice: Choice, run_tokens: int) -> Cut:
    training, held_out = _Cutter(run_tokens), _Cutter(max(1, run_tokens // _HELD_OUT_SHARE_OF_RUN))
    for numbers, sizes, out in _chunks(view, choice):
        for number, ids, is_out in zip(numbers.tolist(), sizes.tolist(), out.tolist(), strict=True):
            if ids:
                (held_out if is_out else training).add(number, ids)
    end = len(view.documents) - 1
    return Cut(training=training.end(end), held_out=held_out.end(end))

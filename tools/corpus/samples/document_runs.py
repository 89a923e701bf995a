"""The corpora that samples are drawn from, and how they are cut into runs of documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import IndexedDataset, SpecialTokens
from tensor3d.data.array_utils import random_bits, ranges
from tensor3d.data.indexed_dataset import HEADER, TYPES
from tensor3d.data.sampling import cut_long
from tensor3d.ops.seeds import mix
from tools.corpus.pipeline import BadInput, Context, fingerprint_file, read_manifest

# --- Runs of documents of an indexed dataset, read without the rest of it ---------------------------------------------

_RUN_CHUNK = 1 << 16
"""Documents that are looked at together: runs of held-out ones span many that are not."""
_ANOTHER = "Tokenize the documents again with the tokenizer that the samples are made with"
_WITHOUT = "Write the file without special tokens (Megatron: without --append-eod); the samples get theirs here"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which documents of a corpus are held out: those whose number has a hash below a limit."""

    key: int
    limit: int

    def held_out(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool (documents,)"""
        return self.bits(numbers) < np.uint64(self.limit)

    def bits(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        return random_bits(self.key, numbers)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentRun:
    """Some documents, as `tensor3d.data.sample_pairs` takes them."""

    prefix: Path
    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]
    ids: NDArray[np.integer]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))


class IndexView:
    """The arrays of an `IndexedDataset`, mapped and not looked at; it was checked before.

    Nothing here is read before it is asked for, so a worker that needs a run pays for that run.
    """

    def __init__(self, prefix: Path) -> None:
        self.index, self.data = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("idx", "bin"))
        self.prefix = prefix
        with self.index.open("rb") as file:
            _, _, code, self.items, boundaries = HEADER.unpack(file.read(HEADER.size))
        self.type = TYPES[code]
        self.total = self.data.stat().st_size // self.type.itemsize
        items = self.items
        raw = np.memmap(self.index, mode="r", dtype=np.uint8)[HEADER.size :]
        self.lengths: NDArray[np.int32] = raw[: 4 * items].view("<i4")
        self.pointers: NDArray[np.int64] = raw[4 * items : 12 * items].view("<i8")
        self.documents: NDArray[np.int64] = raw[12 * items :].view("<i8")
        assert len(self.documents) == boundaries, "the index was checked before"

    def first_ids(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 (n,): where each item begins; that after the last begins where the ids end."""
        first = np.full(len(items), self.total, dtype=np.int64)
        inside = items < self.items
        first[inside] = self.pointers[items[inside]] // self.type.itemsize
        return first

    def read(
        self, first: int, end: int, choice: Choice, *, held_out: bool, special: SpecialTokens, context: Context | None
    ) -> DocumentRun:
        """The documents `first` to `end - 1` that are held out, or those that are not, without empty ones.

        Args:
            context: hears of documents with special tokens, ids outside the vocabulary or empty sentences, which are
                left out. None: it has heard before.
        """
        chosen = _chosen(first, end, choice, held_out=held_out)
        begins, ends = (np.asarray(self.documents[chosen + after]) for after in (0, 1))
        items = ranges(begins, ends - begins)
        id_begins, id_ends = self.first_ids(begins), self.first_ids(ends)
        run = DocumentRun(
            prefix=self.prefix,
            lengths=np.asarray(self.lengths[items]),
            documents=np.concatenate(([0], np.cumsum(ends - begins, dtype=np.int64))),
            ids=self._slices(id_begins, id_ends),
        )
        return self._checked(run, items, id_begins, special, context)

    def _slices(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.integer]:
        """The ids of documents, those that follow one another in one go."""
        if not self.total or not len(begins):
            return np.empty(0, dtype=self.type)
        ids = np.memmap(self.data, mode="r", dtype=self.type)
        cuts = np.flatnonzero(begins[1:] != ends[:-1]) + 1
        stretches = zip(begins[[0, *cuts]].tolist(), ends[[*(cuts - 1), -1]].tolist(), strict=True)
        return np.concatenate([ids[begin:end] for begin, end in stretches])

    def _checked(
        self,
        run: DocumentRun,
        items: NDArray[np.int64],
        id_begins: NDArray[np.int64],
        special: SpecialTokens,
        context: Context | None,
    ) -> DocumentRun:
        roles = {getattr(special, role): role for role in ("pad", "cls", "sep", "mask")}
        outside = (run.ids < 0) | (run.ids >= special.vocab_size)
        bad_ids = np.flatnonzero(outside | np.isin(run.ids, list(roles)))
        empty = np.flatnonzero(run.lengths == 0)
        if not len(bad_ids) and not len(empty):
            return run
        bounds = run.starts[run.documents]
        document_of = np.searchsorted(bounds, bad_ids, side="right") - 1
        documents, first = np.unique(document_of, return_index=True)
        for document, at in zip(documents.tolist(), bad_ids[first].tolist(), strict=True):
            if context is not None:
                place = (int(id_begins[document]) + at - int(bounds[document])) * self.type.itemsize
                number = int(run.ids[at])
                if number in roles:
                    reason, remedy = f"the id {number} is the special token {roles[number]!r}", _WITHOUT
                else:
                    reason, remedy = f"the id {number} is outside a vocabulary of {special.vocab_size}", _ANOTHER
                context.bad(BadInput(self.data, f"byte {place}", reason, remedy))
        for at in empty.tolist():
            if context is not None:
                reason = "a sentence of no token"
                context.bad(BadInput(self.index, f"item {items[at]}", reason, "Prepare the file without it"))
        holders = np.searchsorted(run.documents, empty, side="right") - 1
        return _without(run, np.union1d(documents, holders))


def cut_run(run: DocumentRun, *, longest: int, room: int, parts: int) -> DocumentRun:
    """The same ids, with items of more than `longest` of them cut into several, as `cut_long` has it."""
    lengths, documents = cut_long(run.lengths, run.documents, longest=longest, room=room, parts=parts)
    if documents is run.documents:
        return run
    return DocumentRun(prefix=run.prefix, lengths=lengths, documents=documents, ids=run.ids)


def _chosen(first: int, end: int, choice: Choice, *, held_out: bool) -> NDArray[np.int64]:
    """int64 (documents,): the numbers of those that are held out, or of those that are not."""
    chosen = []
    for begin in range(first, end, _RUN_CHUNK):
        numbers = np.arange(begin, min(begin + _RUN_CHUNK, end))
        chosen.append(numbers[choice.held_out(numbers) == held_out])
    return np.concatenate(chosen)


def _without(run: DocumentRun, documents: NDArray[np.int64]) -> DocumentRun:
    keep = np.ones(len(run.documents) - 1, dtype=np.bool_)
    keep[documents] = False
    sizes = np.diff(run.documents)
    of_item = np.repeat(keep, sizes)
    return DocumentRun(
        prefix=run.prefix,
        lengths=run.lengths[of_item],
        documents=np.concatenate(([0], np.cumsum(sizes[keep], dtype=np.int64))),
        ids=run.ids[np.repeat(of_item, run.lengths)],
    )


# --- The corpora that samples are drawn from --------------------------------------------------------------------------

DOCUMENTS, TOKENIZER = "documents", "tokenizer"
"""Names in the folder that the step `tokenize` writes."""
_STREAM = 20
_DOCUMENT_CHUNK = 1 << 18
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


class DocRun(NamedTuple):
    """Documents `first` to `end - 1`, or those of them that are held out, or that are not."""

    first: int
    end: int
    ids: int


class Split(NamedTuple):
    """The runs of a corpus."""

    training: list[DocRun]
    held_out: list[DocRun]


class CorpusSurvey(NamedTuple):
    """What is known of the corpora before any id is read."""

    limit: int
    """Hashes below it are held out."""
    cuts: list[Split]


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


def survey(corpora: Sequence[Corpus], *, seed: int, held_out: float, run_tokens: int) -> CorpusSurvey:
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
    return CorpusSurvey(limit=limit, cuts=cuts)


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
    for first in range(0, documents, _DOCUMENT_CHUNK):
        numbers = np.arange(first, min(first + _DOCUMENT_CHUNK, documents))
        bounds = view.first_ids(np.asarray(view.documents[first : numbers[-1] + 2]))
        yield numbers, np.diff(bounds), choice.held_out(numbers)


class _Cutter:
    """Puts documents into runs: of two at least, so that each has another to draw a random segment from."""

    def __init__(self, run_tokens: int) -> None:
        self._run_tokens = run_tokens
        self._runs: list[DocRun] = []
        self._first = self._documents = self._ids = 0

    def add(self, number: int, ids: int) -> None:
        self._documents += 1
        self._ids += ids
        if self._ids >= self._run_tokens and self._documents > 1:
            self._close(number + 1)

    def _close(self, end: int) -> None:
        self._runs.append(DocRun(self._first, end, self._ids))
        self._first, self._documents, self._ids = end, 0, 0

    def end(self, end: int) -> list[DocRun]:
        """All runs. A small rest goes to the last one, and so do documents without ids behind it: somebody has to look
        at their sentences."""
        if self._runs and self._documents and (self._documents < 2 or 2 * self._ids < self._run_tokens):
            last = self._runs.pop()
            self._first, self._ids = last.first, self._ids + last.ids
            self._documents += 1
        if self._documents:
            self._close(end)
        return [*self._runs[:-1], *(last._replace(end=end) for last in self._runs[-1:])]


def _cut(view: IndexView, choice: Choice, run_tokens: int) -> Split:
    training, held_out = _Cutter(run_tokens), _Cutter(max(1, run_tokens // _HELD_OUT_SHARE_OF_RUN))
    for numbers, sizes, out in _chunks(view, choice):
        for number, ids, is_out in zip(numbers.tolist(), sizes.tolist(), out.tolist(), strict=True):
            if ids:
                (held_out if is_out else training).add(number, ids)
    end = len(view.documents) - 1
    return Split(training=training.end(end), held_out=held_out.end(end))

"""Runs of documents of an indexed dataset, read without the rest of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import SpecialTokens
from tensor3d.data.chance import random_bits
from tensor3d.data.indexed import HEADER, TYPES
from tensor3d.data.ragged import first_rows, ranges
from tools.corpus.work import BadInput, Context

_CHUNK = 1 << 16
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


def cut_long(run: DocumentRun, *, longest: int, room: int, parts: int) -> DocumentRun:
    """The same ids, with items of more than `longest` of them cut into several.

    The pieces are `parts`-ths of `room`, to the next id, and a rest: as many pieces that follow one another fill the
    room exactly.

    Args:
        parts: from 1 to `room`.
    """
    long = run.lengths > longest
    if not long.any():
        return run
    counts = np.where(long, -(-run.lengths.astype(np.int64) * parts // room), 1)
    number = np.arange(int(counts.sum())) - np.repeat(first_rows(counts), counts)
    lengths, is_long = np.repeat(run.lengths, counts), np.repeat(long, counts)
    begins, ends = (np.where(is_long, (number + after) * room // parts, after * lengths) for after in (0, 1))
    return DocumentRun(
        prefix=run.prefix,
        lengths=(np.minimum(ends, lengths) - begins).astype(np.int32),
        documents=np.concatenate(([0], np.cumsum(counts)))[run.documents],
        ids=run.ids,
    )


def _chosen(first: int, end: int, choice: Choice, *, held_out: bool) -> NDArray[np.int64]:
    """int64 (documents,): the numbers of those that are held out, or of those that are not."""
    chosen = []
    for begin in range(first, end, _CHUNK):
        numbers = np.arange(begin, min(begin + _CHUNK, end))
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

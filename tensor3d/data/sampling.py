"""Sentence pairs for BERT's next-sentence task (Devlin et al., 2019, section 3.1, task 2, and appendix A.2).

A pair is [CLS] A [SEP] B [SEP]. A and B are runs of whole sentences; B follows A in its document or is a run of another
one. Both are cut where the pair would be too long. A run that is cut at its ends is still one range of ids in the
dataset, so a pair is two ranges and a label, and its length is known before a single id is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.array_utils import first_rows, ranges
from tensor3d.data.segments import NO_LABEL, SPECIAL_TOKENS, SPECIAL_TOKENS_OF_SINGLE, Segments, full_lengths
from tensor3d.ops.seeds import mix

IS_NEXT, IS_RANDOM = 0, 1
_PAIR_STREAM = 1


class Sentences(Protocol):
    """Documents of sentences: an `IndexedDataset`, or a run of its documents."""

    @property
    def prefix(self) -> Path:
        """Where they are from, for messages."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32 (sentences,): ids of each sentence."""

    @property
    def documents(self) -> NDArray[np.int64]:
        """int64 (documents + 1,): sentences `documents[i]` to `documents[i + 1] - 1` are document `i`."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64 (sentences + 1,): where each sentence begins in `ids`, then the number of ids."""

    @property
    def ids(self) -> NDArray[np.integer]:
        """(ids,): all ids, sentences one after another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """The pairs of an epoch, as ranges of a dataset's ids. A single text has no B."""

    a_start: NDArray[np.int64]
    """int64 (pairs,): first id of A."""
    a_length: NDArray[np.int32]
    """int32 (pairs,): ids of A, at least 1."""
    b_start: NDArray[np.int64]
    b_length: NDArray[np.int32]
    label: NDArray[np.int8]
    """int8 (pairs,): 0 where B follows A, 1 where it was drawn at random, -100 for a single text."""

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """int32 (pairs,): tokens of each pair, the special ones counted."""
        return full_lengths(self.a_length, self.b_length).astype(np.int32)

    def segments(self, dataset: Sentences, chosen: NDArray[np.integer]) -> Segments:
        """What the chosen pairs consist of, read from the dataset."""
        starts = np.stack([self.a_start[chosen], self.b_start[chosen]], axis=1).reshape(-1)
        lengths = np.stack([self.a_length[chosen], self.b_length[chosen]], axis=1).astype(np.int64)
        return Segments(
            a_length=lengths[:, 0],
            b_length=lengths[:, 1],
            label=self.label[chosen].astype(np.int64),
            ids=dataset.ids[ranges(starts, lengths.reshape(-1))].astype(np.int64),
        )


def sample_pairs(
    dataset: Sentences, *, max_length: int, seed: int, epoch: int, short_probability: float = 0.1
) -> Pairs:
    """Draws the pairs of an epoch; every sentence is in at least one A or B that was taken in order.

    As in the reference implementation of BERT, with two differences: the short target length is drawn for each pair,
    not once a document, and chance is drawn for all documents together, not one after another.

    A document of one sentence has nothing that could follow: it becomes A, and B is random. A dataset of one document
    draws its random B from that document.

    Args:
        dataset: documents of sentences.
        max_length: tokens of a pair, at most; the special ones counted.
        seed, epoch: the pairs are a function of these two and the arguments.
        short_probability: share of the pairs that aim at a random shorter length, so that these occur too.

    Raises:
        ValueError: arguments out of range, a dataset without sentences or with an empty one.
    """
    room = max_length - SPECIAL_TOKENS
    if room < 2:
        raise ValueError(f"max_length must be at least 5: 3 special tokens and one of each segment. Got {max_length}.")
    check_sentences(dataset, short_probability)
    rng = np.random.default_rng(mix(seed, epoch, _PAIR_STREAM))
    documents = Documents.of(dataset)
    position = documents.first.copy()
    active = np.arange(len(position))
    parts: list[_Runs] = []
    # One pair of each document that still has sentences: as many rounds as the longest document has pairs.
    while len(active):
        target = np.full(len(active), room)
        short = rng.random(len(active)) < short_probability
        target[short] = rng.integers(2, room + 1, size=int(short.sum()))
        runs, position[active] = _draw(documents, active, position[active], target, rng)
        parts.append(runs)
        active = active[position[active] < documents.end[active]]
    return _cut(dataset.starts, _Runs(*map(np.concatenate, zip(*parts, strict=True))), room, rng)


def check_sentences(dataset: Sentences, short_probability: float) -> None:
    """Raises ValueError for a share out of range, a dataset without sentences or with an empty one."""
    if not 0 <= short_probability <= 1:
        raise ValueError(f"short_probability must lie between 0 and 1. Got {short_probability}.")
    if len(dataset.lengths) == 0:
        raise ValueError(f"{dataset.prefix} holds no sentence; there is nothing to train on.")
    if (dataset.lengths == 0).any():
        raise ValueError(
            f"{dataset.prefix}: sentence {int(np.argmin(dataset.lengths))} has no token; "
            "prepare it without empty sentences."
        )


class Documents(NamedTuple):
    """Documents that have sentences."""

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    starts: NDArray[np.int64]
    """First id of each sentence, then the number of ids."""

    @classmethod
    def of(cls, dataset: Sentences) -> Documents:
        return cls.bounded(dataset.documents, dataset.starts)

    @classmethod
    def bounded(cls, documents: NDArray[np.int64], starts: NDArray[np.int64]) -> Documents:
        """By the sentences with which documents begin, and the ids with which sentences do."""
        first, end = documents[:-1], documents[1:]
        filled = end > first
        return cls(first=first[filled], end=end[filled], starts=starts)

    def reach(self, first: NDArray[np.int64], tokens: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sentence after the one with which a run that begins at `first` has `tokens` ids; at most `end`."""
        return np.minimum(np.searchsorted(self.starts, self.starts[first] + tokens), end)

    def within(self, first: NDArray[np.int64], tokens: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for a run that has `tokens` ids at most, but one sentence at least."""
        fitting = np.searchsorted(self.starts, self.starts[first] + tokens, side="right") - 1
        return np.minimum(np.maximum(fitting, first + 1), end)


class _Runs(NamedTuple):
    """Pairs as runs of sentences; the ends are exclusive."""

    a_first: NDArray[np.int64]
    a_end: NDArray[np.int64]
    b_first: NDArray[np.int64]
    b_end: NDArray[np.int64]
    label: NDArray[np.int8]


def _draw(
    documents: Documents,
    active: NDArray[np.int64],
    position: NDArray[np.int64],
    target: NDArray[np.int64],
    rng: np.random.Generator,
) -> tuple[_Runs, NDArray[np.int64]]:
    """One pair that begins at `position` in each active document, and where the next pair begins."""
    count = len(active)
    chunk_end = documents.reach(position, target, documents.end[active])
    sentences = chunk_end - position
    a_end = position + 1 + rng.integers(0, np.maximum(1, sentences - 1))
    at_random = (rng.random(count) < 0.5) | (sentences == 1)

    total = len(documents.first)
    other = (active + rng.integers(1, max(2, total), size=count)) % total
    first = rng.integers(documents.first[other], documents.end[other])
    wanted = np.maximum(1, target - (documents.starts[a_end] - documents.starts[position]))
    end = documents.reach(first, wanted, documents.end[other])

    runs = _Runs(
        a_first=position,
        a_end=a_end,
        b_first=np.where(at_random, first, a_end),
        b_end=np.where(at_random, end, chunk_end),
        label=np.where(at_random, IS_RANDOM, IS_NEXT).astype(np.int8),
    )
    # What a random B displaced is used by the next pair.
    return runs, np.where(at_random, a_end, chunk_end)


def _cut(starts: NDArray[np.int64], runs: _Runs, room: int, rng: np.random.Generator) -> Pairs:
    """Shortens the longer segment, token by token at a random end, until both fit; all tokens of all pairs at once."""
    a_start, b_start = starts[runs.a_first], starts[runs.b_first]
    a_full, b_full = starts[runs.a_end] - a_start, starts[runs.b_end] - b_start
    a = np.minimum(a_full, np.maximum(room - b_full, (room + 1) // 2))
    b = np.minimum(b_full, np.maximum(room - a_full, room // 2))
    return Pairs(
        a_start=a_start + rng.binomial(a_full - a, 0.5),
        a_length=a.astype(np.int32),
        b_start=b_start + rng.binomial(b_full - b, 0.5),
        b_length=b.astype(np.int32),
        label=runs.label,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Single texts, for masked-LM without next sentences (the "doc-sentences" of Liu et al., 2019, RoBERTa, section 4.2).
#
# A text is [CLS] A [SEP]. A is a run of whole sentences of one document, as many as fit; the next text goes on behind
# it.

_TEXT_STREAM = 8
_PARTS_OF_TEXT = 8
"""A long sentence is cut into such parts of a text, so that a text may also be shorter than the longest."""


def cut_long(
    lengths: NDArray[np.int32], documents: NDArray[np.int64], *, longest: int, room: int, parts: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Lengths and documents, as of `Sentences`, of the same ids with sentences of more than `longest` cut into several.

    The pieces are `parts`-ths of `room`, to the next id, and a rest: as many pieces that follow one another fill the
    room exactly.

    Args:
        parts: from 1 to `room`.
    """
    long = lengths > longest
    if not long.any():
        return lengths, documents
    counts = np.where(long, -(-lengths.astype(np.int64) * parts // room), 1)
    number = np.arange(int(counts.sum())) - np.repeat(first_rows(counts), counts)
    whole, is_long = np.repeat(lengths, counts), np.repeat(long, counts)
    begins, ends = (np.where(is_long, (number + after) * room // parts, after * whole) for after in (0, 1))
    return (np.minimum(ends, whole) - begins).astype(np.int32), np.concatenate(([0], np.cumsum(counts)))[documents]


def sample_texts(
    dataset: Sentences, *, max_length: int, seed: int, epoch: int, short_probability: float = 0.1
) -> Pairs:
    """Cuts documents into texts; every token is in exactly one. A document that fits is one text, unless a shorter
    length is aimed at.

    A sentence that is longer than a text is cut into parts, which are sentences then. In epochs above 0 the first text
    of each document aims at a random length, so that every epoch cuts elsewhere.

    Args:
        dataset: documents of sentences.
        max_length: tokens of a text, at most; the special ones counted.
        seed, epoch: the texts are a function of these two and the arguments.
        short_probability: share of the texts that aim at a random shorter length.

    Raises:
        ValueError: arguments out of range, a dataset without sentences or with an empty one.
    """
    room = max_length - SPECIAL_TOKENS_OF_SINGLE
    if room < 1:
        raise ValueError(f"max_length must be at least 3: 2 special tokens and one of text. Got {max_length}.")
    check_sentences(dataset, short_probability)
    rng = np.random.default_rng(mix(seed, epoch, _TEXT_STREAM))
    lengths, bounds = cut_long(
        dataset.lengths, dataset.documents, longest=room, room=room, parts=min(_PARTS_OF_TEXT, room)
    )
    starts = (
        dataset.starts if bounds is dataset.documents else np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    )
    documents = Documents.bounded(bounds, starts)
    position = documents.first.copy()
    active = np.arange(len(position))
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    # One text of each document that still has sentences.
    while len(active):
        short = rng.random(len(active)) < short_probability
        if epoch > 0 and not parts:
            short[:] = True
        target = np.full(len(active), room)
        target[short] = rng.integers(1, room + 1, size=int(short.sum()))
        first = position[active]
        end = documents.within(first, target, documents.end[active])
        parts.append((first, end))
        position[active] = end
        active = active[end < documents.end[active]]
    first, end = map(np.concatenate, zip(*parts, strict=True))
    start, length = starts[first], starts[end] - starts[first]
    return Pairs(
        a_start=start,
        a_length=length.astype(np.int32),
        b_start=start + length,
        b_length=np.zeros(len(length), dtype=np.int32),
        label=np.full(len(length), NO_LABEL, dtype=np.int8),
    )

"""The content of sentence pairs, before special tokens and masking: what a rank reads from its disk, or gets from
another rank that has it on its own. A single text is a pair without a segment B and without a label.

On the wire a pair is its number of ids in A, its label, the ids of A, the ids of B; one pair after another. A single
text is a 0 and its ids. Lengths do not travel: every rank knows them from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.array_utils import first_rows, ranges
from tensor3d.data.masking import SpecialTokens, StoredMasks

SPECIAL_TOKENS, SPECIAL_TOKENS_OF_SINGLE = 3, 2
"""[CLS] and two [SEP] in each pair, one in a single text."""
NO_LABEL = -100
"""Next-sentence label of a single text: the one that cross-entropy ignores, as PyTorch has it."""
_HEADER, _HEADER_OF_SINGLE = 2, 1


class Tokens(NamedTuple):
    """Sequences one after another."""

    ids: NDArray[np.int64]
    """int64 (tokens,)"""
    types: NDArray[np.int64]
    """int64 (tokens,): 0 from [CLS] to the first [SEP], then 1."""
    guessable: NDArray[np.bool_]
    """bool (tokens,): True where no special token stands."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Pairs of segments A and B, one pair after another."""

    a_length: NDArray[np.int64]
    """int64 (pairs,): ids of A."""
    b_length: NDArray[np.int64]
    """int64 (pairs,): ids of B; 0 for a single text."""
    label: NDArray[np.int64]
    """int64 (pairs,): 0 where B follows A, 1 where it was drawn at random, -100 for a single text."""
    ids: NDArray[np.int64]
    """int64 (ids,): A and B of the first pair, A and B of the second, and so on."""
    masks: StoredMasks | None = None
    """What is guessed, where that was decided before. Does not travel."""

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (pairs,): tokens of each pair, the special ones counted."""
        return full_lengths(self.a_length, self.b_length)

    def take(self, chosen: NDArray[np.integer]) -> Segments:
        """The chosen pairs, in their order."""
        text = self.a_length + self.b_length
        masks = self.masks
        if masks is not None:
            counts = masks.counts
            places = ranges(first_rows(counts)[chosen], counts[chosen])
            masks = StoredMasks(places=masks.places[places], seen=masks.seen[places], counts=counts[chosen])
        return Segments(
            a_length=self.a_length[chosen],
            b_length=self.b_length[chosen],
            label=self.label[chosen],
            ids=self.ids[ranges(first_rows(text)[chosen], text[chosen])],
            masks=masks,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Segments]) -> Segments:
        """One after another; all of them with masks, or none."""
        masks = [part.masks for part in parts if part.masks is not None]
        assert len(masks) in (0, len(parts)), "sequences with and without stored masks cannot be mixed"
        return cls(
            a_length=np.concatenate([part.a_length for part in parts]),
            b_length=np.concatenate([part.b_length for part in parts]),
            label=np.concatenate([part.label for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            masks=StoredMasks(*map(np.concatenate, zip(*masks, strict=True))) if masks else None,
        )

    def check(self, vocab_size: int) -> None:
        """Raises ValueError for an id outside the vocabulary."""
        for ids in (self.ids,) if self.masks is None else (self.ids, self.masks.seen):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                wrong = ids.max() if ids.min() >= 0 else ids.min()
                raise ValueError(
                    f"the data holds the id {wrong}, which a vocabulary of {vocab_size} does not have; it was prepared "
                    "with another tokenizer, or a file is damaged."
                )

    def tokens(self, special: SpecialTokens) -> Tokens:
        """`[CLS] A [SEP] B [SEP]` of every pair, `[CLS] A [SEP]` of a single text, before masking.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        self.check(special.vocab_size)
        lengths = self.lengths
        first = first_rows(lengths)
        last_of_a, last = first + self.a_length + 1, first + lengths - 1
        guessable = np.ones(int(np.sum(lengths)), dtype=np.bool_)
        guessable[first] = guessable[last_of_a] = guessable[last] = False
        ids = np.full(len(guessable), special.sep, dtype=np.int64)
        ids[first] = special.cls
        ids[guessable] = self.ids
        types = np.zeros_like(ids)
        types[ranges(last_of_a + 1, last - last_of_a)] = 1
        return Tokens(ids=ids, types=types, guessable=guessable)

    def encode(self, kind: np.dtype[np.generic]) -> NDArray[np.generic]:
        """The pairs on the wire, as whole numbers of a type that holds every id and length."""
        sizes = encoded_sizes(self.lengths)
        first = first_rows(sizes)
        single = self.b_length == 0
        header = np.where(single, _HEADER_OF_SINGLE, _HEADER)
        flat = np.empty(int(np.sum(sizes)), dtype=kind)
        flat[first] = np.where(single, 0, self.a_length)
        flat[first[~single] + 1] = self.label[~single]
        flat[ranges(first + header, sizes - header)] = self.ids
        return flat

    @classmethod
    def decode(cls, flat: NDArray[np.generic], lengths: NDArray[np.integer]) -> Segments:
        """Undoes `encode`, for pairs of these lengths."""
        sizes = encoded_sizes(lengths)
        first = first_rows(sizes)
        begin = flat[first].astype(np.int64)
        single = begin == 0
        header = np.where(single, _HEADER_OF_SINGLE, _HEADER)
        a_length = np.where(single, sizes - header, begin)
        label = np.full(len(first), NO_LABEL, dtype=np.int64)
        label[~single] = flat[first[~single] + 1]
        return cls(
            a_length=a_length,
            b_length=sizes - header - a_length,
            label=label,
            ids=flat[ranges(first + header, sizes - header)].astype(np.int64),
        )


def full_lengths(a_length: NDArray[np.integer], b_length: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (pairs,): tokens of pairs and single texts (those without a B), the special ones counted."""
    special = np.where(b_length == 0, SPECIAL_TOKENS_OF_SINGLE, SPECIAL_TOKENS)
    return a_length.astype(np.int64) + b_length + special


def encoded_sizes(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (pairs,): numbers on the wire of pairs or single texts of these lengths: one fewer than their tokens."""
    return np.asarray(lengths, dtype=np.int64) - SPECIAL_TOKENS + _HEADER

"""The content of sentence pairs, before special tokens and masking: what a rank reads from its disk, or gets from
another rank that has it on its own.

On the wire a pair is its number of ids in A, its label, the ids of A, the ids of B; one pair after another. Lengths of
pairs do not travel: every rank knows them from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.ragged import first_rows, ranges
from tensor3d.data.special import SpecialTokens

SPECIAL_TOKENS = 3
"""[CLS] and two [SEP] in each pair."""
_HEADER = 2


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
    """int64 (pairs,): ids of B."""
    label: NDArray[np.int64]
    """int64 (pairs,): 0 where B follows A, 1 where it was drawn at random."""
    ids: NDArray[np.int64]
    """int64 (ids,): A and B of the first pair, A and B of the second, and so on."""

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (pairs,): tokens of each pair, the special ones counted."""
        return self.a_length + self.b_length + SPECIAL_TOKENS

    def take(self, chosen: NDArray[np.integer]) -> Segments:
        """The chosen pairs, in their order."""
        text = self.a_length + self.b_length
        return Segments(
            a_length=self.a_length[chosen],
            b_length=self.b_length[chosen],
            label=self.label[chosen],
            ids=self.ids[ranges(first_rows(text)[chosen], text[chosen])],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Segments]) -> Segments:
        return cls(
            a_length=np.concatenate([part.a_length for part in parts]),
            b_length=np.concatenate([part.b_length for part in parts]),
            label=np.concatenate([part.label for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
        )

    def check(self, vocab_size: int) -> None:
        """Raises ValueError for an id outside the vocabulary."""
        if len(self.ids) and not 0 <= self.ids.min() <= self.ids.max() < vocab_size:
            wrong = self.ids.max() if self.ids.min() >= 0 else self.ids.min()
            raise ValueError(
                f"the data holds the id {wrong}, which a vocabulary of {vocab_size} does not have; it was prepared "
                "with another tokenizer."
            )

    def tokens(self, special: SpecialTokens) -> Tokens:
        """`[CLS] A [SEP] B [SEP]` of every pair, before masking.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        self.check(special.vocab_size)
        first = first_rows(self.lengths)
        last_of_a = first + self.a_length + 1
        guessable = np.ones(int(np.sum(self.lengths)), dtype=np.bool_)
        guessable[first] = guessable[last_of_a] = guessable[last_of_a + self.b_length + 1] = False
        ids = np.full(len(guessable), special.sep, dtype=np.int64)
        ids[first] = special.cls
        ids[guessable] = self.ids
        types = np.zeros_like(ids)
        types[ranges(last_of_a + 1, self.b_length + 1)] = 1
        return Tokens(ids=ids, types=types, guessable=guessable)

    def encode(self, kind: np.dtype[np.generic]) -> NDArray[np.generic]:
        """The pairs on the wire, as whole numbers of a type that holds every id and length."""
        sizes = encoded_sizes(self.lengths)
        first = first_rows(sizes)
        flat = np.empty(int(np.sum(sizes)), dtype=kind)
        flat[first], flat[first + 1] = self.a_length, self.label
        flat[ranges(first + _HEADER, sizes - _HEADER)] = self.ids
        return flat

    @classmethod
    def decode(cls, flat: NDArray[np.generic], lengths: NDArray[np.integer]) -> Segments:
        """Undoes `encode`, for pairs of these lengths."""
        sizes = encoded_sizes(lengths)
        first = first_rows(sizes)
        a_length = flat[first].astype(np.int64)
        return cls(
            a_length=a_length,
            b_length=np.asarray(lengths, dtype=np.int64) - SPECIAL_TOKENS - a_length,
            label=flat[first + 1].astype(np.int64),
            ids=flat[ranges(first + _HEADER, sizes - _HEADER)].astype(np.int64),
        )


def encoded_sizes(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (pairs,): numbers on the wire of pairs of these lengths."""
    return np.asarray(lengths, dtype=np.int64) - SPECIAL_TOKENS + _HEADER

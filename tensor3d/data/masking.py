"""Which tokens the model has to guess, drawn anew in every epoch (Devlin et al., 2019, section 3.1, task 1).

Chance is a function of (seed, epoch, sequence, position), not of what was drawn before: any rank can mask any sequence
alone, and all sequences of a batch are masked in a few array operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.array_utils import first_rows, random_bits, ranges
from tensor3d.ops.seeds import mix


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Size of the vocabulary and its special ids.

    Raises:
        ValueError: an id outside the vocabulary, two equal ids, or no id left for text.
    """

    vocab_size: int
    pad: int
    cls: int
    sep: int
    mask: int

    def __post_init__(self) -> None:
        ids = {"pad": self.pad, "cls": self.cls, "sep": self.sep, "mask": self.mask}
        for name, value in ids.items():
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} must be an id below the vocabulary's size of {self.vocab_size}. Got {value}.")
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"the special tokens need different ids. Got {ids}.")
        if self.vocab_size <= len(ids):
            raise ValueError(
                f"a vocabulary of {self.vocab_size} has no id left for text; it needs at least {len(ids) + 1}."
            )

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """int64 (vocab_size - 4,): every other id, ascending."""
        return np.setdiff1d(np.arange(self.vocab_size), [self.pad, self.cls, self.sep, self.mask])


# ----------------------------------------------------------------------------------------------------------------------
# Whole words to guess, instead of single tokens (whole-word masking, an addition of 2019 to BERT's repository).
#
# How many tokens of a sequence are guessed stays a function of its length, since packing counts on it: words are taken
# in random order as long as they fit, and where no word fits what is left, a part of one is taken.
#
# What a piece says of words depends on the tokenizer: a mark may stand where a word begins or where one ends, and
# neither marks nor letters go on behind punctuation. Two bits of each piece say all of it.

GOES_ON, ENDS = 1, 2
"""Bits of a piece: it goes on with the word of the piece before; no piece goes on with its word. False and True are 0
and `GOES_ON`, for vocabularies of which no piece needs the second."""


def word_rows(
    ids: NDArray[np.int64], candidates: NDArray[np.int64], continuations: NDArray[np.generic]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 (words,), int64 (words,): first row and tokens of each word. Its rows follow one another; a word ends where
    a special token stands, also if what comes then is a continuation.

    Args:
        ids: int64 (tokens,).
        candidates: int64 (candidates,): rows that hold text, ascending.
        continuations: bool or uint8 (vocab_size,): `GOES_ON` and `ENDS` of each piece.
    """
    bits = continuations[ids[candidates]].astype(np.uint8)
    begins = bits & GOES_ON == 0
    begins[:1] = True
    begins[1:] |= (bits[:-1] & ENDS != 0) | (np.diff(candidates) > 1)
    first = np.flatnonzero(begins)
    return candidates[first], np.diff(first, append=len(candidates))


def choose_runs(
    row: NDArray[np.int64],
    size: NDArray[np.int64],
    owner: NDArray[np.int64],
    wanted: NDArray[np.int64],
    chance: Callable[[NDArray[np.int64]], NDArray[np.uint64]],
) -> NDArray[np.int64]:
    """int64 (sum of wanted,): rows to guess, exactly `wanted` of each sequence; every sequence has as many in words.

    At most one word of a sequence is taken in part, its first tokens, and only if no other word would still fit.

    Args:
        row, size: int64 (words,): first row and rows of each word, or of whatever is guessed together.
        owner: int64 (tokens,): sequence of each row.
        wanted: int64 (sequences,).
        chance: random bits for rows; those of a word's first row decide when its turn is.
    """
    turns = np.lexsort((chance(row), owner[row]))
    row, size = row[turns], size[turns]
    of = owner[row]
    words = np.bincount(of, minlength=len(wanted))
    begin = first_rows(words)
    end = begin + words
    # First all words up to the one with which a sequence would have too much, ...
    before = first_rows(size)
    so_far = before + size - before[np.minimum(begin, len(size) - 1)][of]
    fits = so_far <= wanted[of]
    taken = np.where(fits, size, 0)
    left = wanted - np.bincount(of, weights=taken, minlength=len(wanted)).astype(np.int64)
    passed_over = begin + np.bincount(of[fits], minlength=len(wanted))
    # ... then, word by word in all sequences at once, those that fit what is left, ...
    at = passed_over + 1
    active = np.flatnonzero((left > 0) & (at < end))
    while len(active):
        word = at[active]
        fit = size[word] <= left[active]
        taken[word[fit]] = size[word[fit]]
        left[active[fit]] -= size[word[fit]]
        at[active] += 1
        active = active[(left[active] > 0) & (at[active] < end[active])]
    # ... and at last a part of the first word that was too long.
    short = np.flatnonzero(left > 0)
    taken[passed_over[short]] = left[short]
    return ranges(row, taken)


# ----------------------------------------------------------------------------------------------------------------------
# Spans to guess (Joshi et al. 2020, SpanBERT, arXiv 1907.10529, section 3.1): runs of words, or of tokens, that are
# guessed together and replaced alike. Their lengths are geometric, up to a largest. There a span begins at a random
# word until enough is masked; here all text is cut into spans of such lengths, and some of these are taken, as words
# are.

_SPAN, _LONGEST_SPAN = 0.2, 10
_LENGTHS = _SPAN * (1 - _SPAN) ** np.arange(_LONGEST_SPAN)
_UP_TO = np.cumsum(_LENGTHS / _LENGTHS.sum())
"""Chance that a span has 1, up to 2, ..., up to 10 words: 3.8 on average."""


def span_rows(
    row: NDArray[np.int64], size: NDArray[np.int64], owner: NDArray[np.int64], chance: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 (spans,), int64 (spans,): first row and rows of each span. Its words follow one another in a sequence and
    have no special token between them; the last one before a gap is cut there.

    Args:
        row, size: int64 (words,): first row and rows of each word, ascending.
        owner: int64 (tokens,): sequence of each row.
        chance: uint64 (words,): random bits.
    """
    gap = np.ones(len(row), dtype=np.bool_)
    gap[1:] = (row[1:] != row[:-1] + size[:-1]) | (owner[row[1:]] != owner[row[:-1]])
    first = np.flatnonzero(gap)
    words = np.diff(first, append=len(row))
    # Word n behind a gap has the length of the n-th span there: more than can be needed.
    length = np.minimum(np.searchsorted(_UP_TO, _share(chance), side="right"), _LONGEST_SPAN - 1) + 1
    ends = np.cumsum(length)
    ends -= np.repeat(ends[first] - length[first], words)
    begins = gap.copy()
    inside = ends < np.repeat(words, words)
    begins[np.repeat(first, words)[inside] + ends[inside]] = True
    spans = np.flatnonzero(begins)
    return row[spans], np.add.reduceat(size, spans) if len(spans) else size


def _share(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Random bits as numbers from 0 to below 1."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


# --- Which tokens the model has to guess, drawn anew in every epoch ---------------------------------------------------

MASKED_SHARE = 0.15
"""Share of a sequence's tokens that are guessed, as BERT has it."""
_LARGEST_SHARE = 0.8  # the most that was tried (Wettig et al. 2023, arXiv 2202.08005)
_STREAM = 3
"""Keeps the chance of masking apart from that of pairs and packs."""
_SPANS, _DRAWS = 1, 2
"""And the lengths of spans, and what a model draws in masked places, apart from what is guessed."""


@dataclass(frozen=True, kw_only=True)
class MaskingRules:
    """How much is guessed, and what the model sees in its place. The defaults are BERT's.

    Raises:
        ValueError: a share out of range, or no step.
    """

    share: float = MASKED_SHARE
    """Share of a sequence's tokens that are guessed, the special ones counted, which never are; at most 0.8."""
    end_share: float | None = None
    """That of the last of `steps` steps: in between it goes there in a straight line. None: it stays."""
    steps: int = 1
    """Of the run."""
    mask_replace: float = 0.8
    """Share of the guessed tokens that become [MASK]."""
    random_replace: float = 0.1
    """Share of the guessed tokens that become another token. The rest stays as it is."""
    spans: bool = False
    """Runs of tokens, or of words where these are known, are guessed together and replaced alike (`span_rows`)."""

    def __post_init__(self) -> None:
        for name in ("share", "end_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _LARGEST_SHARE:
                raise ValueError(f"the masked {name} must be above 0 and at most {_LARGEST_SHARE}. Got {value}.")
        if not (self.mask_replace >= 0 and self.random_replace >= 0 and self.mask_replace + self.random_replace <= 1):
            raise ValueError(
                "mask_replace and random_replace are shares of the guessed tokens, at least 0 and at most 1 together. "
                f"Got {self.mask_replace} and {self.random_replace}."
            )
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1. Got {self.steps}.")

    def at(self, step: int) -> float:
        """The share in a step, counted from 0; behind the last one it stays."""
        if self.end_share is None:
            return self.share
        done = min(1.0, step / max(1, self.steps - 1))
        return (1 - done) * self.share + done * self.end_share

    @property
    def end(self) -> MaskingRules:
        """With the share of the last step from the start: what all evaluations of a run are made with."""
        return self if self.end_share is None else replace(self, share=self.end_share, end_share=None)

    @property
    def most(self) -> float:
        """The largest share of the run, for which packs have room."""
        return max(self.share, self.share if self.end_share is None else self.end_share)

    @property
    def mean(self) -> float:
        """Over the steps of the run."""
        return (self.share + (self.share if self.end_share is None else self.end_share)) / 2


_BERT = MaskingRules()


def masked_count(length: int, share: float = MASKED_SHARE) -> int:
    """Positions guessed in a sequence of `length` tokens, special ones counted."""
    return int(masked_counts(np.array([length]), share)[0])


def masked_counts(lengths: NDArray[np.integer], share: float = MASKED_SHARE) -> NDArray[np.int64]:
    """int64 (sequences,): positions guessed in sequences of these lengths, one at least. A function of the length
    alone, so that packing can count on it: never more than a pair of this length has text."""
    return np.maximum(1, np.minimum(np.rint(share * lengths), np.subtract(lengths, 3))).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Masked:
    """Tokens after masking."""

    ids: NDArray[np.int64]
    """int64 (tokens,): what the model sees."""
    rows: NDArray[np.int64]
    """int64 (masked,): the rows to guess, ascending."""
    labels: NDArray[np.int64]
    """int64 (masked,): what stood there."""


def mask_tokens(
    ids: NDArray[np.int64],
    guessable: NDArray[np.bool_],
    lengths: NDArray[np.integer],
    *,
    sequences: NDArray[np.integer],
    special: SpecialTokens,
    seed: int,
    epoch: int,
    continuations: NDArray[np.generic] | None = None,
    rules: MaskingRules = _BERT,
    step: int = 0,
) -> Masked:
    """Chooses `masked_count(length, rules.at(step))` rows of each sequence; by default 80 % become [MASK], 10 % another
    token, 10 % stay.

    Args:
        ids: int64 (tokens,), sequences one after another.
        guessable: bool (tokens,), False where a special token stands.
        lengths: (sequences,) tokens of each sequence.
        sequences: (sequences,) number of each sequence in the epoch.
        special: the replacing token is any but these.
        continuations: bool or uint8 (vocab_size,), `GOES_ON` and `ENDS` of each piece; words are then chosen whole
            (see `choose_runs`). None: single tokens.
        rules: how much is guessed, and what becomes of it.
        step: of the run, where the share changes with it. A lower share takes fewer of the same tokens, but for whole
            words.

    Raises:
        ValueError: a sequence has fewer tokens to guess from than it must give.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = ranges(np.zeros_like(lengths), lengths)
    key = mix(seed, epoch, _STREAM)

    candidates = np.flatnonzero(guessable)
    available = np.bincount(owner[candidates], minlength=len(lengths))
    wanted = masked_counts(lengths, rules.at(step))
    if (available < wanted).any():
        short = int(np.argmax(available < wanted))
        raise ValueError(
            f"sequence {sequences[short]} has {available[short]} tokens of text and {lengths[short]} in all, "
            f"of which {wanted[short]} must be guessed; it needs more text."
        )

    def chance(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        return random_bits(key, sequences[owner[rows]], position[rows], draw=0)

    runs = None
    if continuations is not None:
        runs = word_rows(ids, candidates, continuations)
    if rules.spans:
        row, size = (candidates, np.ones_like(candidates)) if runs is None else runs
        runs = span_rows(row, size, owner, random_bits(mix(key, _SPANS), sequences[owner[row]], position[row]))
    decides = np.arange(len(ids))  # which row says what becomes of a row
    if runs is None:
        # Within each sequence the candidates are put in random order, and the first few are taken.
        candidates = candidates[np.lexsort((chance(candidates), owner[candidates]))]
        rows = np.sort(candidates[ranges(first_rows(available), wanted)])
    else:
        rows = np.sort(choose_runs(*runs, owner, wanted, chance))
    if rules.spans and runs is not None:
        decides[candidates] = np.repeat(*runs)

    number, place = sequences[owner[rows]], position[rows]
    fate = _share(random_bits(key, number, position[decides[rows]], draw=1))
    other = special.ordinary[random_bits(key, number, place, draw=2) % np.uint64(len(special.ordinary))]
    labels = ids[rows]
    seen = ids.copy()
    seen[rows] = np.where(
        fate < rules.mask_replace,
        special.mask,
        np.where(fate < rules.mask_replace + rules.random_replace, other, labels),
    )
    return Masked(ids=seen, rows=rows, labels=labels)


def draws_at(
    rows: NDArray[np.int64],
    lengths: NDArray[np.integer],
    *,
    sequences: NDArray[np.integer],
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    """int64 (rows,): 64 random bits for each of these rows, for a model that draws a token there.

    Args:
        rows: int64 (rows,), of sequences one after another.
        lengths: (sequences,) tokens of each sequence.
        sequences: (sequences,) number of each sequence in the epoch.
    """
    ends = np.cumsum(lengths)
    owner = np.searchsorted(ends, rows, side="right")
    place = rows - (ends - lengths)[owner]
    return random_bits(mix(seed, epoch, _STREAM, _DRAWS), sequences[owner], place).view(np.int64)


class StoredMasks(NamedTuple):
    """What is guessed in sequences that were masked once and for all."""

    places: NDArray[np.int64]
    """int64 (masked,): place of each in its sequence, ascending."""
    seen: NDArray[np.int64]
    """int64 (masked,): what the model sees there."""
    counts: NDArray[np.int64]
    """int64 (sequences,): how many of each."""

    @classmethod
    def of(cls, masked: Masked, lengths: NDArray[np.integer]) -> StoredMasks:
        ends = np.searchsorted(masked.rows, np.cumsum(lengths))
        counts = np.diff(ends, prepend=0).astype(np.int64)
        first = np.repeat(first_rows(lengths), counts)
        return cls(places=masked.rows - first, seen=masked.ids[masked.rows], counts=counts)

    def apply(self, ids: NDArray[np.int64], lengths: NDArray[np.integer]) -> Masked:
        """Masks sequences as it was stored.

        Args:
            ids: int64 (tokens,), the sequences one after another.
            lengths: (sequences,) tokens of each.
        """
        rows = self.places + np.repeat(first_rows(lengths), self.counts)
        seen = ids.copy()
        seen[rows] = self.seen
        return Masked(ids=seen, rows=rows, labels=ids[rows])

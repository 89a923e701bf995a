"""Which tokens the model has to guess, drawn anew in every epoch (Devlin et al., 2019, section 3.1, task 1).

Chance is a function of (seed, epoch, sequence, position), not of what was drawn before: any rank can mask any sequence
alone, and all sequences of a batch are masked in a few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.ragged import first_rows, ranges
from tensor3d.data.special import SpecialTokens
from tensor3d.seeds import mix

MASKED_SHARE = 0.15
"""Share of a sequence's tokens that are guessed."""
_STREAM = 3
"""Keeps the chance of masking apart from that of pairs and packs."""


def masked_count(length: int) -> int:
    """Positions guessed in a sequence of `length` tokens, special ones counted."""
    return max(1, round(MASKED_SHARE * length))


def masked_counts(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (sequences,): `masked_count` of each length."""
    return np.maximum(1, np.rint(MASKED_SHARE * lengths)).astype(np.int64)


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
) -> Masked:
    """Chooses `masked_count(length)` rows of each sequence; 80 % become [MASK], 10 % another token, 10 % stay.

    Args:
        ids: int64 (tokens,), sequences one after another.
        guessable: bool (tokens,), False where a special token stands.
        lengths: (sequences,) tokens of each sequence.
        sequences: (sequences,) number of each sequence in the epoch.
        special: the replacing token is any but these.

    Raises:
        ValueError: a sequence has fewer tokens to guess from than it must give.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = ranges(np.zeros_like(lengths), lengths)
    key = mix(seed, epoch, _STREAM)

    # Within each sequence the candidates are put in random order, and the first few are taken.
    candidates = np.flatnonzero(guessable)
    order = _random_bits(key, sequences[owner[candidates]], position[candidates], draw=0)
    candidates = candidates[np.lexsort((order, owner[candidates]))]
    available = np.bincount(owner[candidates], minlength=len(lengths))
    wanted = masked_counts(lengths)
    if (available < wanted).any():
        short = int(np.argmax(available < wanted))
        raise ValueError(
            f"sequence {sequences[short]} has {available[short]} tokens of text and {lengths[short]} in all, "
            f"of which {wanted[short]} must be guessed; it needs more text."
        )
    rows = np.sort(candidates[ranges(first_rows(available), wanted)])

    number, place = sequences[owner[rows]], position[rows]
    fate = _random_bits(key, number, place, draw=1) >> np.uint64(11)
    fate = fate.astype(np.float64) * 2.0**-53
    other = special.ordinary[_random_bits(key, number, place, draw=2) % np.uint64(len(special.ordinary))]
    labels = ids[rows]
    seen = ids.copy()
    seen[rows] = np.where(fate < 0.8, special.mask, np.where(fate < 0.9, other, labels))
    return Masked(ids=seen, rows=rows, labels=labels)


def _random_bits(
    key: int, sequence: NDArray[np.integer], position: NDArray[np.integer], *, draw: int
) -> NDArray[np.uint64]:
    """uint64 (n,): 64 random bits for each (sequence, position, draw).

    Every sequence has its own SplitMix64 stream (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number
    generators"), which can be read at any place because its state is a counter.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    stream = _scramble(np.uint64(key) + golden * (sequence.astype(np.uint64) + np.uint64(1)))
    place = np.uint64(3) * position.astype(np.uint64) + np.uint64(draw + 1)
    return _scramble(stream + golden * place)


def _scramble(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64: every bit of the result depends on every bit of the argument."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))

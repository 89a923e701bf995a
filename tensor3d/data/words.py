"""Whole words to guess, instead of single tokens (whole-word masking, an addition of 2019 to BERT's repository).

How many tokens of a sequence are guessed stays a function of its length, since packing counts on it: words are taken in
random order as long as they fit, and where no word fits what is left, a part of one is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.ragged import first_rows, ranges


def word_rows(
    ids: NDArray[np.int64], candidates: NDArray[np.int64], continuations: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 (words,), int64 (words,): first row and tokens of each word. Its rows follow one another; a word ends where
    a special token stands, also if what comes then is a continuation.

    Args:
        ids: int64 (tokens,).
        candidates: int64 (candidates,): rows that hold text, ascending.
        continuations: bool (vocab_size,): True for a piece that goes on with the word of the piece before.
    """
    begins = ~continuations[ids[candidates]]
    begins[:1] = True
    begins[1:] |= np.diff(candidates) > 1
    first = np.flatnonzero(begins)
    return candidates[first], np.diff(first, append=len(candidates))


def choose_words(
    ids: NDArray[np.int64],
    candidates: NDArray[np.int64],
    owner: NDArray[np.int64],
    wanted: NDArray[np.int64],
    continuations: NDArray[np.bool_],
    chance: Callable[[NDArray[np.int64]], NDArray[np.uint64]],
) -> NDArray[np.int64]:
    """int64 (sum of wanted,): rows to guess, exactly `wanted` of each sequence; every sequence has as many candidates.

    At most one word of a sequence is taken in part, its first tokens, and only if no other word would still fit.

    Args:
        ids, candidates, continuations: see `word_rows`.
        owner: int64 (tokens,): sequence of each row.
        wanted: int64 (sequences,).
        chance: random bits for rows; those of a word's first row decide when its turn is.
    """
    row, size = word_rows(ids, candidates, continuations)
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

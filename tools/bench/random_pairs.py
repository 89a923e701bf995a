"""Sentence pairs of random ids whose lengths follow a histogram: training data of a known shape, without a corpus."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import SpecialTokens
from tensor3d.data.segments import SPECIAL_TOKENS, Segments
from tensor3d.seeds import mix

SHORTEST = SPECIAL_TOKENS + 2
"""Tokens of the shortest pair: [CLS] A [SEP] B [SEP] with one token in each segment."""
_ORDER_STREAM, _CONTENT_STREAM = 7, 8


class RandomPairs:
    """A `Source` of one shard. Every epoch has the same lengths, those of the histogram as nearly as whole numbers can
    be; their order and all ids are drawn anew.

    Args:
        histogram: whole numbers (lengths,); entry `i` is the weight of length `i`. Lengths below `SHORTEST`, which no
            pair has, count as `SHORTEST`.
        sequences: pairs of an epoch.
        special: ids are drawn from the vocabulary without these.
        seed: everything that is drawn depends on it and on the epoch.

    Raises:
        ValueError: an empty histogram, a negative entry, no sequence at all or a negative seed.
    """

    def __init__(self, histogram: NDArray[np.integer], sequences: int, *, special: SpecialTokens, seed: int) -> None:
        histogram = np.asarray(histogram)
        if histogram.ndim != 1 or not (histogram > 0).any() or (histogram < 0).any():
            raise ValueError(f"a histogram is a row of weights, at least 0, not all of them 0. Got {histogram}.")
        if sequences < 1 or seed < 0:
            raise ValueError(f"sequences must be at least 1 and seed at least 0. Got {sequences} and {seed}.")
        # Evenly spaced quantiles: each length comes as often as it should, give or take one pair.
        cumulated = np.cumsum(raised(histogram), dtype=np.float64)
        places = (np.arange(sequences) + 0.5) * (cumulated[-1] / sequences)
        self._lengths = np.searchsorted(cumulated, places, side="right").astype(np.int32)
        self._special, self._seed = special, seed

    @property
    def shards(self) -> int:
        return 1

    def confirm(self, epoch: int, digest: str) -> None:
        """Every rank draws the same, and asks nobody."""

    def draw(self, epoch: int) -> RandomDrawing:
        """The pairs of an epoch."""
        rng = np.random.default_rng(mix(self._seed, epoch, _ORDER_STREAM))
        return RandomDrawing(rng.permutation(self._lengths), self._special, mix(self._seed, epoch, _CONTENT_STREAM))


class RandomDrawing:
    """A `Drawing`. The content of a pair is a function of the key and of its number, whatever else is read."""

    def __init__(self, lengths: NDArray[np.int32], special: SpecialTokens, key: int) -> None:
        self.lengths = lengths
        self.offsets = np.array([0, len(lengths)], dtype=np.int64)
        self._special, self._key = special, key

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        text = self.lengths[chosen].astype(np.int64) - SPECIAL_TOKENS
        a_length, label = np.empty_like(text), np.empty_like(text)
        ids = [np.empty(0, dtype=np.int64)]
        for place, (number, size) in enumerate(zip(chosen.tolist(), text.tolist(), strict=True)):
            rng = np.random.default_rng((self._key, number))
            a_length[place], label[place] = rng.integers(1, size), rng.integers(2)
            ids.append(self._special.ordinary[rng.integers(len(self._special.ordinary), size=size)])
        return Segments(a_length=a_length, b_length=text - a_length, label=label, ids=np.concatenate(ids))


def raised(histogram: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (lengths,): the histogram with all that is shorter than any pair counted as the shortest."""
    result = np.zeros(max(len(histogram), SHORTEST + 1), dtype=np.int64)
    result[: len(histogram)] = histogram
    result[SHORTEST] += result[:SHORTEST].sum()
    result[:SHORTEST] = 0
    return result


def exponential_histogram(longest: int) -> NDArray[np.int64]:
    """int64 (longest + 1,): lengths with weights exp(-length / (5/8 longest)), all the longer ones cut to `longest`.

    The mean is about half of the longest, and a fifth has full length, as with pairs of whole sentences from an
    encyclopedia.

    Raises:
        ValueError: `longest` is shorter than any pair.
    """
    if longest < SHORTEST:
        raise ValueError(f"the longest pair needs at least {SHORTEST} tokens. Got {longest}.")
    scale = 5 / 8 * longest
    beyond = np.exp(-np.arange(SHORTEST, longest + 1) / scale)  # the share that is at least so long, but for a factor
    weights = np.append(beyond[:-1] - beyond[1:], beyond[-1])
    return np.concatenate([np.zeros(SHORTEST), np.rint(weights * 1e9)]).astype(np.int64)

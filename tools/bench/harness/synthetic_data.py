"""Sentence pairs of random ids whose lengths follow a histogram: training data of a known shape, without a corpus."""

from __future__ import annotations

import bz2
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tensor3d.data import SpecialTokens
from tensor3d.data.segments import SPECIAL_TOKENS, Segments
from tensor3d.ops.seeds import mix
from tensor3d.packing import LowerBound, PackingPlan
from tools.common.log import progress
from tools.packing.histogram import read_histogram

# --- Random histograms and limits, and what every plan made of them must fulfil ---------------------------------------

_CAPACITIES = (8, 16, 32, 64, 128, 256, 512)
_LARGEST = 10**9


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What a planner is given."""

    histogram: NDArray[np.int64]
    capacity: int
    max_sequences: int | None
    budget: int | None
    costs: NDArray[np.int64] | None


def draw_case(rng: np.random.Generator) -> Case:
    """A capacity of 4 to 512, often a limit on sequences or a budget, and lengths of several shapes."""
    capacity = int(rng.integers(4, rng.choice(_CAPACITIES) + 1))
    max_sequences = None if rng.random() < 0.3 else int(rng.integers(1, 17))
    histogram = np.zeros(capacity + 1, dtype=np.int64)
    total = float(np.exp(rng.uniform(0, np.log(_LARGEST))))
    weights = _weights(capacity, rng)
    histogram[1:] = np.floor(weights / weights.sum() * total)
    # At least one sequence, and always one of the likeliest length.
    histogram[1 + int(weights.argmax())] += 1
    budget, costs = (None, None) if rng.random() < 0.5 else _budget(histogram, capacity, rng)
    return Case(histogram=histogram, capacity=capacity, max_sequences=max_sequences, budget=budget, costs=costs)


def _weights(capacity: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(capacity,): weights of the lengths from 1."""
    lengths = np.arange(1, capacity + 1)
    shape = rng.integers(5)
    if shape == 0:  # many short ones, a peak at full length
        weights = np.exp(-lengths / (capacity * rng.uniform(0.1, 1)))
        weights[-1] += weights.sum() * rng.uniform(0, 0.5)
    elif shape == 1:  # a skewed bell
        weights = np.exp(-((np.log(lengths) - rng.uniform(0, np.log(capacity))) ** 2) / rng.uniform(0.1, 2))
    elif shape == 2:  # a few lengths
        weights = np.zeros(capacity)
        weights[rng.integers(0, capacity, size=rng.integers(1, 9))] = rng.random()
    elif shape == 3:  # a range
        low, high = np.sort(rng.integers(0, capacity, size=2))
        weights = ((lengths > low) & (lengths <= high + 1)).astype(np.float64)
    else:  # noise with gaps
        weights = rng.random(capacity) * (rng.random(capacity) < rng.uniform(0.1, 1))
        weights[rng.integers(capacity)] += 0.1
    return np.asarray(weights, dtype=np.float64)


def _budget(histogram: NDArray[np.int64], capacity: int, rng: np.random.Generator) -> tuple[int, NDArray[np.int64]]:
    """A budget that every single sequence keeps, and costs: a share of the tokens, their square, or any at all."""
    lengths = np.arange(capacity + 1)
    costs = (
        np.maximum(1, np.rint(0.15 * lengths)),
        lengths**2,
        rng.integers(0, capacity, size=capacity + 1),
    )[rng.integers(3)].astype(np.int64)
    dearest = int(costs[np.flatnonzero(histogram)].max())
    return dearest + int(rng.integers(0, dearest + 2)), costs


def faults(plan: PackingPlan, case: Case, bound: LowerBound) -> list[str]:
    """What is wrong with a plan; nothing, it is hoped. Not by the plan's own means, so that it is a check of them too.

    Args:
        bound: packs that no plan of this case can do without.
    """
    found = []
    held = np.zeros_like(case.histogram)
    packs = 0
    for strategy in plan.strategies:
        lengths = np.array(strategy.lengths)
        np.add.at(held, lengths, strategy.repeat)
        packs += strategy.repeat
        found += [f"{problem}: {strategy}" for problem in _pack_faults(lengths, case)]
    if (held != case.histogram).any():
        found.append(f"other sequences than given, at lengths {np.flatnonzero(held != case.histogram).tolist()}")
    if packs != plan.packs:
        found.append(f"{packs} packs, and says {plan.packs}")
    if packs < bound.packs:
        found.append(f"{packs} packs, below the bound of {bound}")
    return found


def _pack_faults(lengths: NDArray[np.int64], case: Case) -> Sequence[str]:
    found = []
    if lengths.sum() > case.capacity:
        found.append("over the capacity")
    if case.max_sequences is not None and len(lengths) > case.max_sequences:
        found.append("too many sequences")
    if case.budget is not None and case.costs is not None and case.costs[lengths].sum() > case.budget:
        found.append("over the budget")
    return found


# --- Text of any size that compresses and tokenises about as prose does: made-up words with natural frequencies -------

WORDS = 50_000
_SYLLABLES = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in ("a", "e", "i", "o", "u", "an", "er")]
_BLOCK = 1 << 22
_HEAD = b"<mediawiki><siteinfo><sitename>Generated</sitename></siteinfo>\n"
_TAIL = b"</mediawiki>\n"


def write_jsonl(path: Path, size: int, seed: int = 0) -> None:
    """JSON lines with title and text, until there are `size` bytes."""
    with path.open("wb") as file, _bar(size) as bar:
        for number, text in enumerate(documents(seed)):
            row = {"id": str(number), "title": f"Document {number}", "text": text}
            bar.update(file.write(json.dumps(row).encode() + b"\n"))
            if file.tell() >= size:
                return


def write_dump(path: Path, size: int, seed: int = 0, pages_a_stream: int = 100) -> None:
    """A MediaWiki dump, bzip2 of several streams, of `size` bytes before compression."""
    with path.open("wb") as file, _bar(size) as bar:
        pages: list[bytes] = [_HEAD]
        written = 0
        for number, text in enumerate(documents(seed)):
            pages.append(_page(number, text))
            bar.update(len(pages[-1]))
            written += len(pages[-1])
            if len(pages) >= pages_a_stream or written >= size:
                file.write(bz2.compress(b"".join(pages)))
                pages = []
            if written >= size:
                break
        file.write(bz2.compress(_TAIL))


def documents(seed: int) -> Iterator[str]:
    """Documents without end: paragraphs of sentences of words, whose frequencies fall with their rank (Zipf's law)."""
    rng = np.random.default_rng(seed)
    words = np.array(_words(rng))
    below = np.cumsum(1.0 / (np.arange(WORDS) + 2.7))
    while True:
        drawn = words[np.searchsorted(below, rng.random(_BLOCK // 8) * below[-1])].tolist()
        place = 0
        while place < len(drawn) - 2000:
            paragraphs = []
            for _ in range(int(rng.integers(2, 9))):
                sentences = []
                for length in rng.integers(6, 34, size=int(rng.integers(2, 8))).tolist():
                    sentences.append(" ".join(drawn[place : place + length]).capitalize() + ".")
                    place += length
                paragraphs.append(" ".join(sentences))
            yield "\n\n".join(paragraphs)


def _words(rng: np.random.Generator) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < WORDS:
        syllables = rng.integers(0, len(_SYLLABLES), size=int(rng.integers(1, 5))).tolist()
        found["".join(_SYLLABLES[syllable] for syllable in syllables)] = None
    return sorted(found, key=len)


def _page(number: int, text: str) -> bytes:
    """With the kinds of markup that a cleaner has to do something about."""
    first, *rest = text.split(" ", 12)
    marked = (
        f"'''{first}''' [[{rest[0]}|{rest[1]}]] {' '.join(rest[2:])}<ref>{rest[0]} {{{{cite web|title={first}}}}}</ref>"
    )
    content = f"{escape(marked)}\n\n== References ==\n[[Category:{first}]]"
    return (
        f"<page><title>Page {number}</title><ns>0</ns><id>{number}</id><revision><id>{number}</id>"
        f'<text xml:space="preserve">{content}</text></revision></page>\n'
    ).encode()


def _bar(size: int) -> tqdm:
    return progress(desc="generating", total=size, unit="B", unit_scale=True)


# --- Sentence pairs of random ids whose lengths follow a histogram ----------------------------------------------------

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
    """A `EpochSamples`. The content of a pair is a function of the key and of its number, whatever else is read."""

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


def lengths_of(histogram: Path | None, longest: int, limit: str) -> tuple[NDArray[np.int64], str]:
    """What `--histogram` asks for, and what to say of it.

    Args:
        histogram: JSON file of counts. None: the formula.
        longest: tokens of the longest sequence that may be.
        limit: what sets it and how to raise it, for the message.

    Raises:
        ValueError: a file that is no histogram, or has longer sequences.
    """
    if histogram is None:
        return exponential_histogram(longest), f"exponential with mean {5 / 8 * longest:g}, cut at {longest}"
    counts = np.trim_zeros(read_histogram(histogram), "b")
    if len(counts) - 1 > longest:
        raise ValueError(
            f"{histogram} has sequences of {len(counts) - 1} tokens, more than {limit}, or take another histogram."
        )
    return counts, str(histogram)

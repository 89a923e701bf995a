"""Sequences of training: their lengths, what padding would cost, and some of them and of their packs to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import SpecialTokens
from tensor3d.data.array_utils import first_rows
from tensor3d.data.sampling import IS_RANDOM
from tensor3d.data.segments import NO_LABEL, Segments
from tensor3d.data.sources import ShardSamples
from tensor3d.packing import PackingPlan, PackPattern
from tools.corpus.inspect.histogram import Histogram
from tools.corpus.inspect.report import Excerpt, Report
from tools.corpus.samples.merge_shards import hint_at_random_pairs
from tools.corpus.tokenizers import Tokenizer

_LISTED = 16
"""Shards that have lines of their own; of more only the extremes are shown."""
_ENDS = 44
"""Characters of both ends of a sequence in a pack."""
_LABELS = {0: "B follows A", 1: "B was drawn at random", NO_LABEL: "a single text"}


class Place(NamedTuple):
    """A sequence."""

    shard: int
    number: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """Sequences in shards, and the plan of their packs."""

    names: tuple[str, ...]
    shards: tuple[ShardSamples | None, ...]
    """None for one that is not on this machine."""
    special: SpecialTokens
    tokenizer: Tokenizer
    max_length: int
    """Tokens of a sequence, at most."""
    lengths: Histogram
    """Of all sequences, also of shards that are not here."""
    plan: PackingPlan

    def describe(self, report: Report, *, samples: int, packs: int, seed: int) -> None:
        """Adds all there is to say of them."""
        rng = np.random.default_rng(seed)
        self._add_shards(report)
        self._add_layout(report)
        report.histograms.append(self.lengths)
        report.excerpts["sequences, drawn at random"] = [self._sample(place) for place in self._places(samples, rng)]
        several = any(len(strategy.lengths) > 1 for strategy in self.plan.strategies)
        which = "those with several sequences" if several else "all, none of which has several sequences"
        report.excerpts[f"packs of {self.plan.capacity} slots, drawn at random from {which}"] = [
            self._pack(strategy, rng) for strategy in self._strategies(packs, rng)
        ]

    def _add_shards(self, report: Report) -> None:
        counts = [None if shard is None else len(shard.lengths) for shard in self.shards]
        here = [count for count in counts if count is not None]
        report.add("sequences", self.lengths.total)
        report.add("tokens of sequences", self.lengths.sum)
        self._add_labels(report)
        report.add("shards", len(counts))
        if len(here) < len(counts):
            report.add("shards on this machine", len(here))
        report.add("sequences of a shard, fewest", min(here))
        report.add("sequences of a shard, most", max(here))
        if 1 < len(counts) <= _LISTED:
            for name, count in zip(self.names, counts, strict=True):
                report.add(f"sequences of {name}", "not here" if count is None else count)

    def _add_labels(self, report: Report) -> None:
        """Of the shards that are here."""
        labels = [shard.labels for shard in self.shards if shard is not None]
        pairs = sum(map(len, labels))
        if pairs:
            random = sum(int(np.count_nonzero(part == IS_RANDOM)) for part in labels)
            report.add("random pairs", random)
            report.add("share of random pairs", round(random / pairs, 4))
            if hint := hint_at_random_pairs(random, pairs):
                report.hints.append(hint)

    def _add_layout(self, report: Report) -> None:
        """Padding every sequence to the longest length, against the packs of the plan."""
        slots = self.lengths.total * self.max_length
        report.add("slots if padded", slots)
        report.add("real tokens if padded", 100 * self.lengths.sum / slots, "%")
        report.add("factor that packing can gain", slots / self.lengths.sum, "(no slot empty)")
        report.add("packs", self.plan.packs)
        report.add("slots of a pack", self.plan.capacity)
        report.add("real tokens in packs", 100 * self.plan.efficiency, "%")
        report.add("factor that the plan gains", slots / (self.plan.packs * self.plan.capacity))
        report.add("sequences of a pack", self.plan.packing_factor, "(packing factor)")

    def _places(self, wanted: int, rng: np.random.Generator) -> list[Place]:
        """Sequences that are here, each as likely as any other."""
        counts = [0 if shard is None else len(shard.lengths) for shard in self.shards]
        ends = np.cumsum(counts)
        chosen = np.sort(rng.choice(int(ends[-1]), min(wanted, int(ends[-1])), replace=False))
        shards = np.searchsorted(ends, chosen, side="right")
        return [
            Place(shard, number - sum(counts[:shard]))
            for shard, number in zip(shards.tolist(), chosen.tolist(), strict=True)
        ]

    def _strategies(self, wanted: int, rng: np.random.Generator) -> list[PackPattern]:
        """Those of random packs, as far as there are any of packs with boundaries in them."""
        several = [strategy for strategy in self.plan.strategies if len(strategy.lengths) > 1]
        strategies = several or self.plan.strategies
        repeats = np.array([strategy.repeat for strategy in strategies])
        chosen = rng.choice(len(repeats), wanted, p=repeats / repeats.sum())
        return [strategies[number] for number in chosen.tolist()]

    def _read(self, place: Place) -> Segments:
        shard = self.shards[place.shard]
        assert shard is not None, "it was found there"
        return shard.segments(np.array([place.number]))

    def _sample(self, place: Place) -> Excerpt:
        segments = self._read(place)
        length, label = int(segments.lengths[0]), int(segments.label[0])
        title = f"{self.names[place.shard]}, sequence {place.number:,}: {length} tokens, {_LABELS[label]}"
        return Excerpt(title, (self._text(segments), *self._guessed(segments)))

    def _text(self, segments: Segments) -> str:
        """`[CLS] A [SEP] B [SEP]`"""
        cut = int(segments.a_length[0])
        cls, sep = self.tokenizer.pieces([self.special.cls, self.special.sep])
        parts = [ids for ids in (segments.ids[:cut], segments.ids[cut:]) if len(ids)]
        return " ".join([cls, *(f"{self.tokenizer.decode(ids.tolist())} {sep}" for ids in parts)])

    def _guessed(self, segments: Segments) -> Iterator[str]:
        """What is guessed, where that is stored."""
        if segments.masks is None:
            return
        masked = segments.masks.apply(segments.tokens(self.special).ids, segments.lengths)
        stood = self.tokenizer.pieces(masked.labels.tolist())
        seen = self.tokenizer.pieces(masked.ids[masked.rows].tolist())
        rows = masked.rows.tolist()
        shown = (
            f"{row} {was} → {'itself' if now == was else now}" for row, was, now in zip(rows, stood, seen, strict=True)
        )
        yield f"guessed: {', '.join(shown)}"

    def _pack(self, strategy: PackPattern, rng: np.random.Generator) -> Excerpt:
        """A pack that the plan makes, filled with sequences of its lengths."""
        capacity, tokens = self.plan.capacity, sum(strategy.lengths)
        sequences = "1 sequence" if len(strategy.lengths) == 1 else f"{len(strategy.lengths)} sequences"
        found = self._of_lengths(strategy.lengths, rng)
        firsts = first_rows(np.array(strategy.lengths))
        lines = [
            f" {first:>5} to {first + length - 1:>5}  {self._ends(place)}"
            for first, length, place in zip(firsts.tolist(), strategy.lengths, found, strict=True)
        ]
        if tokens < capacity:
            lines.append(f" {tokens:>5} to {capacity - 1:>5}  (empty)")
        return Excerpt(
            f"{sequences}, {tokens} tokens, {100 * tokens / capacity:.2f} % full; "
            f"the plan has {strategy.repeat:,} of these lengths",
            tuple(lines),
        )

    def _ends(self, place: Place | None) -> str:
        if place is None:
            return "(in a shard that is not on this machine)"
        text = self._text(self._read(place))
        return text if len(text) <= 2 * _ENDS else f"{text[:_ENDS]} … {text[-_ENDS:]}"

    def _of_lengths(self, lengths: Sequence[int], rng: np.random.Generator) -> list[Place | None]:
        """A sequence of each length, none twice; None where this machine has no more."""
        chosen: dict[int, list[Place]] = {}
        for length in sorted(set(lengths)):
            places = [
                (number, np.flatnonzero(shard.lengths == length))
                for number, shard in enumerate(self.shards)
                if shard is not None
            ]
            chosen[length] = _draw(places, lengths.count(length), rng)
        return [chosen[length].pop() if chosen[length] else None for length in lengths]


def _draw(places: Sequence[tuple[int, NDArray[np.int64]]], wanted: int, rng: np.random.Generator) -> list[Place]:
    """Some of the sequences that each shard has here."""
    ends = np.cumsum([len(found) for _, found in places])
    drawn = rng.choice(int(ends[-1]), min(wanted, int(ends[-1])), replace=False)
    result = []
    for number in drawn.tolist():
        at = int(np.searchsorted(ends, number, side="right"))
        shard, found = places[at]
        result.append(Place(shard, int(found[number - (int(ends[at]) - len(found))])))
    return result

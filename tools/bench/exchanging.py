"""The feed of a training that notes what its exchange of sequences brings and takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tensor3d import Cube
from tensor3d.data import Exchange, ExchangeOptions, Source, SpecialTokens
from tensor3d.data.exchange import Wanted
from tensor3d.data.segments import Segments
from tools.bench.training import Training
from tools.corpus.info import load_corpus
from tools.feed import Feed
from tools.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RankExchange:
    """What one rank did to exchange."""

    rounds: int = 0
    received: int = 0
    """Bytes, from others."""
    seconds: float = 0.0


class MeasuredExchange(Exchange):
    """An exchange that notes what its rounds brought and took."""

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        super().__init__(exchange.near, first=exchange.data_ranks.start, vocab_size=vocab_size)
        self.noted = RankExchange()

    def fetch(self, wanted: Sequence[Wanted]) -> list[Segments]:
        before, start_time = self.near.received_bytes, perf_counter()
        result = super().fetch(wanted)
        self.noted = RankExchange(
            rounds=self.noted.rounds + 1,
            received=self.noted.received + self.near.received_bytes - before,
            seconds=self.noted.seconds + perf_counter() - start_time,
        )
        return result


class MeasuredFeed(Feed):
    """The feed of a training, with a `MeasuredExchange` in the place of its exchange."""

    def __init__(
        self,
        recipe: Recipe,
        cube: Cube,
        source: Source,
        special: SpecialTokens,
        *,
        exchange: Exchange | None = None,
        every: int = 1,
    ) -> None:
        self.measured = None if exchange is None else MeasuredExchange(exchange, special.vocab_size)
        super().__init__(recipe, cube, source, special, exchange=self.measured, every=every)


def corpus_feed(recipe: Recipe, cube: Cube, *, corpus: Path, options: ExchangeOptions | None) -> Feed:
    return MeasuredFeed.of_corpus(recipe, cube, load_corpus(corpus), options)


def exchanged(training: Training) -> RankExchange:
    """What has been exchanged so far; nothing where all shards are read."""
    feed = training.feed
    assert isinstance(feed, MeasuredFeed)
    return RankExchange() if feed.measured is None else feed.measured.noted

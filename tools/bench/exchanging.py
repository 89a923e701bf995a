"""The feed of a training that notes what its exchange of sequences brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensor3d import Cube
from tensor3d.data import ExchangeOptions
from tools.bench.training import Training
from tools.corpus.training import open_corpus
from tools.feed import Feed
from tools.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RankExchange:
    """What one rank did to exchange."""

    rounds: int = 0
    received: int = 0
    """Bytes, from others."""
    seconds: float = 0.0
    """In the background."""


def corpus_feed(recipe: Recipe, cube: Cube, *, corpus: Path, options: ExchangeOptions | None) -> Feed:
    return Feed.of_corpus(recipe, cube, open_corpus(corpus), options)


def exchanged(training: Training) -> RankExchange:
    """What has been exchanged so far; nothing where all shards are read."""
    exchange = training.feed.exchange
    if exchange is None:
        return RankExchange()
    return RankExchange(rounds=exchange.rounds, received=exchange.received_bytes, seconds=exchange.seconds)

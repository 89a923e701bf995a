"""`bench exchange`: what it costs that data ranks read their own shards and exchange sequences."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tensor3d import Cube, CubeShape
from tensor3d.data import ExchangeOptions
from tools.bench.harness.benchmark import Count, Report
from tools.bench.harness.figures import Column, as_json, deal, flat, milliseconds, ratios_of, spread, table
from tools.bench.harness.step_trial import (
    LOSS_TOLERANCE,
    RecipeBenchmark,
    Training,
    TrainingTurn,
    alternate,
    check_cube,
    prepare_here,
    start_trainings,
    timed,
    training_seconds,
)
from tools.corpus.training_corpus import open_corpus
from tools.training.config import TrainConfig
from tools.training.data import TrainData
from tools.training.metrics import StepMetrics

# --- The feed of a training that notes what its exchange of sequences brings ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankExchange:
    """What one rank did to exchange."""

    rounds: int = 0
    received: int = 0
    """Bytes, from others."""
    seconds: float = 0.0
    """In the background."""


def corpus_feed(recipe: TrainConfig, cube: Cube, *, corpus: Path, options: ExchangeOptions | None) -> TrainData:
    return TrainData.of_corpus(recipe, cube, open_corpus(corpus), options)


def exchanged(training: Training) -> RankExchange:
    """What has been exchanged so far; nothing where all shards are read."""
    exchange = training.feed.exchange
    if exchange is None:
        return RankExchange()
    return RankExchange(rounds=exchange.rounds, received=exchange.received_bytes, seconds=exchange.seconds)


# --- `bench exchange` -------------------------------------------------------------------------------------------------

ALL, EXCHANGED = "all shards", "exchange"


@dataclass(frozen=True, kw_only=True)
class ExchangeCommand(RecipeBenchmark):
    """Train on the same packs in two groups, in turns: each rank reads all shards, or its own and exchanges."""

    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 8
    """Copies of the cube, among which sequences are exchanged."""
    shards: int | None = None
    """Of the corpus, a multiple of the data ranks. Default: the recipe's if it has several, else one for each."""
    every: int = 4
    """Steps of which the sequences are exchanged together."""
    within: int | None = None
    """Consecutive data ranks among which sequences move; data.shards and data.groups must allow it. Default: all."""
    steps: int | None = None
    """Steps that are timed, of each group. Default: the fewest that tell, 4 * every in each round."""
    rounds: Count = 4
    """Turns that each group gets; the steps are dealt out over them."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY-SHARDS-shards."""

    @property
    def moves_packs(self) -> bool:
        """Whether packs lie on other ranks where sequences are exchanged, because they must stay within some ranks."""
        return self.within is not None and self.within < self.data_parallel

    @property
    def skip(self) -> int:
        """Steps of a turn that may have been built while the other group had its turn, and two more."""
        return 2 * self.every + 2

    def plan(self) -> tuple[CubeShape, TrainConfig, list[int]]:
        """Cube, recipe and the steps of each round."""
        shape = CubeShape.parse(self.cube, self.data_parallel)
        if shape.data < 2:
            raise ValueError(f"an exchange needs at least two data ranks. Got --data-parallel {shape.data}.")
        data, shards = self.settings.data, self.shards
        if shards is None:
            shards = shape.data if data.shards == 1 else data.shards
        settings = dataclasses.replace(self.settings, data=dataclasses.replace(data, shards=shards))
        options = {"exchange_every": self.every, "exchange_within": self.within}
        check_cube(self.as_training(settings, exchange=True, **options), shape)
        least = 4 * self.every * self.rounds
        if self.steps is not None and self.steps < least:
            raise ValueError(
                f"--steps must be at least 4 * every={self.every} * rounds={self.rounds} = {least}: in a shorter turn "
                f"most of what is trained on was built before it. Got {self.steps}."
            )
        return shape, settings, deal(self.steps or least, self.rounds)

    def measure(self, plan: tuple[CubeShape, TrainConfig, list[int]]) -> Report:
        shape, settings, counts = plan
        reading = self.as_training(settings, corpus=self.corpus)
        prepare_here(reading)
        results, difference = measure(self, shape, settings, reading.corpus, counts)
        well, verdict = judge(difference, settings, self.moves_packs)
        lines = [
            f"{self.recipe} on {shape}, {settings.data.shards} shards, {shape.ranks} processes",
            f"{sum(counts)} steps of each group in {len(counts)} rounds, after {self.skip} at the begin of each",
            *table(results),
            waiting(*results),
            verdict,
        ]
        content = {
            "every": self.every,
            "within": self.within,
            "shards": settings.data.shards,
            "loss_difference": difference,
            "losses_agree": well,
            "results": as_json(results),
        }
        fault = "the groups do not compute the same, which is a bug of the exchange."
        return Report(lines=lines, content=content, faults=[] if well else [fault])


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """One way of reading. Shares of time are of all timed steps together."""

    name: Annotated[str, Column("ranks read")]
    ranks: int
    steps: int
    seconds_median: Annotated[float, milliseconds("step ms")]
    """Of a step: the mean over the ranks."""
    ratio: Annotated[float, Column("ratio", ".3f")]
    """Of the medians of a round, to the ranks that read all; median of the rounds."""
    ratio_range: Annotated[tuple[float, float], Column("by round", ".2f")]
    """The lowest and the highest round."""
    wait_share: Annotated[float, Column("waiting", ".2%")]
    """Share of the time that was spent waiting for data, 0 to 1: mean over the ranks."""
    wait_share_range: Annotated[tuple[float, float], Column("by round", ".2%")]
    """The mean over the ranks, in the lowest and the highest round."""
    wait_share_worst: Annotated[float, Column("worst rank", ".2%")]
    """The same on the rank that waited longest."""
    bytes_per_step: Annotated[float, Column("bytes a step", ",.0f")]
    """That came from other ranks: mean over the ranks."""
    bytes_per_step_worst: Annotated[float, Column("most", ",.0f")]
    """The same on the rank that got most."""
    rounds: Annotated[int, Column("rounds")]
    """Of exchange, from the start to the end."""
    exchange_seconds: Annotated[float, milliseconds("ms a round")]
    """Of a round of exchange, in the background, reading and waiting for peers included: mean over the ranks."""
    seconds: tuple[tuple[float, ...], ...]
    """Every timed step, by round."""


def measure(
    command: ExchangeCommand, shape: CubeShape, settings: TrainConfig, corpus: Path, counts: Sequence[int]
) -> tuple[list[GroupFigures], float]:
    """Both groups, in turns, and the largest relative difference between their losses: of all steps, or of the first
    one where packs lie on other ranks, since rounding then grows from step to step."""
    ways = {ALL: None, EXCHANGED: ExchangeOptions(every=command.every, within=command.within)}
    with ExitStack() as stack:
        feeds = {name: partial(corpus_feed, corpus=corpus, options=options) for name, options in ways.items()}
        makers = {name: partial(Training, recipe=settings, make_feed=feed) for name, feed in feeds.items()}
        groups = start_trainings(shape, makers, stack)
        turns = alternate(groups, counts, skip=command.skip)
        noted = {name: group.call(exchanged) for name, group in groups.items()}
    compared = {name: [[rank[:1] for rank in mine[0]]] if command.moves_packs else mine for name, mine in turns.items()}
    difference = loss_difference(compared[ALL], compared[EXCHANGED])
    kept = {name: timed(mine, command.skip) for name, mine in turns.items()}
    return [figures(name, kept[name], kept[ALL], noted[name], command.every) for name in ways], difference


def loss_difference(mine: Sequence[TrainingTurn], theirs: Sequence[TrainingTurn]) -> float:
    """The largest relative difference between losses of the same step on the same rank; 0.0 if all bits are equal."""
    pairs = [
        (a.loss, b.loss)
        for turn, other in zip(mine, theirs, strict=True)
        for rank, peer in zip(turn, other, strict=True)
        for a, b in zip(rank, peer, strict=True)
    ]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def judge(difference: float, settings: TrainConfig, moved: bool) -> tuple[bool, str]:
    """Whether the groups computed the same, and in words.

    Args:
        moved: packs lie on other ranks in one group. Sums are then rounded differently, and with dropout, of which each
            rank draws its own, there is no telling.
    """
    if not moved:
        words = "equal bit for bit" if difference == 0 else f"NOT equal: they differ by up to {difference:.1e}"
        return difference == 0, f"losses of all steps are {words}"
    if settings.model.has_dropout:
        return True, "losses are not compared: packs lie on other ranks, where dropout differs (0 compares them)"
    well = difference <= LOSS_TOLERANCE
    words = "equal" if well else f"NOT equal, allowed is {LOSS_TOLERANCE:g}"
    return well, f"largest relative difference of first losses: {difference:.1e} ({words}); packs lie on other ranks"


def figures(
    name: str, turns: Sequence[TrainingTurn], reading: Sequence[TrainingTurn], noted: Sequence[RankExchange], every: int
) -> GroupFigures:
    """The figures of a group.

    Args:
        turns: its turns, by round, without what does not count.
        reading: turns of the group whose ranks read all shards, in the same rounds.
        noted: what each rank exchanged.
        every: steps of a round of exchange.
    """
    rounds, base = ([training_seconds(turn) for turn in each] for each in (turns, reading))
    ratios = ratios_of(rounds, base)
    shares = [[wait_share(rank) for rank in turn] for turn in turns]
    whole = [wait_share([metrics for turn in turns for metrics in turn[rank]]) for rank in range(len(turns[0]))]
    per_step = [rank.received / max(1, rank.rounds * every) for rank in noted]
    means = [statistics.fmean(ranks) for ranks in shares]
    return GroupFigures(
        name=name,
        ranks=len(noted),
        steps=sum(map(len, rounds)),
        seconds_median=statistics.median(flat(rounds)),
        ratio=statistics.median(ratios),
        ratio_range=spread(ratios),
        wait_share=statistics.fmean(whole),
        wait_share_worst=max(whole),
        wait_share_range=spread(means),
        bytes_per_step=statistics.fmean(per_step),
        bytes_per_step_worst=max(per_step),
        rounds=noted[0].rounds,
        exchange_seconds=statistics.fmean(rank.seconds / max(1, rank.rounds) for rank in noted),
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def wait_share(steps: Sequence[StepMetrics]) -> float:
    """Share of the steps' time that a rank waited for data."""
    return sum(metrics.data_wait_seconds for metrics in steps) / sum(metrics.seconds for metrics in steps)


def waiting(reading: GroupFigures, exchanging: GroupFigures) -> str:
    mean = exchanging.wait_share - reading.wait_share
    worst = exchanging.wait_share_worst - reading.wait_share_worst
    return f"waiting for data, more with exchange: {mean:+.2%} of a step on average, {worst:+.2%} on the worst rank"

"""`bench padding`: how much of what packing saves in slots becomes speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from tensor3d import Cube, CubeShape
from tensor3d.data.packed_batch import check_rows, fit_packs_per_rank
from tools.bench.harness.benchmark import Count, Report, cubes_of, listed
from tools.bench.harness.figures import Column, as_json, deal, flat, milliseconds, spread, table
from tools.bench.harness.step_trial import (
    BINNED,
    PACKED,
    PADDED,
    RecipeBenchmark,
    Training,
    TrainingTurn,
    alternate,
    check_cube,
    check_planned,
    in_mode,
    start_trainings,
    timed,
    training_seconds,
)
from tools.bench.harness.synthetic_data import SHORTEST, RandomPairs, lengths_of
from tools.corpus.quick.sentencepiece_tokenizer import special_tokens
from tools.training.config import TrainConfig
from tools.training.data import TrainData

MODES = (PACKED, PADDED, BINNED)
_SKIP = 1  # the first step of a turn: others had the caches before it


@dataclass(frozen=True, kw_only=True)
class PaddingCommand(RecipeBenchmark):
    """Time steps on packs, on one sequence a pack with its padding, and on batches of like length, in turns."""

    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the sequences of length i. Default: a formula."""
    cubes: str = "1x1x1"
    """Cubes to measure, as XxYxZ,XxYxZ,...; modes are compared on each by itself."""
    data_parallel: int = 1
    """Copies of each cube."""
    modes: str = ",".join(MODES)
    """Which of them, with commas; "padded" must be among them, to compare with."""
    steps: Count = 20
    """Steps that are timed, of each mode on each cube."""
    warmup: Count = 2
    """Steps before that, at least 1."""
    rounds: Count = 5
    """Turns that each mode gets, one mode after another; the steps are dealt out over them."""
    sequences: Count = 10_000
    """Sequences of an epoch, drawn from the histogram."""

    def plan(self) -> tuple[list[str], list[CubeShape], tuple[NDArray[np.int64], str]]:
        """The modes and cubes that are asked for, and the lengths."""
        modes = listed("--modes", self.modes, MODES, needs=PADDED)
        check_planned(self.settings)
        if self.settings.batch.packing_rule == "sequences":
            raise ValueError(
                'batch.packing_rule must not be "sequences": all modes have the same slots a step here. Set it to '
                '"none".'
            )
        shapes = cubes_of(self.cubes, self.data_parallel)
        for shape in shapes:
            check_cube(self.as_training(self.settings), shape)
            if BINNED in modes:
                check_bins(self.settings, shape)
        return modes, shapes, self.lengths()

    def measure(self, plan: tuple[list[str], list[CubeShape], tuple[NDArray[np.int64], str]]) -> Report:
        modes, shapes, (histogram, source) = plan
        recipes = {mode: in_mode(self.settings, mode) for mode in modes}
        results = [figure for shape in shapes for figure in measure(self, shape, recipes, histogram)]
        rounds = f"{self.steps} steps of each mode in {len(deal(self.steps, self.rounds))} rounds"
        return Report(
            lines=[f"{self.recipe}, lengths: {source}", rounds, *table(results)],
            content={"lengths": source, "sequences": self.sequences, "results": as_json(results)},
        )

    def lengths(self) -> tuple[NDArray[np.int64], str]:
        """The histogram, and what to say of it."""
        longest = self.settings.data.max_length
        limit = f"data.max_length={longest}. Raise that and the capacity"
        counts, source = lengths_of(self.histogram, longest, limit)
        short = 0 if self.histogram is None else int(counts[:SHORTEST].sum())
        return counts, f"{source} ({short} shorter than {SHORTEST} tokens taken as {SHORTEST})" if short else source


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """One mode on one cube. Slots are the places of tokens in packs, filled or not."""

    cube: Annotated[str, Column("cube")]
    ranks: int
    mode: Annotated[str, Column("mode")]
    steps: int
    seconds_median: Annotated[float, milliseconds("step ms")]
    """Of a step."""
    slots_per_second: float
    """Over all ranks; median of the rounds."""
    fill: Annotated[float, Column("fill", ".2%")]
    """Share of the slots that hold a token, over an epoch."""
    tokens_per_second: Annotated[float, Column("tokens/s", ",.0f")]
    """Real tokens: fill * slots_per_second."""
    padding_ratio: Annotated[float, Column("padding ratio", ".3f")]
    """Fill over that of the mode "padded": the speed-up that is to be had."""
    speed_up: Annotated[float, Column("speed-up", ".3f")]
    """Tokens/s over those of "padded"; median of the rounds."""
    speed_up_range: Annotated[tuple[float, float], Column("by round", ".2f")]
    """The lowest and the highest round."""
    efficiency: Annotated[float, Column("efficiency", ".3f")]
    """Speed-up over padding ratio: 1 where nothing of it is lost."""
    efficiency_range: Annotated[tuple[float, float], Column("by round", ".2f")]
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""


def check_bins(recipe: TrainConfig, shape: CubeShape) -> None:
    """Raises ValueError where the rows of the shortest bin do not divide among the members of y."""
    k = fit_packs_per_rank(recipe.batch.global_batch, shape, recipe.batch.packs_per_rank)
    width = min(recipe.data.bin_width, recipe.data.capacity)
    try:
        check_rows(shape, k, width)
    except ValueError as problem:
        raise ValueError(f"cube {shape}, binned with data.bin_width={width}: {problem}") from None


def random_feed(recipe: TrainConfig, cube: Cube, *, histogram: NDArray[np.int64], sequences: int) -> TrainData:
    special = special_tokens(recipe.data.vocab_size)
    source = RandomPairs(histogram, sequences, special=special, seed=recipe.run.seed)
    return TrainData(recipe, cube, source, special)


def measure(
    command: PaddingCommand, shape: CubeShape, recipes: Mapping[str, TrainConfig], histogram: NDArray[np.int64]
) -> list[ModeFigures]:
    """All modes on one cube, in turns."""
    make_feed = partial(random_feed, histogram=histogram, sequences=command.sequences)
    with ExitStack() as stack:
        ways = {mode: partial(Training, recipe=recipe, make_feed=make_feed) for mode, recipe in recipes.items()}
        groups = start_trainings(shape, ways, stack)
        turns = alternate(groups, deal(command.steps, command.rounds), skip=_SKIP, warmup=command.warmup)
        fills = {mode: group.call(epoch_fill)[0] for mode, group in groups.items()}
    turns = {mode: timed(mine, _SKIP) for mode, mine in turns.items()}
    return [figures(shape, mode, turns[mode], turns[PADDED], fills[mode], fills[PADDED]) for mode in recipes]


def epoch_fill(training: Training) -> float:
    """Fill of the whole steps of epoch 0. That of the timed steps alone would be a matter of luck."""
    steps = max(1, training.feed.data.packs_per_epoch // training.feed.global_batch)
    plans = [training.loader.schedule.step(index) for index in range(steps)]
    return sum(plan.tokens for plan in plans) / sum(plan.capacity * len(plan.packs) for plan in plans)


def figures(
    shape: CubeShape,
    mode: str,
    turns: Sequence[TrainingTurn],
    padded: Sequence[TrainingTurn],
    fill: float,
    padded_fill: float,
) -> ModeFigures:
    """The figures of a mode.

    Args:
        turns: those of the mode, by round; steps that do not count are left out.
        padded: turns of the mode to compare with, in the same rounds.
        fill, padded_fill: share of the slots that hold a token.
    """
    rounds = [training_seconds(turn) for turn in turns]
    speeds = [slots_per_second(turn) for turn in turns]
    # What holds a token does not change how long a slot takes: the ratio of slots/s is all that is lost or won.
    kept = [speed / slots_per_second(turn) for speed, turn in zip(speeds, padded, strict=True)]
    ratio = fill / padded_fill
    speed = statistics.median(speeds)
    return ModeFigures(
        cube=str(shape),
        ranks=shape.ranks,
        mode=mode,
        steps=sum(map(len, rounds)),
        seconds_median=statistics.median(flat(rounds)),
        slots_per_second=speed,
        fill=fill,
        tokens_per_second=fill * speed,
        padding_ratio=ratio,
        speed_up=ratio * statistics.median(kept),
        speed_up_range=(ratio * min(kept), ratio * max(kept)),
        efficiency=statistics.median(kept),
        efficiency_range=spread(kept),
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def slots_per_second(turn: TrainingTurn) -> float:
    slots = sum(metrics.tokens_per_second * metrics.seconds / metrics.fill for metrics in turn[0])
    return slots / sum(training_seconds(turn))

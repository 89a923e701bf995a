"""`bench padding`: how much of what packing saves in slots becomes speed."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensor3d import Cube, CubeShape
from tensor3d.data.packed_batch import check_rows, fit_packs_per_rank
from tools.bench.harness.step_trial import (
    BINNED,
    PACKED,
    PADDED,
    RecipeCommand,
    Training,
    TrainingTurn,
    alternate,
    check_cube,
    check_planned,
    in_mode,
    start,
    timed,
    training_seconds,
)
from tools.bench.harness.synthetic_data import SHORTEST, RandomPairs, exponential_histogram
from tools.bench.step import deal
from tools.common.machine import Machine, format_table
from tools.corpus.quick.sentencepiece_tokenizer import special_tokens
from tools.packing.histogram import read_histogram
from tools.training.config import TrainConfig
from tools.training.data import TrainData

MODES = (PACKED, PADDED, BINNED)
_SKIP = 1  # the first step of a turn: others had the caches before it


@dataclass(frozen=True, kw_only=True)
class PaddingCommand(RecipeCommand):
    """Time steps on packs, on one sequence a pack with its padding, and on batches of like length, in turns."""

    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the sequences of length i. Default: a formula."""
    cubes: str = "1x1x1"
    """Cubes to measure, as XxYxZ,XxYxZ,...; modes are compared on each by itself."""
    data_parallel: int = 1
    """Copies of each cube."""
    modes: str = ",".join(MODES)
    """Which of them, with commas; "padded" must be among them, to compare with."""
    steps: int = 20
    """Steps that are timed, of each mode on each cube."""
    warmup: int = 2
    """Steps before that, at least 1."""
    rounds: int = 5
    """Turns that each mode gets, one mode after another; the steps are dealt out over them."""
    sequences: int = 10_000
    """Sequences of an epoch, drawn from the histogram."""

    def run(self, arguments: Sequence[str]) -> int:
        modes, shapes = self.check(arguments)
        histogram, source = self.lengths()
        machine = Machine.here()
        results = [
            figure
            for shape in shapes
            for figure in measure(self, shape, {mode: in_mode(self.settings, mode) for mode in modes}, histogram)
        ]
        print(f"{machine}\n{self.recipe}, lengths: {source}")
        print(f"{self.steps} steps of each mode in {len(deal(self.steps, self.rounds))} rounds")
        print("\n".join(format_table(HEADER, [row(figure) for figure in results])))
        self.write(
            arguments,
            machine,
            lengths=source,
            sequences=self.sequences,
            results=[dataclasses.asdict(f) for f in results],
        )
        sys.stdout.flush()
        return 0

    def check(self, arguments: Sequence[str]) -> tuple[list[str], list[CubeShape]]:
        """The modes and cubes that are asked for. Raises ValueError for what can be seen before any process."""
        self.check_call(arguments, "steps", "warmup", "rounds", "sequences")
        modes = list(dict.fromkeys(self.modes.split(",")))
        if not set(modes) <= set(MODES) or PADDED not in modes:
            raise ValueError(f"--modes must be some of {','.join(MODES)}, padded among them. Got {self.modes!r}.")
        check_planned(self.settings)
        if self.settings.batch.packing_rule == "sequences":
            raise ValueError(
                'batch.packing_rule must not be "sequences": all modes have the same slots a step here. Set it to '
                '"none".'
            )
        shapes = [CubeShape.parse(text, self.data_parallel) for text in self.cubes.split(",")]
        for shape in shapes:
            check_cube(self.as_training(self.settings), shape)
            if BINNED in modes:
                check_bins(self.settings, shape)
        return modes, shapes

    def lengths(self) -> tuple[NDArray[np.int64], str]:
        """The histogram, and what to say of it."""
        longest = self.settings.data.max_length
        if self.histogram is None:
            return exponential_histogram(longest), f"exponential with mean {5 / 8 * longest:g}, cut at {longest}"
        counts = np.trim_zeros(read_histogram(self.histogram), "b")
        if len(counts) - 1 > longest:
            raise ValueError(
                f"{self.histogram} has sequences of {len(counts) - 1} tokens, more than data.max_length={longest}. "
                "Raise that and the capacity, or take another histogram."
            )
        short = int(counts[:SHORTEST].sum())
        note = f" ({short} shorter than {SHORTEST} tokens taken as {SHORTEST})" if short else ""
        return counts, f"{self.histogram}{note}"


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """One mode on one cube. Slots are the places of tokens in packs, filled or not."""

    cube: str
    ranks: int
    mode: str
    steps: int
    seconds_median: float
    """Of a step."""
    slots_per_second: float
    """Over all ranks; median of the rounds."""
    fill: float
    """Share of the slots that hold a token, over an epoch."""
    tokens_per_second: float
    """Real tokens: fill * slots_per_second."""
    padding_ratio: float
    """Fill over that of the mode "padded": the speed-up that is to be had."""
    speed_up: float
    """Tokens/s over those of "padded"; median of the rounds."""
    speed_up_range: tuple[float, float]
    """The lowest and the highest round."""
    efficiency: float
    """Speed-up over padding ratio: 1 where nothing of it is lost."""
    efficiency_range: tuple[float, float]
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
        groups = {
            mode: start(shape, partial(Training, recipe=recipe, make_feed=make_feed), stack)
            for mode, recipe in recipes.items()
        }
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
        seconds_median=statistics.median(second for seconds in rounds for second in seconds),
        slots_per_second=speed,
        fill=fill,
        tokens_per_second=fill * speed,
        padding_ratio=ratio,
        speed_up=ratio * statistics.median(kept),
        speed_up_range=(ratio * min(kept), ratio * max(kept)),
        efficiency=statistics.median(kept),
        efficiency_range=(min(kept), max(kept)),
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def slots_per_second(turn: TrainingTurn) -> float:
    slots = sum(metrics.tokens_per_second * metrics.seconds / metrics.fill for metrics in turn[0])
    return slots / sum(training_seconds(turn))


HEADER = (
    "cube",
    "mode",
    "step ms",
    "fill",
    "tokens/s",
    "padding ratio",
    "speed-up",
    "by round",
    "efficiency",
    "by round",
)


def row(mode: ModeFigures) -> tuple[str, ...]:
    """What the table shows of a mode, under `HEADER`."""
    (slowest, fastest), (least, most) = mode.speed_up_range, mode.efficiency_range
    return (
        mode.cube,
        mode.mode,
        f"{mode.seconds_median * 1e3:.1f}",
        f"{mode.fill:.2%}",
        f"{mode.tokens_per_second:,.0f}",
        f"{mode.padding_ratio:.3f}",
        f"{mode.speed_up:.3f}",
        f"{slowest:.2f}-{fastest:.2f}",
        f"{mode.efficiency:.3f}",
        f"{least:.2f}-{most:.2f}",
    )

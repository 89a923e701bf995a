"""`bench loss`: whether a model learns the same, however its sequences are packed and wherever they are read."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from tensor3d import CubeShape
from tensor3d.data import ExchangeOptions
from tools.bench.harness.benchmark import Count, PictureFile, Report, listed, seeds_of
from tools.bench.harness.figures import as_json
from tools.bench.harness.processes import start
from tools.bench.harness.step_trial import (
    BINNED,
    PACKED,
    PADDED,
    RecipeBenchmark,
    Training,
    check_cube,
    check_planned,
    in_mode,
    prepare_here,
)
from tools.bench.shard_exchange import corpus_feed
from tools.common.log import progress
from tools.common.machine import format_table
from tools.common.plotting import new_figure, plain, running_mean, style, window_of
from tools.training.config import TrainConfig
from tools.training.metrics import StepMetrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXCHANGED = "exchanged"
MODES = (PADDED, BINNED, PACKED, EXCHANGED)
_DATA_RANKS = 2  # of the mode "exchanged", and shards in all modes
_CHUNK = 20  # steps between two movements of the progress bar
Curves = Mapping[str, Sequence[Sequence[StepMetrics]]]
"""The steps of each mode, by seed."""


@dataclass(frozen=True, kw_only=True)
class LossCommand(RecipeBenchmark):
    """Train a recipe to its end in several modes and from several seeds, and compare the loss at the end."""

    seeds: str = "0,1,2"
    """At least two, with commas."""
    modes: str = ",".join(MODES)
    """Some of padded, binned, packed and exchanged: packed on two data ranks that read a shard each."""
    last: Count = 50
    """Steps at the end whose mean loss is compared."""
    plot: PictureFile = None
    """PNG file of the curves."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY-2-shards."""

    def plan(self) -> tuple[list[str], list[int], TrainConfig]:
        """Modes, seeds and the recipe of all modes."""
        modes = listed("--modes", self.modes, MODES, least=2)
        seeds = seeds_of(self.seeds)
        if self.last > self.settings.run.steps:
            raise ValueError(f"--last must be at most run.steps={self.settings.run.steps}. Got {self.last}.")
        check_planned(self.settings)
        settings = comparable(self.settings)
        for mode in modes:
            shape = CubeShape(data=_DATA_RANKS if mode == EXCHANGED else 1)
            check_cube(self.as_training(in_mode(settings, mode), exchange=mode == EXCHANGED), shape)
        return modes, seeds, settings

    def measure(self, plan: tuple[list[str], list[int], TrainConfig]) -> Report:
        modes, seeds, settings = plan
        training = self.as_training(settings, corpus=self.corpus)
        prepare_here(training)
        curves = train(settings, training.corpus, modes, seeds)
        results = [figures(mode, curves[mode], self.last) for mode in modes]
        verdict = compare(results)
        lines = [
            f"{self.recipe}: {settings.run.steps} steps from seeds {self.seeds}",
            *format_table(header(seeds, self.last), [row(mode) for mode in results]),
            str(verdict),
        ]
        content = {
            "trained": settings.to_dict(),
            "seeds": seeds,
            "last": self.last,
            "agree": verdict.agree,
            "pooled_deviation": verdict.deviation,
            "largest_difference": verdict.difference,
            "results": as_json(results),
            "curves": {m: [[step.masked_lm_loss for step in run] for run in runs] for m, runs in curves.items()},
        }
        return Report(lines=lines, content=content, well=verdict.agree, picture=partial(draw, curves))


def comparable(recipe: TrainConfig) -> TrainConfig:
    """The recipe with as many sequences in a step in every mode, from the same two shards."""
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, shards=_DATA_RANKS),
        # As near to that many sequences as packs can come that are dealt to two ranks.
        batch=dataclasses.replace(recipe.batch, packing_rule="sequences", multiple_of=_DATA_RANKS),
    )


def train(settings: TrainConfig, corpus: Path, modes: Sequence[str], seeds: Sequence[int]) -> Curves:
    """All runs, one after another, each in processes of its own, so that all memory is given back."""
    curves: dict[str, list[list[StepMetrics]]] = {mode: [] for mode in modes}
    cuda = torch.cuda.device_count() >= (_DATA_RANKS if EXCHANGED in modes else 1)
    total = len(modes) * len(seeds) * settings.run.steps
    with progress(total=total, unit="step") as bar:
        for seed, mode in itertools.product(seeds, modes):
            bar.set_postfix_str(f"{mode}, seed {seed}")
            recipe = in_mode(dataclasses.replace(settings, run=dataclasses.replace(settings.run, seed=seed)), mode)
            curves[mode].append(train_one(recipe, corpus, mode, bar, cuda=cuda))
    return curves


def train_one(recipe: TrainConfig, corpus: Path, mode: str, bar: tqdm, *, cuda: bool) -> list[StepMetrics]:
    """One run of a mode."""
    if mode == EXCHANGED:
        return to_the_end(recipe, corpus, CubeShape(data=_DATA_RANKS), bar, options=ExchangeOptions(), cuda=cuda)
    return to_the_end(recipe, corpus, CubeShape(), bar, cuda=cuda)


def to_the_end(
    recipe: TrainConfig,
    corpus: Path,
    shape: CubeShape,
    bar: tqdm,
    *,
    options: ExchangeOptions | None = None,
    cuda: bool | None = None,
) -> list[StepMetrics]:
    """One run, from the first step to the last, as its first rank saw it.

    Args:
        bar: moves on by every step.
        options: what data ranks exchange; None: each reads everything.
        cuda: a GPU for each rank. Default: if there are enough.
    """
    make_feed = partial(corpus_feed, corpus=corpus, options=options)
    history: list[StepMetrics] = []
    with ExitStack() as stack:
        (group,) = start([shape], partial(Training, recipe=recipe, make_feed=make_feed), stack, cuda=cuda)
        while (left := recipe.run.steps - len(history)) > 0:
            turn = group.call(Training.turn, min(left, _CHUNK))
            history += turn[0]
            bar.update(len(turn[0]))
    return history


@dataclass(frozen=True, kw_only=True)
class ModeLoss:
    """The end of the runs of one mode. Losses are of masked tokens, in nats."""

    mode: str
    losses: tuple[float, ...]
    """Mean of the last steps, by seed."""
    mean: float
    """Over the seeds."""
    deviation: float
    """Standard deviation over the seeds, of a sample."""
    tokens_per_step: float
    """Real tokens, on average."""
    fill: float
    """Share of the slots that hold a token."""
    seconds_per_step: float
    """Median. Runs follow one another, so times are no comparison on a machine that has other work."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Modes agree where the means of no two of them differ by more than twice the pooled standard deviation."""

    modes: tuple[str, str]
    """The two that differ most."""
    difference: float
    """Of their means, nats."""
    deviation: float
    """Of one run, over the seeds: the root of the mean of all modes' variances."""

    @property
    def agree(self) -> bool:
        return self.difference <= 2 * self.deviation

    def __str__(self) -> str:
        words = "all modes agree" if self.agree else "the modes do NOT agree"
        relation = "at most" if self.agree else "more than"
        return (
            f"{words}: the means that differ most, of {self.modes[0]} and {self.modes[1]}, do so by "
            f"{self.difference:.4f} nats, {relation} 2 * {self.deviation:.4f}, the pooled standard deviation over seeds"
        )


def figures(mode: str, runs: Sequence[Sequence[StepMetrics]], last: int) -> ModeLoss:
    losses = [statistics.fmean(step.masked_lm_loss for step in run[-last:]) for run in runs]
    steps = [step for run in runs for step in run]
    return ModeLoss(
        mode=mode,
        losses=tuple(losses),
        mean=statistics.fmean(losses),
        deviation=statistics.stdev(losses),
        tokens_per_step=statistics.fmean(step.tokens_per_second * step.seconds for step in steps),
        fill=statistics.fmean(step.fill for step in steps),
        seconds_per_step=statistics.median(step.seconds for step in steps),
    )


def compare(results: Sequence[ModeLoss]) -> Verdict:
    """Of at least two modes, with as many seeds each."""
    first, second = max(itertools.combinations(results, 2), key=lambda pair: abs(pair[0].mean - pair[1].mean))
    return Verdict(
        modes=(first.mode, second.mode),
        difference=abs(first.mean - second.mean),
        deviation=math.sqrt(statistics.fmean(mode.deviation**2 for mode in results)),
    )


def header(seeds: Sequence[int], last: int) -> list[str]:
    return ["mode", *(f"seed {seed}" for seed in seeds), f"mean of last {last}", "deviation", "tokens a step", "fill"]


def row(mode: ModeLoss) -> list[str]:
    """What the table shows of a mode, under `header`."""
    losses = [f"{loss:.4f}" for loss in (*mode.losses, mode.mean, mode.deviation)]
    return [mode.mode, *losses, f"{mode.tokens_per_step:,.0f}", f"{mode.fill:.2%}"]


def draw(curves: Curves) -> Figure:
    """Masked-LM loss of each mode: a thin line for each seed, a bold one for their mean, both smoothed."""
    figure = new_figure()
    axes = figure.add_subplot()
    for number, (mode, runs) in enumerate(curves.items()):
        losses = np.array([[step.masked_lm_loss for step in run] for run in runs])
        window = window_of(losses.shape[1])
        whole = max(1, losses.shape[1] - window // 2)
        smooth = np.stack([running_mean(run, window)[:whole] for run in losses])
        steps, own = np.arange(1, whole + 1), style(number)
        axes.plot(steps, smooth.T, color=own["color"], linewidth=0.7, alpha=0.4)
        axes.plot(steps, smooth.mean(axis=0), **own, linewidth=2.2, label=mode)
    axes.set(xlabel="step of the optimiser", ylabel=f"masked-LM loss (nats), mean of {window} steps")
    axes.margins(x=0.01)
    plain(axes)
    axes.legend(frameon=False)
    return figure

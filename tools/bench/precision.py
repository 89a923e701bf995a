"""`bench precision`: whether a model learns the same in types of 16 bits, and of 8, as in fp32."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from tensor3d import CubeShape
from tools.bench.convergence import draw, to_the_end
from tools.bench.harness.benchmark import Count, PictureFile, Report
from tools.bench.harness.figures import Column, as_json, milliseconds, table
from tools.bench.harness.step_trial import RecipeBenchmark, check_cube, prepare_here
from tools.common.log import progress
from tools.common.machine import format_table
from tools.training.config import TrainConfig
from tools.training.metrics import StepMetrics

Type = Literal["fp32", "bf16", "fp16", "fp8-rowwise", "fp8-tensorwise", "fp8-delayed"]
REFERENCE: Type = "fp32"


@dataclass(frozen=True, kw_only=True)
class PrecisionCommand(RecipeBenchmark):
    """Train a recipe in several precisions, from the same weights on the same packs, and compare the final losses."""

    steps: int | None = None
    """Of each run; the learning rate is that of a run of so many. Default: run.steps of the recipe."""
    precisions: str = "fp32,bf16"
    """fp32, and some of bf16, fp16, fp8-rowwise, fp8-tensorwise and fp8-delayed: linear layers in FP8, all else in
    bf16. fp16 is very slow on CPUs, and FP8 is emulated there."""
    cube: str = "1x1x1"
    """Sizes XxYxZ of the cube, in processes of this machine."""
    last: Count = 50
    """Steps at the end whose mean loss is compared."""
    tolerance: float = 0.01
    """By what share of the loss of fp32 the others may differ from it."""
    plot: PictureFile = None
    """PNG file of the curves."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: as pre-training chooses it."""

    def plan(self) -> tuple[list[Type], CubeShape, TrainConfig]:
        """What to train."""
        names = list(dict.fromkeys(text.strip() for text in self.precisions.split(",")))
        if not set(names) <= set(get_args(Type)) or REFERENCE not in names or len(names) < 2:
            others = ", ".join(name for name in get_args(Type) if name != REFERENCE)
            raise ValueError(f"--precisions must be fp32 and some of {others}. Got {self.precisions!r}.")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"--tolerance must be at least 0 and finite. Got {self.tolerance}.")
        settings = self.settings
        if self.steps is not None:
            settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, steps=self.steps))
        if self.last > settings.run.steps:
            raise ValueError(f"--last must be at most the steps of a run, {settings.run.steps}. Got {self.last}.")
        shape = CubeShape.parse(self.cube)
        check_cube(self.as_training(settings), shape)
        # fp32 first: the others are compared with it.
        return cast("list[Type]", sorted(names, key=lambda name: name != REFERENCE)), shape, settings

    def measure(self, plan: tuple[list[Type], CubeShape, TrainConfig]) -> Report:
        precisions, shape, settings = plan
        training = self.as_training(settings, corpus=self.corpus)
        prepare_here(training)
        curves = train(settings, training.corpus, precisions, shape)
        results = compare(curves, self.last)
        agree = all(result.difference <= self.tolerance for result in results)
        lines = [
            f"{self.recipe}: {settings.run.steps} steps on {shape}, means of the last {self.last}",
            *table(results),
            f"the loss on the way, means of {self.last} steps:",
            *on_the_way(curves, self.last),
            verdict(results, self.tolerance),
        ]
        content = {
            "trained": settings.to_dict(),
            "cube": str(shape),
            "last": self.last,
            "tolerance": self.tolerance,
            "agree": agree,
            "results": as_json(results),
            "curves": {
                name: {"loss": [step.loss for step in run], "masked_lm": [step.masked_lm_loss for step in run]}
                for name, run in curves.items()
            },
        }
        picture = partial(draw, {name: [run] for name, run in curves.items()})
        return Report(lines=lines, content=content, well=agree, picture=picture)


def in_precision(recipe: TrainConfig, precision: Type) -> TrainConfig:
    """The recipe, computed in that type; what it says of the type in which gradients travel stays."""
    kind, _, scaling = precision.partition("-")
    types: Any = {"compute": "bf16" if kind == "fp8" else kind, "fp8": scaling or "off"}
    return dataclasses.replace(recipe, precision=dataclasses.replace(recipe.precision, **types))


def train(
    settings: TrainConfig, corpus: Path, precisions: Sequence[Type], shape: CubeShape
) -> dict[str, list[StepMetrics]]:
    """The steps of all runs, one run after another, each in processes of its own."""
    curves: dict[str, list[StepMetrics]] = {}
    with progress(total=len(precisions) * settings.run.steps, unit="step") as bar:
        for precision in precisions:
            bar.set_postfix_str(precision)
            curves[precision] = to_the_end(in_precision(settings, precision), corpus, shape, bar)
    return curves


@dataclass(frozen=True, kw_only=True)
class PrecisionLoss:
    """The end of a run. Losses in nats, means over its last steps."""

    precision: Annotated[str, Column("precision")]
    loss: Annotated[float, Column("loss", ".4f")]
    """Masked-LM and next-sentence."""
    loss_difference: Annotated[float, Column("to fp32", "+.3%")]
    """(this - fp32) / fp32"""
    masked_lm_loss: Annotated[float, Column("masked-LM loss", ".4f")]
    masked_lm_difference: Annotated[float, Column("to fp32", "+.3%")]
    """(this - fp32) / fp32"""
    largest_difference: Annotated[float, Column("largest on the way", ".3%")]
    """Of the loss to that of fp32, as a share of it: of the means of as many steps, wherever they begin."""
    seconds_per_step: Annotated[float, milliseconds("ms a step")]
    """Median. Runs follow one another, so times are no comparison on a machine that has other work."""

    @property
    def difference(self) -> float:
        """The larger one. A loss that is not finite is infinitely far from any."""
        found = max(abs(self.loss_difference), abs(self.masked_lm_difference))
        return found if math.isfinite(self.loss_difference + self.masked_lm_difference) else math.inf


def compare(curves: Mapping[str, Sequence[StepMetrics]], last: int) -> list[PrecisionLoss]:
    """Each run with that of fp32."""

    def means(run: Sequence[StepMetrics]) -> tuple[float, float]:
        return (
            statistics.fmean(step.loss for step in run[-last:]),
            statistics.fmean(step.masked_lm_loss for step in run[-last:]),
        )

    loss, masked_lm = means(curves[REFERENCE])
    results = []
    for name, run in curves.items():
        own, own_masked_lm = means(run)
        results.append(
            PrecisionLoss(
                precision=name,
                loss=own,
                loss_difference=(own - loss) / loss,
                masked_lm_loss=own_masked_lm,
                masked_lm_difference=(own_masked_lm - masked_lm) / masked_lm,
                largest_difference=max(
                    abs(one / other - 1)
                    for one, other in zip(_means(run, last), _means(curves[REFERENCE], last), strict=True)
                ),
                seconds_per_step=statistics.median(step.seconds for step in run),
            )
        )
    return results


def _means(run: Sequence[StepMetrics], last: int) -> list[float]:
    """Of the losses of each so many steps that follow one another."""
    return [statistics.fmean(step.loss for step in run[end - last : end]) for end in range(last, len(run) + 1)]


def on_the_way(curves: Mapping[str, Sequence[StepMetrics]], last: int) -> list[str]:
    """All curves, up to each tenth of the steps that has as many before it."""
    steps = len(curves[REFERENCE])
    ends = [end for tenth in range(1, 11) if (end := steps * tenth // 10) >= last]
    rows = [(name, *(f"{_means(run[:end], last)[-1]:.4f}" for end in ends)) for name, run in curves.items()]
    return format_table(("to step", *map(str, ends)), rows)


def verdict(results: Sequence[PrecisionLoss], tolerance: float) -> str:
    """In words."""
    farthest = max(results, key=lambda result: result.difference)
    agree = farthest.difference <= tolerance
    return (
        f"{'all precisions agree' if agree else 'the precisions do NOT agree'}: {farthest.precision} differs most, by "
        f"{farthest.difference:.3%} of the loss of fp32, {'at most' if agree else 'more than'} {tolerance:.3%}"
    )

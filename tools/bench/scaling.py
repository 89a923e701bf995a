"""`bench strong` and `bench weak`: the training step on growing numbers of ranks, split in every known way."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from tensor3d import CubeShape
from tensor3d.distributed import process_group
from tools.bench.harness.benchmark import Count, PictureFile, Report, cubes_of
from tools.bench.harness.figures import Column, as_json, deal, mebibytes, milliseconds, table
from tools.bench.harness.processes import is_shown
from tools.bench.harness.scaling_plots import KINDS, draw, kinds_of
from tools.bench.harness.step_trial import (
    LOSS_TOLERANCE,
    CubeFigures,
    RecipeBenchmark,
    StepTrial,
    check_cube,
    loss_difference,
    prepare_here,
    start_on_corpus,
)
from tools.bench.step import measure
from tools.common.workers import usable_cores
from tools.training.config import TrainConfig
from tools.training.run_plan import RunPlan

# --- The figures of `bench strong` and `bench weak`: those of a step on each box, and how it scales -------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """One box."""

    kinds: tuple[str, ...]
    """What it is called; with few ranks several kinds are the same box."""
    global_batch: int
    """As in the recipe of this point; and so the next."""
    hidden: int
    step: CubeFigures
    efficiency: float = math.nan
    """To the base of all points (`compared`)."""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("box", of="step.name"),
        Column("kind", of="kind"),
        Column("ranks", of="step.ranks"),
        Column("packs", of="global_batch"),
        Column("hidden", of="hidden"),
        milliseconds("step ms", of="step.seconds_median"),
        milliseconds("quartiles", of="step.seconds_quartiles"),
        Column("tokens/s", ",.0f", of="step.tokens_per_second"),
        Column("efficiency", ".2f", of="efficiency"),
        Column("collectives", of="step.collectives"),
        Column("closed form", of="step.collectives_closed_form", equal="step.collectives_equal"),
        mebibytes("MiB received", of="step.bytes_received"),
        mebibytes("closed form", of="step.bytes_closed_form", equal="step.traffic_equal"),
        mebibytes("saved MiB", of="step.saved_bytes"),
        mebibytes("held MiB", of="step.held_bytes"),
        mebibytes("closed form", of="step.held_closed_form", equal="step.held_equal"),
        mebibytes("peak MiB", ".1f", of="step.peak_tensor_bytes"),
        Column("first loss", ".6f", of="step.first_loss"),
    )

    @property
    def kind(self) -> str:
        return ",".join(self.kinds)

    @property
    def flops_per_rank(self) -> float:
        """FLOP/s of the model."""
        return self.step.flops_per_second / self.step.ranks


def base_of(points: Sequence[Point]) -> Point:
    """What efficiency is measured by: of the boxes of the fewest ranks the fastest."""
    fewest = min(point.step.ranks for point in points)
    return max((point for point in points if point.step.ranks == fewest), key=lambda point: point.flops_per_rank)


def efficiency(point: Point, base: Point) -> float:
    """FLOP/s of the model a rank, over those of the base: 1 where nothing is lost to its being split further.

    At equal work a step, as in strong scaling, it is the usual T(base) P(base) / (T P); where the work grows with the
    ranks it is T(base) / T.
    """
    return point.flops_per_rank / base.flops_per_rank


def compared(points: Sequence[Point]) -> list[Point]:
    """The points with their efficiency."""
    base = base_of(points)
    return [dataclasses.replace(point, efficiency=efficiency(point, base)) for point in points]


def to_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """All figures of each point on one level."""
    found = []
    for point in compared(points):
        content = dataclasses.asdict(point)
        step = content.pop("step")
        found.append({**content, "kinds": list(point.kinds), **step})
    return found


def compute_the_same(groups: Sequence[Sequence[Point]]) -> bool:
    """Whether the first losses agree within each group of points, which have the same weights and packs."""
    return all(loss_difference([point.step for point in group]) <= LOSS_TOLERANCE for group in groups)


# --- `bench strong` and `bench weak` ----------------------------------------------------------------------------------

Grow = Literal["tokens", "width"]
_PROFILED = 16
"""Ranks of one machine, at most, that have a profiler each."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured on one number of ranks."""

    ranks: int
    recipe: TrainConfig
    shapes: tuple[CubeShape, ...]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A box that is not measured."""

    ranks: int
    box: str
    """Or its kind, where there is no such box."""
    reason: str

    def __str__(self) -> str:
        return f"skipped: {self.box} on {self.ranks} ranks: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ScalingCommand(RecipeBenchmark):
    """What strong and weak scaling share."""

    ranks: str = "1,2,4,8"
    """Numbers of ranks, with commas. Under torchrun: the number of its processes."""
    shapes: str = "all"
    """Kinds of boxes, with commas: cube (the box nearest to one), 1d (1xPx1), 2d (1xQxQ), fsdp (Px1x1), data (copies);
    or all."""
    cubes: str | None = None
    """These boxes, as XxYxZ,XxYxZ,..., instead of ranks and shapes."""
    cube: str | None = None
    """This one box, with --data-parallel copies, instead of all of these."""
    data_parallel: int = 1
    """Copies of --cube."""
    steps: Count = 12
    """Steps that are timed, on each box."""
    warmup: Count = 2
    """Steps before that, at least 1."""
    rounds: Count = 4
    """Turns that each box gets, one box of the same ranks after another; the steps are dealt out over them."""
    threads: Count | None = None
    """Of each rank, the same for all numbers of ranks. Default: the cores shared out to the largest number."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY."""
    plot: PictureFile = None
    """PNG file of time, traffic and memory against ranks."""

    launcher: ClassVar[str | None] = None
    scaling: ClassVar[str]
    """ "strong" or "weak"."""

    @abstractmethod
    def grown(self, ranks: int) -> TrainConfig:
        """The recipe for so many ranks. Raises ValueError where it cannot grow so."""

    @abstractmethod
    def same_work(self, points: Sequence[Point]) -> list[list[Point]]:
        """The points in groups that have the same weights and packs."""

    # --- what to measure --------------------------------------------------------------------------------------------

    def plan(self) -> tuple[list[Task], list[Skipped]]:
        """What to measure and what not, and why."""
        wanted, skipped = self.wanted()
        tasks = []
        for ranks in sorted({shape.ranks for shape in wanted}):
            fitting, more = self.fitting([shape for shape in wanted if shape.ranks == ranks])
            skipped += more
            if fitting:
                tasks.append(Task(ranks=ranks, recipe=self.grown(ranks), shapes=tuple(fitting)))
        if not tasks:
            raise ValueError("no box is left to measure. " + " ".join(map(str, skipped)))
        if process_group.is_launched() and len(tasks) > 1:
            raise ValueError(
                f"under torchrun all boxes share its processes, and these need {', '.join(str(t.ranks) for t in tasks)}"
                " ranks. Name one number of ranks, run once for each, and draw all files: tools.bench plot."
            )
        return tasks, skipped

    def wanted(self) -> tuple[list[CubeShape], list[Skipped]]:
        """The boxes that are asked for, each once, and the kinds that do not exist for a number of ranks."""
        if self.cube is not None:
            if self.cubes is not None:
                raise ValueError("--cube names one box and --cubes several. Drop one of them.")
            return [CubeShape.parse(self.cube, self.data_parallel)], []
        if self.data_parallel != 1:
            raise ValueError(f"--data-parallel is the number of copies of --cube. Got {self.data_parallel} without it.")
        if self.cubes is not None:
            return list(dict.fromkeys(cubes_of(self.cubes))), []
        kinds = list(KINDS) if self.shapes == "all" else self.shapes.split(",")
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"--shapes are some of {','.join(KINDS)}, or all. Got {unknown[0]!r}.")
        found: dict[CubeShape, None] = {}
        skipped = []
        for ranks in numbers(self.ranks):
            for kind in kinds:
                try:
                    found[KINDS[kind](ranks)] = None
                except ValueError as problem:
                    skipped.append(Skipped(ranks=ranks, box=kind, reason=str(problem)))
        return list(found), skipped

    def fitting(self, shapes: Sequence[CubeShape]) -> tuple[list[CubeShape], list[Skipped]]:
        """Of the boxes of one number of ranks those that can train their recipe."""
        fitting, skipped = [], []
        for shape in shapes:
            try:
                check_cube(self.training(self.grown(shape.ranks)), shape)
                fitting.append(shape)
            except ValueError as problem:
                reason = str(problem).removeprefix(f"cube {shape}: ")
                skipped.append(Skipped(ranks=shape.ranks, box=str(shape), reason=reason))
        return fitting, skipped

    def training(self, settings: TrainConfig) -> RunPlan:
        return self.as_training(settings, corpus=self.corpus)

    # --- measuring --------------------------------------------------------------------------------------------------

    def measure(self, plan: tuple[list[Task], list[Skipped]]) -> Report:
        tasks, skipped = plan
        points: list[Point] = []
        shown = True
        prepare_here(self.training(self.settings))
        for task in tasks:
            more, shown = self.points(task, max(task.ranks for task in tasks))
            points += more
        points = compared(points)
        rounds = f"{self.steps} steps a box in {min(self.rounds, self.steps)} rounds, after {self.warmup} to warm up"
        lines = [
            f"{self.recipe}: {rounds}; efficiency is to {base_of(points).step.name}",
            *table(points),
            *map(str, skipped),
        ]
        agree = self.has_dropout or compute_the_same(self.same_work(points))
        if self.has_dropout:
            lines.append("first losses are not compared: dropout differs from box to box (0 compares them)")
        results = to_json(points)
        content = {
            "warmup": self.warmup,
            "rounds": deal(self.steps, self.rounds),
            "skipped": as_json(skipped),
            "results": results,
        }
        fault = "the boxes do not compute the same, so their times are no comparison."
        return Report(
            lines=lines,
            content=content,
            faults=[] if agree else [fault],
            shown=shown,
            picture=partial(draw, self.scaling, results),
        )

    def points(self, task: Task, most: int) -> tuple[list[Point], bool]:
        """The figures of all boxes of one number of ranks, in processes that end with it, and whether this process is
        the one that shows them.

        Args:
            most: the largest number of ranks.
        """
        threads = self.threads or max(1, usable_cores() // most)
        # Profilers of many ranks on one machine are not affordable.
        make = partial(StepTrial, recipe=task.recipe, warmup=self.warmup, peaks=task.ranks <= _PROFILED)
        with ExitStack() as stack:
            boxes = start_on_corpus(
                self.training(self.settings),
                task.shapes,
                make,
                stack,
                # All numbers of ranks on GPUs or none: figures of different devices are no comparison.
                cuda=torch.cuda.device_count() >= most,
                cores=threads * task.ranks,
            )
            shown = is_shown()
            results = measure(boxes, deal(self.steps, self.rounds), shown=shown)
        hidden = task.recipe.model.config(task.recipe.data).hidden
        found = [
            Point(kinds=kinds_of(shape), global_batch=task.recipe.batch.global_batch, hidden=hidden, step=step)
            for shape, step in zip(task.shapes, results, strict=True)
        ]
        return found, shown


@dataclass(frozen=True, kw_only=True)
class StrongCommand(ScalingCommand):
    """Time the same training step on more and more ranks, split in every known way."""

    scaling = "strong"

    def grown(self, ranks: int) -> TrainConfig:
        return self.settings

    def same_work(self, points: Sequence[Point]) -> list[list[Point]]:
        return [list(points)]


@dataclass(frozen=True, kw_only=True)
class WeakCommand(ScalingCommand):
    """Time training steps whose work grows with the ranks, split in every known way."""

    grow: Grow = "tokens"
    """What grows with P ranks: the global batch, P times; or the width. Hidden size and heads then grow by m, the
    largest number with m*m dividing P, and the global batch by P/(m*m): the parameters, and so the products a rank
    computes, grow P times altogether."""

    scaling = "weak"

    def grown(self, ranks: int) -> TrainConfig:
        recipe = self.settings
        if self.grow == "tokens":
            return _larger(recipe, batch=ranks)
        width = max(m for m in range(1, math.isqrt(ranks) + 1) if ranks % m**2 == 0)
        return _larger(recipe, batch=ranks // width**2, width=width)

    def same_work(self, points: Sequence[Point]) -> list[list[Point]]:
        numbers = sorted({point.step.ranks for point in points})
        return [[point for point in points if point.step.ranks == number] for number in numbers]


def _larger(recipe: TrainConfig, *, batch: int, width: int = 1) -> TrainConfig:
    model, config = recipe.model, recipe.model.config(recipe.data)
    if width > 1:
        inner = None if model.inner is None else model.inner * width
        model = dataclasses.replace(model, hidden=config.hidden * width, heads=config.heads * width, inner=inner)
    more = dataclasses.replace(recipe.batch, global_batch=recipe.batch.global_batch * batch)
    return dataclasses.replace(recipe, model=model, batch=more)


def numbers(text: str) -> list[int]:
    """Reads "1,2,4". Raises ValueError for what is no whole number of at least 1."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"--ranks are whole numbers of at least 1 with commas, like 1,2,4. Got {text!r}.")
    return sorted({int(part) for part in parts})

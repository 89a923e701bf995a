"""`bench strong` and `bench weak`: the training step on growing numbers of ranks, split in every known way."""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.distributed import process_group
from tensor3d.distributed.object_collectives import run_on_rank0
from tools import pretrain
from tools.bench.harness.command import recipe_among
from tools.bench.harness.processes import Group, LocalGroup, TorchrunGroup, disconnect
from tools.bench.harness.scaling_plots import KINDS, check_picture, draw, kinds_of, save_picture
from tools.bench.harness.step_trial import (
    LOSS_TOLERANCE,
    CubeFigures,
    RecipeCommand,
    StepTrial,
    check_cube,
    counted,
    loss_difference,
)
from tools.bench.step import deal, measure
from tools.common.cpu import usable_cores
from tools.common.machine import Machine, check_output, format_table
from tools.training.config import TrainConfig

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


def to_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """All figures of each point on one level."""
    base = base_of(points)
    return [
        {
            "kinds": list(point.kinds),
            "global_batch": point.global_batch,
            "hidden": point.hidden,
            "efficiency": efficiency(point, base),
            **dataclasses.asdict(point.step),
        }
        for point in points
    ]


def compute_the_same(groups: Sequence[Sequence[Point]]) -> bool:
    """Whether the first losses agree within each group of points, which have the same weights and packs."""
    return all(loss_difference([point.step for point in group]) <= LOSS_TOLERANCE for group in groups)


HEADER = (
    "box",
    "kind",
    "ranks",
    "packs",
    "hidden",
    "step ms",
    "quartiles",
    "tokens/s",
    "efficiency",
    "collectives",
    "closed form",
    "MiB received",
    "closed form",
    "saved MiB",
    "held MiB",
    "closed form",
    "peak MiB",
    "first loss",
)


def row(point: Point, base: Point) -> tuple[str, ...]:
    """What the table shows of a point, under `HEADER`."""
    step = point.step
    low, high = step.seconds_quartiles
    return (
        step.name,
        ",".join(point.kinds),
        str(step.ranks),
        str(point.global_batch),
        str(point.hidden),
        f"{step.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{step.tokens_per_second:,.0f}",
        f"{efficiency(point, base):.2f}",
        str(step.collectives),
        "equal" if step.collectives_equal else str(step.collectives_closed_form),
        *counted(step.bytes_received, step.bytes_closed_form, step.traffic_equal),
        f"{step.saved_bytes / 2**20:.2f}",
        *counted(step.held_bytes, step.held_closed_form, step.held_equal),
        "-" if step.peak_tensor_bytes is None else f"{step.peak_tensor_bytes / 2**20:.1f}",
        f"{step.first_loss:.6f}",
    )


# ----------------------------------------------------------------------------------------------------------------------
# What one rank does for `bench strong` and `bench weak`: it trains on several boxes of the same ranks, in turns.

P = ParamSpec("P")
R = TypeVar("R")


_PROFILED = 16  # ranks on one machine, up to which profilers of all of them are affordable


class BoxTrials:
    """A training on each of several boxes. Processes are dear, and all boxes of so many ranks can share them.

    Args:
        cube: of one of the shapes.
        corpus: folder of the prepared corpus.
        warmup: steps of each at the start, at least 1.
    """

    def __init__(self, cube: Cube, recipe: TrainConfig, corpus: Path, warmup: int, shapes: Sequence[CubeShape]) -> None:
        peaks = cube.shape.ranks <= _PROFILED
        self._trials = [StepTrial(_cube(shape, cube), recipe, corpus, warmup, peaks=peaks) for shape in shapes]

    def on(
        self, number: int, action: Callable[Concatenate[StepTrial, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """`action` of one of the trainings."""
        return action(self._trials[number], *args, **kwargs)

    def close(self) -> None:
        for trial in self._trials:
            trial.close()


class BoxGroup:
    """One of the boxes of a group, as a group of its own."""

    def __init__(self, ranks: Group[BoxTrials], number: int, shape: CubeShape) -> None:
        self.shape, self._ranks, self._number = shape, ranks, number

    def call(self, action: Callable[Concatenate[StepTrial, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """As `Group.call`."""
        return self._ranks.call(BoxTrials.on, self._number, action, *args, **kwargs)

    def close(self) -> None:
        """Nothing: the ranks belong to all boxes."""


def _cube(shape: CubeShape, like: Cube) -> Cube:
    placed = shape if like.ranks_per_node is None else shape.placed(like.ranks_per_node)
    if placed == like.shape:
        return like
    return Cube(shape.x, shape.y, shape.z, shape.data, device=like.device, wire=placed.wire)


# --- `bench strong` and `bench weak` ----------------------------------------------------------------------------------

Grow = Literal["tokens", "width"]


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
class ScalingCommand(RecipeCommand):
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
    steps: int = 12
    """Steps that are timed, on each box."""
    warmup: int = 2
    """Steps before that, at least 1."""
    rounds: int = 4
    """Turns that each box gets, one box of the same ranks after another; the steps are dealt out over them."""
    threads: int | None = None
    """Of each rank, the same for all numbers of ranks. Default: the cores shared out to the largest number."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY."""
    plot: Path | None = None
    """PNG file of time, traffic and memory against ranks."""

    @abstractmethod
    def grown(self, ranks: int) -> TrainConfig:
        """The recipe for so many ranks. Raises ValueError where it cannot grow so."""

    @abstractmethod
    def same_work(self, points: Sequence[Point]) -> list[list[Point]]:
        """The points in groups that have the same weights and packs."""

    def run(self, arguments: Sequence[str]) -> int:
        tasks, skipped = self.check_scaling(arguments)
        machine = Machine.here()
        launched = process_group.is_launched()
        if not launched:
            pretrain.prepare_corpus(self.training(self.settings), shown=True)
        points: list[Point] = []
        with ExitStack() as stack:
            if launched:
                stack.callback(disconnect)
            for task in tasks:
                points += self.points(task, max(task.ranks for task in tasks), launched=launched)
            shown = not dist.is_initialized() or dist.get_rank() == 0
        agree = self.has_dropout() or compute_the_same(self.same_work(points))
        if shown:
            self.report(arguments, machine, points, skipped)
        if agree:
            return 0
        print("tools.bench: the boxes do not compute the same, so their times are no comparison.", file=sys.stderr)
        return 1

    # --- what to measure --------------------------------------------------------------------------------------------

    def check_scaling(self, arguments: Sequence[str]) -> tuple[list[Task], list[Skipped]]:
        """What to measure and what not, and why. Raises ValueError for what can be seen before any process."""
        if self.recipe != recipe_among(arguments):
            raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {self.recipe}.")
        for name in ("steps", "warmup", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1. Got {getattr(self, name)}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1. Got {self.threads}.")
        check_output(self.output)
        if self.plot is not None:
            check_picture(self.plot)
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
            return list(dict.fromkeys(CubeShape.parse(text) for text in self.cubes.split(","))), []
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

    def training(self, settings: TrainConfig) -> pretrain.Command:
        return self.as_training(settings, corpus=self.corpus)

    def has_dropout(self) -> bool:
        """Ranks draw for themselves: with it boxes cannot be compared by their losses."""
        return self.settings.model.dropout > 0 or self.settings.model.attention_dropout > 0

    # --- measuring --------------------------------------------------------------------------------------------------

    def points(self, task: Task, most: int, *, launched: bool) -> list[Point]:
        """The figures of all boxes of one number of ranks, in processes that end with it.

        Args:
            most: the largest number of ranks.
        """
        corpus = pretrain.corpus_folder(self.training(self.settings))
        make = partial(BoxTrials, recipe=task.recipe, corpus=corpus, warmup=self.warmup, shapes=task.shapes)
        with ExitStack() as stack:
            group: Group[BoxTrials] = self.join(task, make) if launched else self.start(task, make, most)
            stack.callback(group.close)
            boxes = [BoxGroup(group, number, shape) for number, shape in enumerate(task.shapes)]
            shown = not dist.is_initialized() or dist.get_rank() == 0
            results = measure(boxes, deal(self.steps, self.rounds), shown=shown)
        return [
            Point(
                kinds=kinds_of(shape),
                global_batch=task.recipe.batch.global_batch,
                hidden=task.recipe.model.config(task.recipe.data).hidden,
                step=step,
            )
            for shape, step in zip(task.shapes, results, strict=True)
        ]

    def start(self, task: Task, make: partial[BoxTrials], most: int) -> Group[BoxTrials]:
        """Processes on this machine."""
        threads = self.threads or max(1, usable_cores() // most)
        # All numbers of ranks on GPUs or none: figures of different devices are no comparison.
        cuda = torch.cuda.device_count() >= most
        return LocalGroup(task.shapes[0], make, cuda=cuda, cores=threads * task.ranks)

    def join(self, task: Task, make: partial[BoxTrials]) -> Group[BoxTrials]:
        """The processes that torchrun started."""

        def prepared(cube: Cube) -> BoxTrials:
            training = self.training(self.settings)
            run_on_rank0(cube, lambda: pretrain.prepare_corpus(training, shown=cube.rank == 0))
            return make(cube)

        return TorchrunGroup(task.shapes[0], prepared)

    # --- what comes out ---------------------------------------------------------------------------------------------

    def report(
        self, arguments: Sequence[str], machine: Machine, points: Sequence[Point], skipped: Sequence[Skipped]
    ) -> None:
        """The table on the screen, the JSON file and the picture."""
        base = base_of(points)
        print(f"{machine}")
        print(
            f"{self.recipe}: {self.steps} steps a box in {min(self.rounds, self.steps)} rounds, after {self.warmup} to "
            f"warm up; efficiency is to {base.step.name}"
        )
        print("\n".join(format_table(HEADER, [row(point, base) for point in points])))
        for each in skipped:
            print(each)
        if self.has_dropout():
            print("first losses are not compared: dropout differs from box to box (0 compares them)")
        content = {
            "warmup": self.warmup,
            "rounds": deal(self.steps, self.rounds),
            "skipped": [dataclasses.asdict(each) for each in skipped],
            "results": to_json(points),
        }
        self.write(arguments, machine, **content)
        if self.plot is not None:
            save_picture(draw(arguments[0], to_json(points)), self.plot)
            print(f"written: {self.plot}")
        sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class StrongCommand(ScalingCommand):
    """Time the same training step on more and more ranks, split in every known way."""

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

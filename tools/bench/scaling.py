"""`bench strong` and `bench weak`: the training step on growing numbers of ranks, split in every known way."""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from tensor3d import Cube, CubeShape, rendezvous
from tensor3d.agree import on_first_rank
from tools import pretrain
from tools.bench.groups import Group, LocalGroup, World
from tools.bench.machine import Machine, aligned, check_output
from tools.bench.plots import check_picture, draw, save_picture
from tools.bench.scaling_boxes import KINDS, kinds_of
from tools.bench.scaling_figures import HEADER, Point, base_of, compute_the_same, row, to_json
from tools.bench.scaling_trial import BoxGroup, BoxTrials
from tools.bench.step import deal, disconnect, measure, recipe_among
from tools.bench.training import RecipeCommand, check_cube
from tools.cores import usable_cores
from tools.recipe import Recipe

Grow = Literal["tokens", "width"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured on one number of ranks."""

    ranks: int
    recipe: Recipe
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
    def grown(self, ranks: int) -> Recipe:
        """The recipe for so many ranks. Raises ValueError where it cannot grow so."""

    @abstractmethod
    def same_work(self, points: Sequence[Point]) -> list[list[Point]]:
        """The points in groups that have the same weights and packs."""

    def run(self, arguments: Sequence[str]) -> int:
        tasks, skipped = self.check_scaling(arguments)
        machine = Machine.here()
        launched = rendezvous.is_launched()
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
        if rendezvous.is_launched() and len(tasks) > 1:
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

    def training(self, settings: Recipe) -> pretrain.Command:
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
            on_first_rank(cube, lambda: pretrain.prepare_corpus(training, shown=cube.rank == 0))
            return make(cube)

        return World(task.shapes[0], prepared)

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
        print("\n".join(aligned(HEADER, [row(point, base) for point in points])))
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

    def grown(self, ranks: int) -> Recipe:
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

    def grown(self, ranks: int) -> Recipe:
        recipe = self.settings
        if self.grow == "tokens":
            return _larger(recipe, batch=ranks)
        width = max(m for m in range(1, math.isqrt(ranks) + 1) if ranks % m**2 == 0)
        return _larger(recipe, batch=ranks // width**2, width=width)

    def same_work(self, points: Sequence[Point]) -> list[list[Point]]:
        numbers = sorted({point.step.ranks for point in points})
        return [[point for point in points if point.step.ranks == number] for number in numbers]


def _larger(recipe: Recipe, *, batch: int, width: int = 1) -> Recipe:
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

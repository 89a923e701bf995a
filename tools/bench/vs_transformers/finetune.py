"""`bench finetune`: what packing saves in fine-tuning, on the texts and with the model of a recipe.

Three ways to train on the same batches of the same texts: packed; padded, every text with the slots of the
micro-batch's longest, in this project's model; and padded with an attention mask in transformers' model of the same
sizes, where that library is installed and the cube is 1x1x1.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import tyro

from tensor3d import Cube, CubeShape
from tensor3d.distributed import process_group
from tools.bench.harness.command import Subcommand
from tools.bench.harness.processes import LocalGroup
from tools.bench.step import deal
from tools.bench.vs_transformers.contenders import LibraryTrainer
from tools.common.batching import split
from tools.common.cpu import usable_cores
from tools.common.machine import Machine, check_output, format_table, heading, write_json
from tools.finetune.__main__ import TextConfig
from tools.finetune.config import SHIPPED
from tools.finetune.init_model import open_start
from tools.finetune.job import recipe_among
from tools.finetune.tasks import ClassifyTask
from tools.finetune.trainer import FinetuneTrainer, TextStep, steps_of
from tools.training.config import read_recipe
from tools.training.factory import precision

PACKED, PADDED, LIBRARY = "packed", "padded", "transformers"
_SKIP = 1  # the first step of a turn: others had the caches before it
_MANY = 10**9  # epochs: steps without end


@dataclass(frozen=True, kw_only=True)
class FinetuneBenchCommand(Subcommand):
    """Time fine-tuning steps on packed and on padded batches of the same texts, in turns."""

    recipe: tyro.conf.Positional[Path]
    """TOML file of `tools.finetune classify`."""
    output: Path | None = None
    """JSON file for all figures."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    modes: str = ",".join((PACKED, PADDED, LIBRARY))
    """Which of them, with commas; "padded" must be among them, to compare with. "transformers" is left out where it is
    not installed, and on cubes."""
    steps: int = 20
    """Steps that are timed, of each mode."""
    warmup: int = 2
    """Steps before that, at least 1."""
    rounds: int = 5
    """Turns that each mode gets, one mode after another; the steps are dealt out over them."""
    settings: Annotated[TextConfig, tyro.conf.arg(name="")] = field(default_factory=TextConfig)
    """The recipe's values, each of which can be given here."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        path = recipe_among(arguments)
        return cls(
            recipe=tyro.MISSING,
            settings=TextConfig() if path is None else read_recipe(TextConfig, path, shipped=SHIPPED),
        )

    def run(self, arguments: Sequence[str]) -> int:
        modes, shape = self.check()
        machine = Machine.here()
        figures = measure(self, modes, shape)
        print(f"{machine}\n{self.recipe}, cube {shape}, {self.settings.run.batch} texts a step")
        print(f"{self.steps} steps of each mode in {len(deal(self.steps, self.rounds))} rounds")
        print("\n".join(format_table(HEADER, [row(figure) for figure in figures])))
        if self.output is not None:
            recipe = {"recipe": self.settings.to_dict(), "cube": str(shape)}
            results = [dataclasses.asdict(figure) for figure in figures]
            write_json(self.output, {**heading(arguments, machine), **recipe, "results": results})
            print(f"written: {self.output}")
        sys.stdout.flush()
        return 0

    def check(self) -> tuple[list[str], CubeShape]:
        """Modes and cube. Raises ValueError for what can be seen before any process."""
        modes, shape = list(dict.fromkeys(self.modes.split(","))), CubeShape.parse(self.cube, self.data_parallel)
        if not set(modes) <= {PACKED, PADDED, LIBRARY} or PADDED not in modes:
            raise ValueError(f"--modes must be some of packed,padded,transformers, padded among them. Got {modes}.")
        if process_group.is_launched():
            raise ValueError("this benchmark starts its processes itself, on one machine. Call it without torchrun.")
        for name in ("steps", "warmup", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1. Got {getattr(self, name)}.")
        check_output(self.output)
        if LIBRARY in modes and (shape.ranks > 1 or importlib.util.find_spec("transformers") is None):
            modes.remove(LIBRARY)
        return modes, shape


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One step on one rank."""

    seconds: float
    texts: int
    tokens: int
    """Of the texts."""
    slots: int
    """Of the same texts, padded to the longest of their micro-batch."""
    loss: float


class FinetuneTrial:
    """Fine-tuning on one rank in all modes, halted between calls."""

    def __init__(self, cube: Cube, command: FinetuneBenchCommand, modes: Sequence[str], folder: Path) -> None:
        recipe = command.settings
        cube = cube.with_policy(precision(recipe.precision))
        start = open_start(recipe.model, recipe.data.max_length, folder, cube)
        self._task = ClassifyTask(recipe.data, recipe, start.tokenizer, cube)
        self._cube, self._run, self._slots = cube, recipe.run, recipe.run.tokens_per_rank * cube.shape.ranks
        seed = recipe.run.seeds[0]
        self._trainers: dict[str, FinetuneTrainer | LibraryTrainer] = {}
        for mode in modes:
            if mode == LIBRARY:
                self._trainers[mode] = LibraryTrainer(self._task, recipe, start.config, cube.device, self._slots)
            else:
                run = dataclasses.replace(recipe.run, padding="packed" if mode == PACKED else "padded")
                own = dataclasses.replace(recipe, run=run)
                self._trainers[mode] = FinetuneTrainer(
                    self._task, own, cube, start.config, start.weights, seed=seed, steps=_MANY
                )
        self._steps = {mode: steps_of(len(self._task.train), recipe.run.batch, seed, _MANY) for mode in modes}

    def turn(self, mode: str, steps: int) -> list[StepFigures]:
        return [self._step(mode) for _ in range(steps)]

    def close(self) -> None:
        pass

    def _step(self, mode: str) -> StepFigures:
        examples = [self._task.train[place] for place in next(self._steps[mode])]
        lengths = [len(example.text.ids) for example in examples]
        parts = [lengths[part] for part in split(lengths, self._slots, padded=True)]
        begin = time.perf_counter()
        trainer = self._trainers[mode]
        if isinstance(trainer, FinetuneTrainer):
            (metrics,) = trainer.steps([TextStep(index=0, examples=examples)])
            loss = metrics.loss
        else:
            loss = trainer.take(1, examples).loss.item()  # which waits for the device
        if self._cube.device.type == "cuda":
            torch.cuda.synchronize(self._cube.device)
        return StepFigures(
            seconds=time.perf_counter() - begin,
            texts=len(examples),
            tokens=sum(lengths),
            slots=sum(len(part) * max(part) for part in parts),
            loss=loss,
        )


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """One mode."""

    mode: str
    steps: int
    milliseconds: float
    """Of a step; median."""
    texts_per_second: float
    """Median of the rounds; so are the next."""
    tokens_per_second: float
    """Real tokens."""
    padding_ratio: float
    """Slots of the padded batches over their real tokens: the speed-up that is to be had."""
    speed_up: float
    """Over "padded"."""
    speed_up_range: tuple[float, float]
    """The lowest and the highest round."""
    efficiency: float
    """Speed-up over padding ratio."""
    first_loss: float
    """Of the first step: modes with the same weights must agree but for dropout."""


def measure(command: FinetuneBenchCommand, modes: Sequence[str], shape: CubeShape) -> list[ModeFigures]:
    """All modes in turns, in the same processes; every second round runs backwards."""
    turns: dict[str, list[list[StepFigures]]] = {mode: [] for mode in modes}
    first: dict[str, float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        make = partial(FinetuneTrial, command=command, modes=modes, folder=folder)
        group = LocalGroup(shape, make, cuda=torch.cuda.device_count() >= shape.ranks, cores=usable_cores())
        stack.callback(group.close)
        for mode in modes:
            first[mode] = group.call(FinetuneTrial.turn, mode, command.warmup)[0][0].loss
        for number, steps in enumerate(deal(command.steps, command.rounds)):
            for mode in modes if number % 2 == 0 else reversed(modes):
                turns[mode].append(group.call(FinetuneTrial.turn, mode, _SKIP + steps)[0][_SKIP:])
    return [figures(mode, turns[mode], turns[PADDED], first[mode]) for mode in modes]


def figures(
    mode: str, turns: Sequence[list[StepFigures]], padded: Sequence[list[StepFigures]], first_loss: float
) -> ModeFigures:
    """Of turns on the same batches, by round."""
    every = [step for turn in turns for step in turn]
    ratio = sum(step.slots for step in every) / sum(step.tokens for step in every)
    gains = [_seconds(other) / _seconds(turn) for turn, other in zip(turns, padded, strict=True)]
    return ModeFigures(
        mode=mode,
        steps=len(every),
        milliseconds=1e3 * statistics.median(step.seconds for step in every),
        texts_per_second=statistics.median(sum(step.texts for step in turn) / _seconds(turn) for turn in turns),
        tokens_per_second=statistics.median(sum(step.tokens for step in turn) / _seconds(turn) for turn in turns),
        padding_ratio=ratio,
        speed_up=statistics.median(gains),
        speed_up_range=(min(gains), max(gains)),
        efficiency=statistics.median(gains) / ratio,
        first_loss=first_loss,
    )


def _seconds(turn: Sequence[StepFigures]) -> float:
    return sum(step.seconds for step in turn)


HEADER = ("mode", "step ms", "texts/s", "tokens/s", "padding ratio", "speed-up", "by round", "efficiency", "loss")


def row(mode: ModeFigures) -> tuple[str, ...]:
    """What the table shows of a mode, under `HEADER`."""
    return (
        mode.mode,
        f"{mode.milliseconds:.1f}",
        f"{mode.texts_per_second:,.1f}",
        f"{mode.tokens_per_second:,.0f}",
        f"{mode.padding_ratio:.3f}",
        f"{mode.speed_up:.3f}",
        "{:.2f}-{:.2f}".format(*mode.speed_up_range),
        f"{mode.efficiency:.3f}",
        f"{mode.first_loss:.4f}",
    )

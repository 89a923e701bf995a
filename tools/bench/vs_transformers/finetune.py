"""`bench finetune`: what packing saves in fine-tuning, on the texts and with the model of a recipe.

Three ways to train on the same batches of the same texts: packed; padded, every text with the slots of the
micro-batch's longest, in this project's model; and padded with an attention mask in transformers' model of the same
sizes, where that library is installed and the cube is 1x1x1.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.bert import BertConfig
from models.bert.huggingface.config import settings_of
from tensor3d import Cube, CubeShape
from tools.bench.harness.benchmark import OWN_PROCESSES, Benchmark, Count, Report, listed
from tools.bench.harness.figures import Column, as_json, deal, flat, spread, table
from tools.bench.harness.processes import Trial, start, take_case_turns
from tools.common.cli import recipe_among
from tools.common.workers import split
from tools.finetune.__main__ import TextConfig
from tools.finetune.config import SHIPPED, FinetuneConfig
from tools.finetune.init_model import open_start
from tools.finetune.tasks import Example
from tools.finetune.text_task import ClassifyTask
from tools.finetune.trainer import FinetuneTrainer, TextStep, steps_of
from tools.training.config import read_recipe
from tools.training.factory import precision

PACKED, PADDED, LIBRARY = "packed", "padded", "transformers"
_MANY = 10**9  # epochs: steps without end


@dataclass(frozen=True, kw_only=True)
class FinetuneBenchCommand(Benchmark[tuple[list[str], CubeShape]]):
    """Time fine-tuning steps on packed and on padded batches of the same texts, in turns."""

    recipe: tyro.conf.Positional[Path]
    """TOML file of `tools.finetune classify`."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    modes: str = ",".join((PACKED, PADDED, LIBRARY))
    """Which of them, with commas; "padded" must be among them, to compare with. "transformers" is left out where it is
    not installed, and on cubes."""
    steps: Count = 20
    """Steps that are timed, of each mode."""
    warmup: Count = 2
    """Steps before that, at least 1."""
    rounds: Count = 5
    """Turns that each mode gets, one mode after another; the steps are dealt out over them."""
    settings: Annotated[TextConfig, tyro.conf.arg(name="")] = field(default_factory=TextConfig)
    """The recipe's values, each of which can be given here."""

    launcher: ClassVar[str | None] = OWN_PROCESSES

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        path = recipe_among(arguments)
        return cls(
            recipe=tyro.MISSING,
            settings=TextConfig() if path is None else read_recipe(TextConfig, path, shipped=SHIPPED),
        )

    def plan(self) -> tuple[list[str], CubeShape]:
        """Modes and cube."""
        modes = listed("--modes", self.modes, (PACKED, PADDED, LIBRARY), needs=PADDED)
        shape = CubeShape.parse(self.cube, self.data_parallel)
        if LIBRARY in modes and (shape.ranks > 1 or importlib.util.find_spec("transformers") is None):
            modes.remove(LIBRARY)
        return modes, shape

    def measure(self, plan: tuple[list[str], CubeShape]) -> Report:
        modes, shape = plan
        found = measure(self, modes, shape)
        lines = [
            f"{self.recipe}, cube {shape}, {self.settings.run.batch} texts a step",
            f"{self.steps} steps of each mode in {len(deal(self.steps, self.rounds))} rounds",
            *table(found),
        ]
        content = {"recipe": self.settings.to_dict(), "cube": str(shape), "results": as_json(found)}
        return Report(lines=lines, content=content)


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


class FinetuneTrial(Trial):
    """Fine-tuning on one rank in all modes, halted between calls."""

    def __init__(self, cube: Cube, command: FinetuneBenchCommand, modes: Sequence[str], folder: Path) -> None:
        recipe = command.settings
        cube = cube.with_policy(precision(recipe.precision))
        pairs = recipe.data.text_b is not None
        start = open_start(recipe.model, recipe.data.max_length, folder, cube, pairs=pairs)
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

    def warm_up(self, steps: int) -> dict[str, float]:
        """So many steps of each mode; the loss of its first."""
        first = {mode: self.sample(mode).loss for mode in self._trainers}
        for mode in self._trainers:
            for _ in range(1, steps):
                self.sample(mode)
        return first

    def sample(self, mode: str) -> StepFigures:
        """A step."""
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

    mode: Annotated[str, Column("mode")]
    steps: int
    milliseconds: Annotated[float, Column("step ms", ".1f")]
    """Of a step; median."""
    texts_per_second: Annotated[float, Column("texts/s", ",.1f")]
    """Median of the rounds; so are the next."""
    tokens_per_second: Annotated[float, Column("tokens/s", ",.0f")]
    """Real tokens."""
    padding_ratio: Annotated[float, Column("padding ratio", ".3f")]
    """Slots of the padded batches over their real tokens: the speed-up that is to be had."""
    speed_up: Annotated[float, Column("speed-up", ".3f")]
    """Over "padded"."""
    speed_up_range: Annotated[tuple[float, float], Column("by round", ".2f")]
    """The lowest and the highest round."""
    efficiency: Annotated[float, Column("efficiency", ".3f")]
    """Speed-up over padding ratio."""
    first_loss: Annotated[float, Column("loss", ".4f")]
    """Of the first step: modes with the same weights must agree but for dropout."""


def measure(command: FinetuneBenchCommand, modes: Sequence[str], shape: CubeShape) -> list[ModeFigures]:
    """All modes in turns, in the same processes; every second round runs backwards."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (group,) = start([shape], partial(FinetuneTrial, command=command, modes=modes, folder=folder), stack)
        first = group.call(FinetuneTrial.warm_up, command.warmup)[0]
        found = take_case_turns(group, {mode: (mode,) for mode in modes}, deal(command.steps, command.rounds))
    turns = {mode: [by_rank[0] for by_rank in mine] for mode, mine in zip(modes, found, strict=True)}
    return [figures(mode, turns[mode], turns[PADDED], first[mode]) for mode in modes]


def figures(
    mode: str, turns: Sequence[list[StepFigures]], padded: Sequence[list[StepFigures]], first_loss: float
) -> ModeFigures:
    """Of turns on the same batches, by round."""
    every = flat(turns)
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
        speed_up_range=spread(gains),
        efficiency=statistics.median(gains) / ratio,
        first_loss=first_loss,
    )


def _seconds(turn: Sequence[StepFigures]) -> float:
    return sum(step.seconds for step in turn)


# --- transformers' BertForSequenceClassification on padded batches with an attention mask: what packing is measured by


@dataclass(frozen=True, kw_only=True, eq=False)
class LibraryStep:
    loss: Tensor


class LibraryTrainer:
    """The library's model of the same configuration, with random weights; torch's fused AdamW, the same clipping.

    Args:
        slots: of a micro-batch, as the other modes have it.

    Raises:
        ValueError: the modern encoder or norms before the blocks, which the library's BERT does not have.
    """

    def __init__(
        self, task: ClassifyTask, recipe: FinetuneConfig, config: BertConfig, device: torch.device, slots: int
    ) -> None:
        from transformers import BertConfig as LibraryConfig
        from transformers import BertForSequenceClassification

        if config.encoder != "classic" or config.norm != "post":
            raise ValueError(
                f'transformers has no BERT with encoder="{config.encoder}" and norm="{config.norm}". '
                'Leave "transformers" out of --modes.'
            )
        settings = settings_of(config, "BertForSequenceClassification", "fp32", labels=task.labels, problem="classify")
        self._model = BertForSequenceClassification(LibraryConfig.from_dict(settings)).to(device).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=recipe.optimizer.lr,
            weight_decay=recipe.optimizer.weight_decay,
            fused=True,
        )
        self._clip, self._slots, self._device = recipe.optimizer.clip, slots, device
        self._type = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision.compute)

    def take(self, step: int, examples: Sequence[Example]) -> LibraryStep:
        total = torch.zeros((), device=self._device)
        for part in split([len(example.text.ids) for example in examples], self._slots, padded=True):
            loss = self._loss(examples[part], len(examples))
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return LibraryStep(loss=total)

    def _loss(self, examples: Sequence[Example], texts: int) -> Tensor:
        ids, types = (
            pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(self._device)
            for rows in ([e.text.ids for e in examples], [e.text.types for e in examples])
        )
        lengths = torch.tensor([len(example.text.ids) for example in examples], device=self._device)
        mask = torch.arange(ids.shape[1], device=self._device) < lengths.unsqueeze(1)
        labels = torch.tensor(np.array([example.target for example in examples]), device=self._device)
        with torch.autocast(self._device.type, self._type or torch.bfloat16, enabled=self._type is not None):
            output = self._model(input_ids=ids, token_type_ids=types, attention_mask=mask.long(), labels=labels)
        loss: Tensor = output.loss * (len(examples) / texts)
        return loss

"""One model on its way through the steps of fine-tuning."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.bert import BertConfig
from models.bert.huggingface import LoadReport, WeightSource
from models.bert.text_batches import TextBatch, collate_texts
from tensor3d import Cube, Dropout3D, check_parameters, keep_gathered
from tensor3d.checkpoint import Checkpoints
from tensor3d.data.array_utils import random_bits
from tensor3d.ops.seeds import mix
from tensor3d.optim.adam import ShardedAdamBase
from tools.common.workers import split_groups
from tools.finetune.config import FinetuneConfig, OptimizerSection
from tools.finetune.gradient_cache import CachedGradients
from tools.finetune.tasks import Evaluation, Example, FinetuneTask, WholeStepTask
from tools.training.factory import learning_rate, make_optimizer, make_scaler
from tools.training.step import PendingStep, StepScalars
from tools.training.trainer import Trainer

# --- Which texts meet in a step: the same ones on any cube ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class TextStep:
    """The texts of a step."""

    index: int
    """From 0."""
    examples: Sequence[Example]

    @property
    def sequences(self) -> int:
        return len(self.examples)


def epoch_order(examples: int, seed: int, epoch: int) -> list[int]:
    """The order of the examples in an epoch, from 0: a function of its arguments alone."""
    bits = random_bits(mix(seed, epoch), np.arange(examples))
    order: list[int] = np.argsort(bits, kind="stable").tolist()
    return order


def steps_of(examples: int, batch: int, seed: int, epochs: int) -> Iterator[list[int]]:
    """The examples of each step of all epochs. The last step of an epoch may have fewer."""
    for epoch in range(epochs):
        order = epoch_order(examples, seed, epoch)
        for start in range(0, examples, batch):
            yield order[start : start + batch]


def count_steps(examples: int, batch: int, epochs: int) -> int:
    return epochs * -(-examples // batch)


# --- What is learnt ---------------------------------------------------------------------------------------------------


class TextObjective:
    """The loss of a task, of texts in micro-batches of so many token slots.

    Args:
        slots: of a micro-batch, over all ranks.
        padded: every text has the slots of the micro-batch's longest.
    """

    sums = 1
    are_parts = False

    def __init__(self, task: FinetuneTask, model: nn.Module, cube: Cube, *, slots: int, padded: bool) -> None:
        self._task, self._model, self._cube, self._slots, self._padded = task, model, cube, slots, padded

    def parts(self, batch: TextStep) -> Sequence[slice]:
        return split_groups([example.lengths for example in batch.examples], self._slots, padded=self._padded)

    def loss(self, batch: TextStep, part: slice) -> tuple[Tensor, Tensor]:
        own = batch.examples[part]
        targets = sum(example.targets for example in batch.examples)
        loss = self._task.loss(self._model, self._laid(own), own, targets)
        return loss, loss.detach().reshape(1)

    def _laid(self, examples: Sequence[Example]) -> TextBatch:
        return collate_texts([text for each in examples for text in each.texts], self._cube, alone=self._padded)


class WholeStepObjective(TextObjective):
    """The loss of a task of which each text is compared with all others of its step, in whatever micro-batches.

    It is the same on any cube and for any number of token slots: where they are several, gradients are cached.
    """

    _task: WholeStepTask

    def parts(self, batch: TextStep) -> Sequence[slice]:
        self._parts = super().parts(batch) if self._task.caches else [slice(0, len(batch.examples))]
        self._cached: CachedGradients[slice] | None = None
        return self._parts

    def loss(self, batch: TextStep, part: slice) -> tuple[Tensor, Tensor]:
        def vectors(some: slice) -> Tensor:
            return self._task.vectors(self._model, self._laid(batch.examples[some]))

        def of_step(found: Tensor) -> Tensor:
            return self._task.step_loss(found, batch.examples)

        if len(self._parts) == 1:
            loss = of_step(vectors(part))
            return loss, loss.detach().reshape(1)
        if self._cached is None:
            self._cached = CachedGradients.of(self._parts, vectors, of_step, self._cube.device)
        index, whole = self._parts.index(part), self._cached.loss.reshape(1)
        return self._cached.surrogate(index, part, vectors), whole if index == 0 else torch.zeros_like(whole)


# --- One model on its way through the steps of fine-tuning ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextStepMetrics:
    """One step."""

    step: int
    """From 1."""
    loss: float
    """Of the whole step, the same on every rank."""
    gradient_norm: float
    """Before clipping, without the loss scale."""
    learning_rate: float
    loss_scale: float
    """By which the loss was multiplied; 1 without fp16."""
    skipped: bool
    """Whether the step changed nothing, because a gradient was not finite; with fp16 alone."""
    texts: int
    tokens: int
    """Of the texts, without padding."""
    seconds: float
    """In steps so far, without evaluations."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class TextEvaluation:
    """What a task has measured after a step."""

    step: int
    found: Evaluation
    metric: str
    """By which evaluations are compared; higher is better."""

    @property
    def cost(self) -> float:
        return -self.found.metrics[self.metric]

    def record(self) -> dict[str, Any]:
        return {"step": self.step, **self.found.metrics}


class FinetuneTrainer(Trainer[TextStep, TextStepMetrics]):
    """The model of one seed, its optimiser and its learning rate. Every rank makes one at the same time.

    Args:
        cube: computes in the types of the recipe.
        weights: what the model is filled with, but for its head. None: random ones.
        steps: of the whole training.

    Raises:
        ValueError: sizes that do not divide on the cube, weights that do not fit.
    """

    def __init__(
        self,
        task: FinetuneTask,
        recipe: FinetuneConfig,
        cube: Cube,
        config: BertConfig,
        weights: WeightSource | None,
        *,
        seed: int,
        steps: int,
    ) -> None:
        self.task, self.recipe, self.seed, self.total_steps = task, recipe, seed, steps
        cube.manual_seed(seed)
        self.model: nn.Module = task.make_model(config, cube)
        if weights is not None and recipe.model.dropout is None:
            _take_dropout(self.model, weights, cube)
        self.filled: LoadReport | None = None if weights is None else _for_task(weights, task).fill(self.model, cube)
        """What of the model came from the weights."""
        _freeze(self.model, config.layers, recipe.model.frozen_layers)
        check_parameters(self.model.parameters(), cube)
        slots, padded = recipe.run.tokens_per_rank * cube.shape.ranks, recipe.run.padding == "padded"
        if recipe.model.keep_budget:
            keep_gathered(self.model, cube, slots, recipe.model.keep_budget * 2**20)
        objective = WholeStepObjective if isinstance(task, WholeStepTask) else TextObjective
        super().__init__(
            self.model,
            _make_optimizer(self.model, recipe.optimizer, cube, config.layers),
            make_scaler(recipe, cube),
            cube,
            objective(task, self.model, cube, slots=slots, padded=padded),
            rate=learning_rate(recipe.optimizer, steps),
            clip=recipe.optimizer.clip,
            patience=recipe.run.patience,
            skips=False,
        )
        self.seconds = 0.0
        """In steps, without evaluations."""
        self.best: Evaluation | None = None
        self.model.train()

    def batches(self) -> AbstractContextManager[Iterable[TextStep]]:
        train, run = self.task.train, self.recipe.run
        order = steps_of(len(train), run.batch, self.seed, run.epochs)
        steps = enumerate(order)
        return nullcontext(TextStep(index=i, examples=[train[place] for place in places]) for i, places in steps)

    def metrics(self, taken: PendingStep[TextStep], numbers: StepScalars) -> TextStepMetrics:
        step, loss, optimizer = taken.step.index + 1, numbers.loss, self.recipe.optimizer
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"seed {self.seed}: the loss of step {step} is {loss}. Lower optimizer.lr, which is {optimizer.lr:g}, "
                f"or raise optimizer.warmup, which is {optimizer.warmup:g}."
            )
        self.seconds += sum(taken.lap.seconds().values())
        return TextStepMetrics(
            step=step,
            loss=loss,
            gradient_norm=numbers.gradient_norm,
            learning_rate=taken.learning_rate,
            loss_scale=numbers.loss_scale,
            skipped=bool(numbers.found_inf),
            texts=taken.step.sequences,
            tokens=sum(example.tokens for example in taken.step.examples),
            seconds=self.seconds,
        )

    def evaluate(self) -> TextEvaluation:
        """Raises FloatingPointError where the model says what is no number; on every rank."""
        step, found = self.state.step, self.task.evaluate(self.model)
        wrong = [name for name, value in found.metrics.items() if not math.isfinite(value)]
        if wrong:
            raise FloatingPointError(
                f"seed {self.seed}: {wrong[0]} after step {step} is {found.metrics[wrong[0]]}, so the model says what "
                "is no number. Lower optimizer.lr."
            )
        if self.best is None or found.metrics[self.task.best] > self.best.metrics[self.task.best]:
            self.best = found
        return TextEvaluation(step=step, found=found, metric=self.task.best)

    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        """The weights of the best evaluation, which is the last one."""
        assert self.best is not None, "saved with the best evaluation"
        # A new optimiser remembers nothing: what is kept is to be used, not to be trained on from this very step.
        weights_alone = make_optimizer(self.model, self.recipe.optimizer, self.cube, (0.0, 0.0))
        progress = {"seed": self.seed, "metrics": self.best.metrics}
        checkpoints.save(self.state.step, self.model, weights_alone, progress, wait=wait)


def depth_of(name: str, layers: int) -> int:
    """Of a parameter of a model with heads: 0 in the embeddings and in what all layers share, 1 in the first layer, and
    so on; heads come last."""
    if name.startswith(("bert.embeddings.", "bert.relative.", "bert.relative_bias.")):
        return 0
    if name.startswith("bert.convolution."):  # whose sum with the first layer's result the others read
        return 1
    found = re.match(r"bert\.layers\.(\d+)\.", name)
    return int(found[1]) + 1 if found else layers + 1


def _make_optimizer(model: nn.Module, recipe: OptimizerSection, cube: Cube, layers: int) -> ShardedAdamBase:
    """With the groups of `make_optimizer` by depth, each of which has a share of the learning rate (`layer_decay`)."""
    made = make_optimizer(model, recipe, cube, (recipe.beta1, recipe.beta2))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if recipe.layer_decay == 1:
        return made
    groups, made.param_groups[:] = list(made.param_groups), []
    for group in groups:
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(depth_of(names[id(parameter)], layers), []).append(parameter)
        for depth, some in sorted(by_depth.items()):
            scale = recipe.layer_decay ** (layers + 1 - depth)
            made.param_groups.append({**group, "params": some, "lr_scale": scale})
    return made


def _freeze(model: nn.Module, layers: int, frozen: int) -> None:
    if frozen > layers:
        raise ValueError(f"model.frozen_layers must be at most {layers}, the model's layers. Got {frozen}.")
    for name, parameter in model.named_parameters():
        if frozen and depth_of(name, layers) <= frozen:
            parameter.requires_grad_(False)


def _take_dropout(model: nn.Module, weights: WeightSource, cube: Cube) -> None:
    """Of what the head reads: as the folder says."""
    head = next((name for name, _ in model.named_children() if name in ("classifier", "answers", "tags")), None)
    probability = None if head is None else weights.head_dropout(head)
    if probability is not None:
        model.dropout = Dropout3D(probability, cube)


def _for_task(weights: WeightSource, task: FinetuneTask) -> WeightSource:
    """Without the head of another task: one that knows other classes is of no use, and may have another size."""
    facts = task.facts()
    if (weights.problem, weights.labels) == (facts.problem, facts.labels):
        return weights
    # A cross-encoder of a Hugging Face folder says that it is for regression.
    if facts.problem == "rank" and weights.problem == "regress" and weights.outputs == 1:
        return weights
    fitting = copy.copy(weights)
    fitting.heads = tuple(head for head in weights.heads if head not in ("classifier", "answers", "tags"))
    return fitting

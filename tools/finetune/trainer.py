"""One model on its way through the steps of fine-tuning."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from models.bert import BertConfig
from models.bert.huggingface import LoadReport, WeightSource
from models.bert.text_batches import collate_texts
from tensor3d import Cube, check_parameters, clip_gradients
from tensor3d.data.array_utils import random_bits
from tensor3d.distributed.seeds import mix
from tools.common.batching import split
from tools.finetune.config import FinetuneConfig
from tools.finetune.tasks import Example, FinetuneTask
from tools.training.factory import learning_rate, make_optimizer, make_scaler

# --- Which texts meet in a step: the same ones on any cube ------------------------------------------------------------


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


# --- One model on its way through the steps of fine-tuning ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingStep:
    """A step that the device may still be at."""

    step: int
    """From 1."""
    loss: Tensor
    """Scalar: of the whole step, the same on every rank."""
    gradient_norm: Tensor
    """Scalar: before clipping."""
    learning_rate: float
    texts: int
    tokens: int
    """Of the texts, without padding."""


class Trainer:
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
        self.task, self.recipe, self.cube = task, recipe, cube
        cube.manual_seed(seed)
        self.model: nn.Module = task.make_model(config, cube)
        self.filled: LoadReport | None = None if weights is None else _for_task(weights, task).fill(self.model, cube)
        """What of the model came from the weights."""
        check_parameters(self.model.parameters(), cube)
        betas = (recipe.optimizer.beta1, recipe.optimizer.beta2)
        self.optimizer = make_optimizer(self.model, recipe.optimizer, cube, betas)
        self._scaler = make_scaler(recipe, cube)
        self._rate = learning_rate(recipe.optimizer, steps)
        self._slots = recipe.run.tokens_per_rank * cube.shape.ranks
        self.model.train()

    def take(self, step: int, examples: Sequence[Example]) -> PendingStep:
        """Does a step, from 1, with these examples; the host does not wait for the device."""
        rate = self._rate.at(step - 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._forward_backward(examples)
        scale = None if self._scaler is None else self._scaler.scale
        norm = clip_gradients(self.model.parameters(), self.recipe.optimizer.clip, self.cube, loss_scale=scale)
        if self._scaler is not None:
            self.optimizer.found_inf = norm.found_inf
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update(norm.found_inf)
        return PendingStep(
            step=step,
            loss=loss,
            gradient_norm=norm.total,
            learning_rate=rate,
            texts=len(examples),
            tokens=sum(len(example.text.ids) for example in examples),
        )

    def _forward_backward(self, examples: Sequence[Example]) -> Tensor:
        """All micro-batches; the sum of their losses."""
        padded = self.recipe.run.padding == "padded"
        parts = split([len(example.text.ids) for example in examples], self._slots, padded=padded)
        total = torch.zeros((), device=self.cube.device)
        for number, part in enumerate(parts, start=1):
            own = examples[part]
            laid = collate_texts([example.text for example in own], self.cube, alone=padded)
            loss = self.task.loss(self.model, laid, own, len(examples))
            total = total + loss.detach()
            with nullcontext() if number == len(parts) else self.cube.no_sync():
                (loss if self._scaler is None else self._scaler.scaled(loss)).backward()
        return total


def _for_task(weights: WeightSource, task: FinetuneTask) -> WeightSource:
    """Without the head of another task: one that knows other classes is of no use, and may have another size."""
    facts = task.facts()
    if (weights.problem, weights.labels) == (facts.problem, facts.labels):
        return weights
    fitting = copy.copy(weights)
    fitting.heads = tuple(head for head in weights.heads if head not in ("classifier", "answers"))
    return fitting

"""What the fine-tuning loop needs to know of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from models.bert import BertConfig
from models.bert.texts import LaidTexts, Text
from tensor3d import Cube


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A text to train on."""

    text: Text
    target: Any
    """What the task wants to hear of it."""


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What the folder of a fine-tuned model says of its task."""

    problem: str
    """"classify", "regress" or "answer"."""
    labels: tuple[str, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON: max_length and whatever else predictions need."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """How good a model is on dev, and what it said there. The same on every rank."""

    metrics: dict[str, float]
    """All of them; none is nan."""
    outputs: Mapping[str, Any]
    """What the model says, by the names of those of the task's `parts` that were measured."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found on dev and is needed to use the model, instead of the same names in `TaskFacts.more`."""


class Task(Protocol):
    """Texts with targets, the model that learns them, and how good it is.

    Every rank has the same task and makes the same calls in the same order. A task does not change.
    """

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What an example is: "texts", or "windows" of them."""
        ...

    @property
    def train(self) -> Sequence[Example]: ...

    @property
    def best(self) -> str:
        """The metric by which the best evaluation is known; higher is better."""
        ...

    @property
    def truncated(self) -> int:
        """Texts whose end is left out, as they are too long."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What else is to be told of the files, a line each."""
        ...

    @property
    def parts(self) -> Sequence[str]:
        """What is predicted at the end: "dev", and "test" where there is one."""
        ...

    def make_model(self, config: BertConfig, cube: Cube) -> nn.Module:
        """The model, with its head, not yet filled with pre-trained weights."""
        ...

    def loss(self, model: Any, laid: LaidTexts, examples: Sequence[Example], texts: int) -> Tensor:
        """The loss of a micro-batch as its part of a step, the same on every rank.

        Args:
            laid: the texts of `examples`, in their order.
            texts: of the whole step.
        """
        ...

    def outputs(self, model: Any, part: str) -> Any:
        """What the model says of a part, the same on every rank."""
        ...

    def evaluate(self, model: Any) -> Evaluation:
        """How good the model is."""
        ...

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """Every rank calls it; the first writes files into the folder, which exists, and returns their paths.

        Args:
            best: with the outputs of all parts.
        """
        ...

    def facts(self) -> TaskFacts: ...

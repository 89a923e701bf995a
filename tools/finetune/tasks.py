"""What a task of fine-tuning is (`FinetuneTask`), and what tasks share. They are in `*_task.py`, and all commands in
`COMMANDS` of `__main__.py`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from models.bert import BertConfig
from models.bert.huggingface import WeightSource
from models.bert.text_batches import EncodedText, TextBatch
from tensor3d import Cube
from tools.common.files import write_file
from tools.finetune.config import FinetuneConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A text to train on, or several that are learnt together, and are not torn apart."""

    text: EncodedText
    target: Any
    """What the task wants to hear of it."""
    others: Sequence[EncodedText] = ()
    """Further texts, such as the other passages of a query, or the second one of a pair of sentences."""
    targets: float = 1
    """Those that the loss is the mean of: one of a text, or the weight of its class, or one of each word that has a
    tag."""

    @property
    def texts(self) -> Sequence[EncodedText]:
        return (self.text, *self.others)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(text.ids) for text in self.texts]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What the folder of a fine-tuned model says of its task."""

    problem: str
    """"classify", "labels", "regress", "answer", "tag", "rank" or "embed"."""
    labels: tuple[str, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON: max_length and whatever else predictions need."""
    files: Callable[[BertConfig], Mapping[str, Any]] = field(default=lambda _: {}, repr=False)
    """What else lies in the folder of such a model, by name: JSON, too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """How good a model is on dev, and what it said there. The same on every rank."""

    metrics: dict[str, float]
    """All of them; none is nan."""
    outputs: Mapping[str, Any]
    """What the model says, by the names of those of the task's `parts` that were measured."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found on dev and is needed to use the model, instead of the same names in `TaskFacts.more`."""


class FinetuneTask(Protocol):
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

    def loss(self, model: Any, laid: TextBatch, examples: Sequence[Example], targets: float) -> Tensor:
        """The loss of a micro-batch as its part of a step, the same on every rank.

        Args:
            laid: the texts of `examples`, in their order, those of one behind another.
            targets: of all examples of the whole step.
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


@runtime_checkable
class WholeStepTask(FinetuneTask, Protocol):
    """A task whose loss is one of all vectors of a step, as each text is compared with all others."""

    caches: bool
    """Whether a step of several micro-batches is done with gradient caching. Else it is one, however large."""

    def vectors(self, model: Any, laid: TextBatch) -> Tensor:
        """(texts, H), the same on every rank, with a graph where one is kept."""
        ...

    def step_loss(self, vectors: Tensor, examples: Sequence[Example]) -> Tensor:
        """Of the vectors of all texts of all examples of a step, computed on every rank alike."""
        ...


@runtime_checkable
class PartsTask(FinetuneTask, Protocol):
    """A task whose model may begin with more than the encoder's folder has."""

    def weights_of(self, source: WeightSource) -> WeightSource:
        """What its model is filled with.

        Args:
            source: weights of the encoder's folder.

        Raises:
            ValueError: what is to be there is not.
        """
        ...


@runtime_checkable
class ComparedTask(FinetuneTask, Protocol):
    """A task that knows what a model says that has learnt nothing."""

    def doubts(self, best: Evaluation) -> Sequence[str]:
        """Why the model is not to be trusted, a line each: it says the same of everything, or nothing better than
        that. Of the best evaluation."""
        ...


# --- What tasks share -------------------------------------------------------------------------------------------------


def remedy(recipe: FinetuneConfig) -> str:
    """What to do about a model that has learnt nothing."""
    rate, fresh = recipe.optimizer.lr, recipe.model.start_from is None
    if fresh and rate < _FRESH_RATE:
        return (
            f"It began with random weights, which optimizer.lr = {rate:g} hardly moves: try --optimizer.lr 1e-3, and "
            "more of run.epochs."
        )
    return "See that labels and columns are right; then try more of run.epochs, or another optimizer.lr."


_FRESH_RATE = 3e-4  # below it small models with random weights learn little in some epochs


TEST = "test_"


def finite(numbers: Tensor, named: str) -> Tensor:
    """The same. Raises FloatingPointError for what is no answer: of nan the largest is class 0, and metrics of that are
    numbers like any others."""
    if not numbers.isfinite().all():
        raise FloatingPointError(f"the model's {named} are not finite: its weights are spoilt. Lower optimizer.lr.")
    return numbers


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Numbers by their value, so that class 10 follows class 9; other labels as text, but with the whole numbers in
    them by their value too, as in LABEL_10.

    Raises:
        ValueError: two labels that are one in two spellings: `1` and `1.0`, JSON's `true` and "True", or letters with
            and without a character that nobody sees.
    """
    found = set(labels)
    are_numbers = all(re.fullmatch(r"[+-]?\d{1,40}(?:\.\d{1,40})?", label, re.ASCII) for label in found)
    read: dict[object, str] = {}
    for label in sorted(found):
        seen = "".join(part for part in unicodedata.normalize("NFC", label) if unicodedata.category(part) != "Cf")
        seen = seen.lower() if seen.lower() in ("true", "false") else seen  # of JSON, Python and spreadsheets
        if (other := read.setdefault(Fraction(label) if are_numbers else seen, label)) != label:
            raise ValueError(
                f"the labels {other!a} and {label!a} are one label in two spellings, and would be two classes. Write "
                "one of them throughout."
            )
    if all(re.fullmatch(r"[+-]?\d+", label, re.ASCII) for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    parts = {label: re.split(r"(\d+)", label, flags=re.ASCII) for label in found}  # text, number, text, ...
    natural = {
        label: [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(each)]
        for label, each in parts.items()
    }
    return tuple(sorted(found, key=lambda label: (natural[label], label)))


def write_table(path: Path, head: str, lines: Sequence[str]) -> None:
    write_file(path, "\n".join([head, *lines, ""]))

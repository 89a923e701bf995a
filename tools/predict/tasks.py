"""What each kind of question to a model does, from queries to results; and the simplest one: classes of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from models.bert.config import BertConfig
from models.bert.model import BertForPreTraining, BertModel
from models.bert.tasks import BertForSequenceClassification, class_logits
from models.bert.text_batches import EncodedText
from tensor3d import Cube
from tools.corpus.tokenizers.base import UnknownText
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import Classified, Labelled, Valued
from tools.predict.text_encoder import TextEncoder

TaskName = Literal["fill-mask", "score", "classify", "answer", "tag", "rank", "embed"]
ClassProblem = Literal["classify", "labels", "regress"]
P = TypeVar("P")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Ready(Generic[P]):
    """A query as its task computes with it."""

    content: P
    tokens: int
    """What it adds to a batch."""


class PredictTask(ABC, Generic[P, R_co]):
    """One kind of question, with the model that answers it."""

    fields: Fields
    config: BertConfig
    cube: Cube
    truncated: int = 0
    """Texts so far of which a part was left out."""
    named: int = 0
    """Texts so far with the name of a special token in them."""
    unknown: UnknownText = UnknownText()
    """How much of the texts so far the tokenizer has no pieces for."""

    @property
    def findings(self) -> str:
        """What is to be told at the end of all texts, behind what else is."""
        return ""

    @abstractmethod
    def ready(self, queries: Sequence[Query]) -> list[Ready[P] | InputProblem]:
        """What is computed with, or why a query cannot be answered; the same on every rank."""

    @abstractmethod
    def results(self, batch: Sequence[P]) -> Sequence[R_co]:
        """Of a batch; every rank calls it at the same time with the same one."""


class TextTask(PredictTask[EncodedText, R_co]):
    """A task whose queries are one sequence each."""

    def __init__(
        self, model: BertForPreTraining | BertForSequenceClassification | BertModel, reader: TextEncoder
    ) -> None:
        self.config, self.cube = model.config, model.cube
        # A reader that refuses says so of one text of many; here each has its own problem.
        self.refuses = reader.too_long == "refuse"
        self.reader = TextEncoder(reader.tokenizer, reader.max_length)

    def ready(self, queries: Sequence[Query]) -> list[Ready[EncodedText] | InputProblem]:
        both = [query.second for query in queries if query.second is not None]
        encoded = self.reader.encode([*(query.first for query in queries), *both])
        self.named, self.unknown = self.reader.named, self.reader.unknown
        seconds = iter(encoded[len(queries) :])
        return [
            self._ready(query, first, next(seconds) if query.second is not None else None)
            for query, first in zip(queries, encoded, strict=False)
        ]

    def _ready(
        self, query: Query, first: list[int], second: list[int] | None = None
    ) -> Ready[EncodedText] | InputProblem:
        for name, ids in ((self.fields.first, first), (self.fields.second, second)):
            if ids is not None and not ids:
                return problem_of(query, f'"{name}" has no token. Leave it out, or write something.')
        if second is not None and not self.reader.tokenizer.layout.pairs:
            return problem_of(query, "the tokenizer's template does not say how two texts become one sequence.")
        tokens = self.reader.tokenizer.special_tokens(pair=second is not None) + len(first) + len(second or ())
        if second is not None and not self.config.has_type(self.reader.tokenizer.layout.second_type):
            return problem_of(query, f"the model has types below {self.config.types}, and cannot tell two texts apart.")
        if self.refuses and tokens > self.reader.max_length:
            return problem_of(
                query,
                f"{tokens} tokens with the special ones, and the model has places for {self.reader.max_length}. "
                "Shorten it, or let its end be left out: --too-long truncate.",
            )
        text = self.reader.sequence(first, second)
        self.truncated = self.reader.truncated
        return Ready(content=text, tokens=len(text.ids))


def problem_of(query: Query, error: str) -> InputProblem:
    return InputProblem(where=query.where, number=query.number, error=error, id=query.id)


class Classify(TextTask[Classified | Labelled | Valued]):
    """The class of a text or a pair, or its classes, or its number.

    Args:
        problem: what the head is for; "labels": several classes may hold at once, each with a probability of its own.
        labels: names of the classes; None for a model that gives a number.
        pairs: whether the model was fine-tuned on pairs; None: nobody knows, and both are read.
        thresholds: of "labels": a label holds from this probability on. None: above a half.

    Raises:
        ValueError: another number of labels than the model has classes.
    """

    fields = Fields(second="text_b")

    def __init__(
        self,
        model: BertForSequenceClassification,
        reader: TextEncoder,
        problem: ClassProblem,
        labels: Sequence[str] | None,
        pairs: bool | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        super().__init__(model, reader)
        if len(labels or ("value",)) != model.outputs:
            raise ValueError(f"a label for each of the model's {model.outputs} outputs is needed. Got {labels}.")
        self.model, self.problem, self.labels = model, problem, tuple(labels or ())
        self.thresholds = None if thresholds is None else dict(zip(self.labels, thresholds, strict=True))
        if pairs is not None:
            kind = "pairs" if pairs else "single texts"
            self.fields = Fields(
                second="text_b" if pairs else None,
                needs_second=pairs,
                reason=f"The model was fine-tuned on {kind}.",
            )

    def results(self, batch: Sequence[EncodedText]) -> list[Classified | Labelled | Valued]:
        logits = finite(class_logits(self.model, batch))
        if self.problem == "regress":
            return [Valued(value=value) for value in logits[:, 0].tolist()]
        chances = logits.sigmoid() if self.problem == "labels" else logits.softmax(1)
        by_label = [dict(zip(self.labels, of_text, strict=True)) for of_text in chances.tolist()]
        if self.problem == "labels":
            return [Labelled(probabilities=probabilities, thresholds=self.thresholds) for probabilities in by_label]
        best = logits.argmax(1).tolist()
        return [
            Classified(label=self.labels[number], probabilities=probabilities)
            for number, probabilities in zip(best, by_label, strict=True)
        ]


def finite(numbers: Tensor) -> Tensor:
    """The same. Raises FloatingPointError for numbers that are no answer, which would only look like one."""
    if not torch.isfinite(numbers).all():
        raise FloatingPointError("what the model says is not finite: its weights are spoilt. Take another checkpoint.")
    return numbers


def names_of(labels: Sequence[str] | None, outputs: int) -> tuple[str, ...]:
    """Labels, or, where a model has none, LABEL_0 and so on, as Hugging Face names them."""
    return tuple(labels) if labels else tuple(f"LABEL_{number}" for number in range(outputs))

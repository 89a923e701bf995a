"""The kinds of question that a model is asked, each from queries to results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert.config import BertConfig
from models.bert.model import BertForPreTraining, BertModel
from models.bert.outputs import Pooling, class_logits, sentence_vectors
from models.bert.tasks import BertForSequenceClassification
from models.bert.texts import Text
from tensor3d import Cube
from tools.predict.queries import Fields, Problem, Query
from tools.predict.results import Classified, Embedded, Labelled, Valued
from tools.reading import Reader

TaskName = Literal["fill-mask", "classify", "answer", "embed"]
ClassProblem = Literal["classify", "labels", "regress"]
P = TypeVar("P")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Ready(Generic[P]):
    """A query as its task computes with it."""

    content: P
    tokens: int
    """What it adds to a batch."""


class Task(ABC, Generic[P, R_co]):
    """One kind of question, with the model that answers it."""

    fields: Fields
    config: BertConfig
    cube: Cube
    truncated: int = 0
    """Texts so far whose end was left out."""

    @abstractmethod
    def ready(self, queries: Sequence[Query]) -> list[Ready[P] | Problem]:
        """What is computed with, or why a query cannot be answered; the same on every rank."""

    @abstractmethod
    def results(self, batch: Sequence[P]) -> Sequence[R_co]:
        """Of a batch; every rank calls it at the same time with the same one."""


class TextTask(Task[Text, R_co]):
    """A task whose queries are one sequence each."""

    def __init__(self, model: BertForPreTraining | BertForSequenceClassification | BertModel, reader: Reader) -> None:
        self.config, self.cube = model.config, model.cube
        # A reader that refuses says so of one text of many; here each has its own problem.
        self.refuses = reader.too_long == "refuse"
        self.reader = Reader(reader.tokenizer, reader.max_length)

    def ready(self, queries: Sequence[Query]) -> list[Ready[Text] | Problem]:
        both = [query.second for query in queries if query.second is not None]
        encoded = self.reader.tokenizer.encode([*(query.first for query in queries), *both])
        seconds = iter(encoded[len(queries) :])
        return [
            self._ready(query, first, next(seconds) if query.second is not None else None)
            for query, first in zip(queries, encoded, strict=False)
        ]

    def _ready(self, query: Query, first: list[int], second: list[int] | None = None) -> Ready[Text] | Problem:
        for name, ids in ((self.fields.first, first), (self.fields.second, second)):
            if ids is not None and not ids:
                return problem_of(query, f'"{name}" has no token. Leave it out, or write something.')
        tokens = len(first) + 2 + (len(second) + 1 if second is not None else 0)
        if self.refuses and tokens > self.reader.max_length:
            return problem_of(
                query,
                f"{tokens} tokens with the special ones, and the model has places for {self.reader.max_length}. "
                "Shorten it, or let its end be left out: --too-long truncate.",
            )
        text = self.reader.sequence(first, second)
        self.truncated = self.reader.truncated
        return Ready(content=text, tokens=len(text.ids))


def problem_of(query: Query, error: str) -> Problem:
    return Problem(where=query.where, number=query.number, error=error, id=query.id)


class Classify(TextTask[Classified | Labelled | Valued]):
    """The class of a text or a pair, or its classes, or its number.

    Args:
        problem: what the head is for; "labels": several classes may hold at once, each with a probability of its own.
        labels: names of the classes; None for a model that gives a number.
        pairs: whether the model was fine-tuned on pairs; None: nobody knows, and both are read.

    Raises:
        ValueError: another number of labels than the model has classes.
    """

    fields = Fields(second="text_b")

    def __init__(
        self,
        model: BertForSequenceClassification,
        reader: Reader,
        problem: ClassProblem,
        labels: Sequence[str] | None,
        pairs: bool | None = None,
    ) -> None:
        super().__init__(model, reader)
        if len(labels or ("value",)) != model.outputs:
            raise ValueError(f"a label for each of the model's {model.outputs} outputs is needed. Got {labels}.")
        self.model, self.problem, self.labels = model, problem, tuple(labels or ())
        if pairs is not None:
            kind = "pairs" if pairs else "single texts"
            self.fields = Fields(
                second="text_b" if pairs else None,
                needs_second=pairs,
                reason=f"The model was fine-tuned on {kind}.",
            )

    def results(self, batch: Sequence[Text]) -> list[Classified | Labelled | Valued]:
        logits = finite(class_logits(self.model, batch))
        if self.problem == "regress":
            return [Valued(value=value) for value in logits[:, 0].tolist()]
        chances = logits.sigmoid() if self.problem == "labels" else logits.softmax(1)
        by_label = [dict(zip(self.labels, of_text, strict=True)) for of_text in chances.tolist()]
        if self.problem == "labels":
            return [Labelled(probabilities=probabilities) for probabilities in by_label]
        best = logits.argmax(1).tolist()
        return [
            Classified(label=self.labels[number], probabilities=probabilities)
            for number, probabilities in zip(best, by_label, strict=True)
        ]


class Embed(TextTask[Embedded]):
    """The vector of a text.

    Args:
        pooling: "mean": of the last hidden states of all its tokens, special ones included; "cls": that of [CLS].
        normalize: whether vectors have length 1.
    """

    fields = Fields()

    def __init__(self, model: BertModel, reader: Reader, pooling: Pooling = "mean", *, normalize: bool = False) -> None:
        super().__init__(model, reader)
        if pooling not in ("mean", "cls"):
            raise ValueError(f'pooling must be "mean" or "cls". Got {pooling!r}.')
        self.model, self.pooling, self.normalize = model, pooling, normalize

    def results(self, batch: Sequence[Text]) -> list[Embedded]:
        vectors: Tensor = finite(sentence_vectors(self.model, batch, self.pooling)).float()
        if self.normalize:
            vectors = F.normalize(vectors, dim=1)
        return [Embedded(vector=vector) for vector in vectors.numpy()]


def finite(numbers: Tensor) -> Tensor:
    """The same. Raises FloatingPointError for numbers that are no answer, which would only look like one."""
    if not torch.isfinite(numbers).all():
        raise FloatingPointError("what the model says is not finite: its weights are spoilt. Take another checkpoint.")
    return numbers


def names_of(labels: Sequence[str] | None, outputs: int) -> tuple[str, ...]:
    """Labels, or, where a model has none, LABEL_0 and so on, as Hugging Face names them."""
    return tuple(labels) if labels else tuple(f"LABEL_{number}" for number in range(outputs))

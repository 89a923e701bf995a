"""The command of each task: its own options."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from models.bert.outputs import Pooling
from tools.corpus.work.files import draft
from tools.predict.command import PredictCommand
from tools.predict.predictor import Predictor
from tools.predict.writing import ArrayOutput, Output


@dataclass(frozen=True, kw_only=True)
class FillMaskCommand(PredictCommand):
    """The likeliest pieces for the places that [MASK], or the tokenizer's own name of it, marks in a text.

    {"text": ...} to {"text": filled, "masks": [[{"piece", "id", "probability"}, ...], ...]}
    """

    task = "fill-mask"
    k: int = 5
    """Pieces for each mask."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {"k": self.k}


@dataclass(frozen=True, kw_only=True)
class ClassifyCommand(PredictCommand):
    """The class of a text or a pair, or its number, by a fine-tuned model.

    {"text": ..., "text_b": ...} to {"label", "probabilities": {label: ...}}, or to {"value"}; of a model by which
    several labels may hold at once to {"labels", "probabilities"}
    """

    task = "classify"
    pairs: bool = False
    """Arguments are pairs of texts. They always are where the model was fine-tuned on pairs."""

    @property
    def two_by_two(self) -> bool:
        return self.pairs

    @property
    def options(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class AnswerCommand(PredictCommand):
    """The part of a context that answers a question. Arguments are QUESTION CONTEXT, as often as wanted.

    {"question": ..., "context": ...} to {"text", "start", "end", "probability", "n_best": [...]}
    """

    task = "answer"
    k: int = 5
    """Answers to each question, at most."""

    @property
    def two_by_two(self) -> bool:
        return True

    @property
    def options(self) -> Mapping[str, Any]:
        return {"k": self.k}


@dataclass(frozen=True, kw_only=True)
class EmbedCommand(PredictCommand):
    """A vector for each text: {"text": ...} to {"vector": [...]}."""

    task = "embed"
    pooling: Pooling = "mean"
    """Of the last hidden states: the mean over all tokens, special ones included, or that of [CLS]."""
    normalize: bool = False
    """Vectors of length 1."""
    output_format: Literal["jsonl", "npy"] = "jsonl"
    """"npy": an array, float32 (texts, hidden size), in --output; a skipped text is a row of nan."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {"pooling": self.pooling, "normalize": self.normalize}

    def check(self) -> None:
        super().check()
        if self.output_format == "npy" and self.output is None:
            raise ValueError("--output-format npy needs a file. Give --output FILE.npy.")

    def _output(self, files: ExitStack, predictor: Predictor[Any]) -> Output:
        if self.output_format == "npy" and self.output is not None:
            columns = predictor.task.config.hidden
            return ArrayOutput(files.enter_context(draft(self.output)), columns)
        return super()._output(files, predictor)

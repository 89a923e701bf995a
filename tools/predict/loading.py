"""From a folder with a model to a predictor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from models.bert.model import BertForPreTraining, BertModel
from models.bert.outputs import Pooling
from models.bert.tasks import BertForQuestionAnswering, BertForSequenceClassification
from tensor3d import Cube
from tensor3d.agree import on_every_rank
from tools.model_folder import tokenizer_of
from tools.predict.filling import FillMask
from tools.predict.predictor import BATCH_TOKENS, Predictor
from tools.predict.results import Answered, Classified, Embedded, Filled, Labelled, Valued
from tools.predict.tasks import Classify, ClassProblem, Embed, Task, TaskName, names_of
from tools.reading import Reader, TooLong

if TYPE_CHECKING:
    from models.bert.pretrained import Weights

_HEADS: dict[str, tuple[str, ...]] = {
    "fill-mask": ("masked_lm",),
    "classify": ("pooler", "classifier"),
    "answer": ("answers",),
    "embed": (),
}
_MAKERS = {
    "fill-mask": "python -m tools.pretrain RECIPE.toml --output DIR; or take a Hugging Face folder of BertForMaskedLM",
    "classify": "python -m tools.finetune classify RECIPE.toml (or regress)",
    "answer": "python -m tools.finetune answer RECIPE.toml",
}
_MOST = 512
"""Tokens, where neither the model nor its folder sets a limit, as with rotary positions."""


@overload
def load(
    folder: Path | str,
    task: Literal["fill-mask"],
    *,
    cube: Cube | None = None,
    k: int = 5,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    batch_tokens: int | None = None,
) -> Predictor[Filled]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["classify"],
    *,
    cube: Cube | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    batch_tokens: int | None = None,
) -> Predictor[Classified | Labelled | Valued]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["answer"],
    *,
    cube: Cube | None = None,
    k: int = 5,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    batch_tokens: int | None = None,
) -> Predictor[Answered]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["embed"],
    *,
    cube: Cube | None = None,
    pooling: Pooling = "mean",
    normalize: bool = False,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    batch_tokens: int | None = None,
) -> Predictor[Embedded]: ...
@overload
def load(
    folder: Path | str,
    task: TaskName,
    *,
    cube: Cube | None = None,
    k: int = 5,
    pooling: Pooling = "mean",
    normalize: bool = False,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    batch_tokens: int | None = None,
) -> Predictor[Any]: ...
def load(
    folder: Path | str,
    task: TaskName,
    *,
    cube: Cube | None = None,
    k: int = 5,
    pooling: Pooling = "mean",
    normalize: bool = False,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    batch_tokens: int | None = None,
) -> Predictor[Any]:
    """A model and its tokenizer, ready for texts. On a cube every rank calls it at the same time.

    Args:
        folder: a model folder, a run of `tools.pretrain` or one of its checkpoints, or a Hugging Face folder.
        task: "fill-mask", "classify" (also for models that give several labels, or a number), "answer" or "embed".
        cube: where the model is to lie. Default: this process alone.
        k: of fill-mask, pieces for a mask; of answer, answers to a question.
        pooling, normalize: of embed: "mean" over tokens or "cls"; whether vectors have length 1.
        max_length: tokens of a sequence, special ones included; of answer, of a window. Default: what the model was
            made with.
        too_long: whether the end of a longer text is left out, and counted, or the text refused. Of `answer` that is
            the question: contexts are read in windows, and may have any length.
        batch_tokens: of a batch, over all ranks. Default: 2048 for each rank.

    Raises:
        ValueError: no model, one without the head that the task needs, a tokenizer of another model, or an option that
            cannot be; on every rank.
    """
    cube = cube or Cube.single()
    folder = Path(folder)
    # Imported here: who only reads this module's names needs no safetensors.
    from models.bert.pretrained import open_weights

    weights = on_every_rank(cube, lambda: _with_heads(open_weights(folder), task))
    tokenizer = on_every_rank(cube, lambda: tokenizer_of(folder))
    batch_tokens = BATCH_TOKENS * cube.shape.ranks if batch_tokens is None else batch_tokens
    length = on_every_rank(cube, lambda: _length(weights, max_length))
    made: Task[Any, Any]
    # Nothing is drawn, neither for weights that are filled nor for dropout: the program's random numbers stay its own.
    # Heads that the task does not need may stay empty.
    config = dataclasses.replace(weights.config, dropout=0.0, attention_dropout=0.0)
    if task == "answer":
        # Imported here: no other task needs it.
        from tools.predict.answering import Answer, settings_for

        settings = on_every_rank(cube, lambda: settings_for(weights.facts, length, is_asked=max_length is not None))
        with cube.blank():
            questions = BertForQuestionAnswering(config, cube)
        weights.fill(questions, cube)
        made = Answer(questions, tokenizer, settings, k, batch_tokens, too_long)
        return Predictor(made, batch_tokens)
    reader = Reader(tokenizer, length, too_long)
    if task == "fill-mask":
        with cube.blank():
            language = BertForPreTraining(config, cube)
        weights.fill(language, cube)
        made = FillMask(language, reader, k)
    elif task == "classify":
        problem = on_every_rank(cube, lambda: _problem(weights))
        assert weights.outputs is not None, "there is a classifier"
        with cube.blank():
            classes = BertForSequenceClassification(config, weights.outputs, cube)
        weights.fill(classes, cube)
        labels = None if problem == "regress" else names_of(weights.labels, weights.outputs)
        made = Classify(classes, reader, problem, labels, weights.facts.get("pairs"))
    else:
        with cube.blank():
            encoder = BertModel(config, cube)
        weights.fill(encoder, cube)
        made = Embed(encoder, reader, pooling, normalize=normalize)
    return Predictor(made, batch_tokens)


def _problem(weights: Weights) -> ClassProblem:
    """What the classifier is for."""
    if weights.problem == "classify":
        return "classify"
    if weights.problem == "regress":
        return "regress"
    told = (weights.settings or {}).get("problem_type")
    if told == "multi_label_classification":
        return "labels"
    raise ValueError(
        f"{weights.folder} does not tell what its classifier is for: its problem is {weights.problem!r}, and the "
        f"problem_type of its config.json {told!r}. Known there are single_label_classification, "
        "multi_label_classification and regression."
    )


def _with_heads(weights: Weights, task: str) -> Weights:
    if task not in _HEADS:
        raise ValueError(f"task must be one of {', '.join(_HEADS)}. Got {task!r}.")
    missing = [head for head in _HEADS[task] if head not in weights.heads]
    if missing:
        has = ", ".join(weights.heads) or "none"
        raise ValueError(
            f"{task} needs a model with the head {missing[-1]}. {weights.folder} has the heads: {has}. Make one: "
            f"{_MAKERS[task]}"
        )
    return weights


def _length(weights: Weights, asked: int | None) -> int:
    """Tokens of a sequence, at most: as asked, or as the model was made."""
    config = weights.config
    made = int(weights.facts.get("max_length") or _MOST)
    if config.encoder != "classic":
        return made if asked is None else asked
    if asked is not None and asked > config.positions:
        raise ValueError(f"max_length={asked} is more than the model's {config.positions} positions. Choose less.")
    return (
        min(made if "max_length" in weights.facts else config.positions, config.positions) if asked is None else asked
    )

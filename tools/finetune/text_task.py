"""The tasks `classify` and `regress`: classes of texts, and numbers for texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.bert import BertConfig
from models.bert.tasks import BertForSequenceClassification, class_logits
from models.bert.text_batches import EncodedText, TextBatch
from tensor3d import Cube
from tensor3d.data.packed_batch import IGNORED
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.workers import split
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import UnknownText
from tools.finetune.config import FinetuneConfig
from tools.finetune.data import Labelled, TextData, read_part
from tools.finetune.metrics import CLASS_METRICS, NUMBER_METRICS, class_metrics, confusion, number_metrics
from tools.finetune.pictures import draw_confusion
from tools.finetune.tasks import TEST, Evaluation, Example, TaskFacts, finite, in_order, remedy, write_table


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Texts to predict, with their targets if these are known."""

    texts: Sequence[EncodedText]
    ids: Sequence[str]
    targets: NDArray[np.generic] | None


class TextsTask(ABC):
    """What they have in common: files, a model with one answer a text, predictions in GLUE's format.

    Args:
        metric: by which the best evaluation is known. "": the first of `metrics`.
        slots: token slots of a micro-batch of predictions, over all ranks.

    Raises:
        ValueError: of a file, naming it and the line; an unknown metric.
    """

    name: str
    unit = "texts"
    metrics: tuple[str, ...]
    weights: Tensor | None = None
    """(columns,): of the classes; None: they count alike."""

    def __init__(self, data: TextData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> None:
        metric = recipe.run.metric or self.metrics[0]
        if metric not in self.metrics:
            raise ValueError(f"run.metric of {self.name} is one of {', '.join(self.metrics)}. Got {metric!r}.")
        self.best = metric
        self.data, self._recipe, self._cube = data, recipe, cube
        self._slots = recipe.run.tokens_per_rank * cube.shape.ranks
        if data.special_tokens == "tokens":
            tokenizer.read_names()
        train, dev = (read_part(data, part, tokenizer) for part in ("train", "dev"))
        test = None if data.test is None else read_part(data, "test", tokenizer)
        self.truncated = sum(part.truncated for part in (train, dev, test) if part is not None)
        """Texts whose end was left out."""
        skipped = [("train", train.skipped), ("dev", dev.skipped)]
        self.notes = tuple(f"{name}: {count:,} rows are left out (data.bad)" for name, count in skipped if count)
        if named := sum(part.named for part in (train, dev, test) if part is not None):
            is_text = data.special_tokens == "text"
            how = 'are text (data.special_tokens = "tokens" makes them tokens)' if is_text else "are those tokens"
            self.notes += (f"{named:,} texts have the names of special tokens in them, which {how}",)
        unknown = sum((part.unknown for part in (train, dev, test) if part is not None), start=UnknownText())
        self.notes += tuple(filter(None, [unknown.in_words()]))
        self._learn_labels(train)
        targets = self._targets(train)
        counted = self._weigh(targets)
        """Of each example: how much it counts."""
        self.train = [
            Example(text=text, target=target, targets=float(count))
            for text, target, count in zip(train.texts, targets, counted, strict=True)
        ]
        self._parts = {"dev": _Part(texts=dev.texts, ids=dev.ids, targets=self._targets(dev))}
        if test is not None:
            known = self._targets(test) if data.test_labels else None
            self._parts["test"] = _Part(texts=test.texts, ids=test.ids, targets=known)

    # --- what differs ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def columns(self) -> int:
        """Of the head's output."""

    @abstractmethod
    def _learn_labels(self, train: Labelled) -> None: ...

    @abstractmethod
    def _targets(self, part: Labelled) -> NDArray[Any]:
        """(N,): raises ValueError for a label that is none, naming the line."""

    def _weigh(self, targets: NDArray[Any]) -> NDArray[Any]:
        """(N,): how much each text to train on counts. Sets `weights`."""
        return np.ones(len(targets))

    @abstractmethod
    def _predicted(self, logits: Tensor) -> NDArray[Any]:
        """(N,): from (N, columns)."""

    @abstractmethod
    def _measured(self, predicted: NDArray[Any], targets: NDArray[Any]) -> dict[str, float]: ...

    @abstractmethod
    def _in_words(self, predicted: Any) -> str: ...

    @abstractmethod
    def facts(self) -> TaskFacts: ...

    # --- the task -------------------------------------------------------------------------------------------------

    def make_model(self, config: BertConfig, cube: Cube) -> BertForSequenceClassification:
        options = self._recipe.model
        return BertForSequenceClassification(
            config, self.columns, cube, recompute=options.recompute, reshard_after_forward=options.reshard_after_forward
        )

    def loss(
        self, model: BertForSequenceClassification, laid: TextBatch, examples: Sequence[Example], texts: float
    ) -> Tensor:
        targets = torch.tensor(np.array([example.target for example in examples]))
        fill = torch.nan if targets.is_floating_point() else IGNORED
        weights = None if self.weights is None else self.weights.to(self._cube.device)
        smoothing = self.data.label_smoothing
        loss: Tensor = model(laid.batch, laid.spread(targets, fill), texts, weights=weights, smoothing=smoothing)
        return loss

    @property
    def parts(self) -> Sequence[str]:
        return tuple(self._parts)

    def evaluate(self, model: BertForSequenceClassification) -> Evaluation:
        metrics: dict[str, float] = {}
        outputs: dict[str, NDArray[Any]] = {}
        for name, part in self._parts.items():
            if part.targets is not None:
                outputs[name] = self.outputs(model, name)
                found = self._measured(outputs[name], part.targets)
                metrics |= {(TEST if name == "test" else "") + key: value for key, value in found.items()}
        return Evaluation(metrics=metrics, outputs=outputs)

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        written = []
        for name, part in self._parts.items():
            said = zip(part.ids, best.outputs[name], strict=True)
            lines = [f"{row}\t{self._in_words(value)}" for row, value in said]
            written.append(folder / f"{name}.tsv")
            run_on_rank0(self._cube, partial(write_table, written[-1], "index\tprediction", lines))
        return written

    def doubts(self, best: Evaluation) -> Sequence[str]:
        return ()

    def outputs(self, model: BertForSequenceClassification, part: str) -> NDArray[Any]:
        """(N,): a class or a number of each text."""
        texts = self._parts[part].texts
        parts = split([len(text.ids) for text in texts], self._slots)
        logits = torch.cat([class_logits(model, texts[some]) for some in parts])
        return self._predicted(finite(logits, f"scores of {self.unit}"))


class ClassifyTask(TextsTask):
    """One of several classes for each text or pair."""

    name, metrics = "classify", CLASS_METRICS

    @property
    def columns(self) -> int:
        return len(self.labels)

    def _learn_labels(self, train: Labelled) -> None:
        for label, where in zip(train.labels, train.where, strict=True):
            if not label:
                raise ValueError(f"{where}: there is no label in the column {self.data.label!r}. Leave the row out.")
        self.labels = self.data.labels or in_order({label for label in train.labels if label is not None})
        """The classes."""
        if len(self.labels) < 2:
            raise ValueError(
                f"{self.data.train} has {len(self.labels)} different labels in the column {self.data.label!r}, and a "
                f"classification needs two. Got {list(self.labels)}."
            )

    def _targets(self, part: Labelled) -> NDArray[np.int64]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        for label, where in zip(part.labels, part.where, strict=True):
            if label not in numbers:
                known = ", ".join(self.labels[:20])
                raise ValueError(f"{where}: the label {label!r} is none of those that are learnt: {known}.")
        return np.array([numbers[label] for label in part.labels if label is not None], dtype=np.int64)

    def _weigh(self, targets: NDArray[Any]) -> NDArray[Any]:
        """By scikit-learn's rule of "balanced". A class that no text has counts nothing: smoothing would teach it."""
        if self.data.class_weights == "none":
            return super()._weigh(targets)
        counts = np.bincount(targets, minlength=self.columns)
        weights = np.where(counts, len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1)), 0)
        self.weights = torch.tensor(weights, dtype=torch.float32)
        of_texts: NDArray[Any] = self.weights.numpy()[targets]
        return of_texts

    def _predicted(self, logits: Tensor) -> NDArray[np.int64]:
        classes: NDArray[np.int64] = logits.argmax(1).numpy()
        return classes

    def _measured(self, predicted: NDArray[Any], targets: NDArray[Any]) -> dict[str, float]:
        return class_metrics(predicted, targets, self.columns)

    def _in_words(self, predicted: Any) -> str:
        return self.labels[predicted]

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """Also NAME-confusion.tsv, with a picture: how many texts of each label are predicted as which."""
        written = super().write_predictions(best, folder)
        for name, part in self._parts.items():
            if part.targets is not None:
                table = confusion(best.outputs[name], part.targets, self.columns)
                path = folder / f"{name}-confusion.tsv"
                written += run_on_rank0(self._cube, partial(self._write_confusion, path, table))
        return written

    def doubts(self, best: Evaluation) -> Sequence[str]:
        said, targets = best.outputs["dev"], self._parts["dev"].targets
        assert targets is not None, "which dev has"
        common = np.bincount(targets, minlength=self.columns).argmax()
        # Of two classes F1 is that of the last one, which one who says nothing else finds whole.
        same = {place: self._measured(np.full_like(said, place), targets)[self.best] for place in (common, said[0])}
        place = max(same, key=same.__getitem__)
        if (said == said[0]).all() and len(set(targets.tolist())) > 1:
            told = f"all {len(said):,} predictions of dev are {self.labels[said[0]]!r}"
        elif best.metrics[self.best] <= same[place]:
            told = (
                f"{self.best} of dev is {best.metrics[self.best]:.4f}, no more than {same[place]:.4f} for one who "
                f"always says {self.labels[place]!r}"
            )
        else:
            return ()
        return (f"{told}: it tells no classes apart. {remedy(self._recipe)}",)

    def _write_confusion(self, path: Path, table: NDArray[np.int64]) -> list[Path]:
        rows = zip(self.labels, table.tolist(), strict=True)
        lines = ["\t".join([label, *map(str, counts)]) for label, counts in rows]
        write_table(path, "\t".join(["label", *self.labels]), lines)
        picture = path.with_suffix(".png")
        return [path, *([picture] if draw_confusion(picture, self.labels, table) else [])]

    def facts(self) -> TaskFacts:
        return TaskFacts(problem="classify", labels=self.labels, more=settings_of(self.data))


class RegressTask(TextsTask):
    """A number for each text or pair."""

    name, metrics = "regress", NUMBER_METRICS
    columns = 1

    def _learn_labels(self, train: Labelled) -> None:
        if self.data.labels:
            raise ValueError(f"data.labels are those of classes, and regression has none. Got {self.data.labels}.")
        if self.data.multi_label or self.data.class_weights != "none" or self.data.label_smoothing:
            raise ValueError(
                "data.multi_label, class_weights and label_smoothing are for classes, and regression has none."
            )

    def _targets(self, part: Labelled) -> NDArray[np.float32]:
        return np.array([_number(*pair) for pair in zip(part.labels, part.where, strict=True)], dtype=np.float32)

    def _predicted(self, logits: Tensor) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = logits[:, 0].float().numpy()
        return numbers

    def _measured(self, predicted: NDArray[Any], targets: NDArray[Any]) -> dict[str, float]:
        return number_metrics(predicted, targets)

    def doubts(self, best: Evaluation) -> Sequence[str]:
        said, targets = best.outputs["dev"], self._parts["dev"].targets
        assert targets is not None, "which dev has"
        # Outputs that stay near 0 may still be in the right order.
        if said.std() > _SAME * targets.std() or len(said) < 2 or best.metrics[self.best] > _CORRELATED:
            return ()
        return (f"all {len(said):,} predictions of dev are about {said.mean():.4f}. {remedy(self._recipe)}",)

    def _in_words(self, predicted: Any) -> str:
        return f"{predicted:.4f}"

    def facts(self) -> TaskFacts:
        return TaskFacts(problem="regress", more=settings_of(self.data))


_SAME, _CORRELATED = 0.01, 0.1  # of the labels' deviation and of correlations: those of who says nothing


def settings_of(data: TextData) -> dict[str, Any]:
    read = {} if data.special_tokens == "text" else {"special_tokens": data.special_tokens}
    return {"max_length": data.max_length, "pairs": data.text_b is not None, **read}


def _number(text: str | None, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"{where}: the label must be a number. Got {text!r}.")
    if abs(number) > float(np.finfo(np.float32).max):
        raise ValueError(f"{where}: the label must be a number that fp32 can hold, below 3.4e38. Got {text!r}.")
    return number

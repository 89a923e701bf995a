"""Any number of labels for each text: a probability each, by itself, and the threshold from which on it holds."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.bert.tasks import BertForSequenceClassification
from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.config import FinetuneConfig
from tools.finetune.data import Labelled, TextData
from tools.finetune.metrics import LABEL_METRICS, fitted_thresholds, label_metrics, of_labels, scikit_metrics
from tools.finetune.tasks import TEST, Evaluation, TaskFacts, in_order, write_table
from tools.finetune.text_task import ClassifyTask, TextsTask, settings_of

THRESHOLDS = "thresholds"
"""Where `facts` of a model.json keep them."""


class LabelsTask(TextsTask):
    """Which of several labels hold for each text or pair, each learnt by itself (binary cross-entropy).

    The thresholds are those of the best F1 on dev, for each label; dev and test are measured by them.
    """

    name, metrics = "classify", LABEL_METRICS

    @property
    def columns(self) -> int:
        return len(self.labels)

    def _learn_labels(self, train: Labelled) -> None:
        scikit_metrics()  # better now than after an epoch
        sets = self._sets(train)
        self.labels = self.data.labels or in_order({label for some in sets for label in some})
        if not self.labels:
            raise ValueError(f"{self.data.train} has no label in the column {self.data.label!r}, and one is needed.")

    def _sets(self, part: Labelled) -> list[list[str]]:
        """The labels of each text."""
        found = []
        for label, where in zip(part.labels, part.where, strict=True):
            some = [each.strip() for each in label.split(self.data.separator)] if label else []
            if "" in some or len(set(some)) < len(some):
                raise ValueError(f"{where}: labels must be different, and none of them empty. Got {label!r}.")
            found.append(some)
        return found

    def _targets(self, part: Labelled) -> NDArray[np.float32]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        targets = np.zeros((len(part.texts), self.columns), dtype=np.float32)
        for row, (some, where) in enumerate(zip(self._sets(part), part.where, strict=True)):
            if unknown := [label for label in some if label not in numbers]:
                known = ", ".join(self.labels[:20])
                raise ValueError(f"{where}: the label {unknown[0]!r} is none of those that are learnt: {known}.")
            targets[row, [numbers[label] for label in some]] = 1
        return targets

    def _weigh(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Texts count alike; where a label holds, it counts as often more as it holds more seldom than not. One that
        all texts have, or none, is not weighed: by its own rule it would be forgotten, or what smoothing adds of it
        would outweigh all."""
        if self.data.class_weights == "balanced":
            holds = targets.sum(0)
            ratio = (len(targets) - holds) / np.maximum(holds, 1)
            self.weights = torch.tensor(np.where(ratio * holds, ratio, 1), dtype=torch.float32)
        return super()._weigh(targets)

    def _predicted(self, logits: Tensor) -> NDArray[np.float32]:
        """(N, columns): probabilities."""
        chances: NDArray[np.float32] = logits.float().sigmoid().numpy()
        return chances

    def _measured(self, predicted: NDArray[Any], targets: NDArray[Any]) -> dict[str, float]:
        return label_metrics(predicted, targets, fitted_thresholds(predicted, targets))

    def evaluate(self, model: BertForSequenceClassification) -> Evaluation:
        found = super().evaluate(model)
        dev, test = self._parts["dev"], self._parts.get("test")
        assert dev.targets is not None, "which dev has"
        thresholds = fitted_thresholds(found.outputs["dev"], dev.targets)
        if test is not None and test.targets is not None:
            measured = label_metrics(found.outputs["test"], test.targets, thresholds)
            found.metrics.update({TEST + name: value for name, value in measured.items()})
        return dataclasses.replace(found, facts={THRESHOLDS: thresholds.tolist()})

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """Of dev and test NAME.tsv: the labels that hold and the probabilities of all. Where the labels are known
        NAME-labels.tsv too: of each label its threshold and how well it is found."""
        written, thresholds = [], np.array(best.facts[THRESHOLDS])
        head = "\t".join(["index", "prediction", *self.labels])
        for name, part in self._parts.items():
            chances = best.outputs[name]
            lines = [
                "\t".join([row, self._in_words(of_row >= thresholds), *(f"{chance:.6f}" for chance in of_row)])
                for row, of_row in zip(part.ids, chances, strict=True)
            ]
            written.append(folder / f"{name}.tsv")
            run_on_rank0(self._cube, partial(write_table, written[-1], head, lines))
            if part.targets is not None:
                rows = of_labels(chances, part.targets, thresholds)
                lines = [
                    "\t".join([label, f"{least:.6f}", *(f"{value:.6g}" for value in row.values())])
                    for label, least, row in zip(self.labels, thresholds, rows, strict=True)
                ]
                written.append(folder / f"{name}-labels.tsv")
                of_table = "\t".join(["label", "threshold", *rows[0]])
                run_on_rank0(self._cube, partial(write_table, written[-1], of_table, lines))
        return written

    def _in_words(self, predicted: Any) -> str:
        return self.data.separator.join(label for label, holds in zip(self.labels, predicted, strict=True) if holds)

    def facts(self) -> TaskFacts:
        return TaskFacts(problem="labels", labels=self.labels, more=settings_of(self.data))


def classify_task(data: TextData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> TextsTask:
    """One class for each text, or any number of labels."""
    return (LabelsTask if data.multi_label else ClassifyTask)(data, recipe, tokenizer, cube)

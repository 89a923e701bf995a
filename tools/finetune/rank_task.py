"""Ranking as a task: which passages answer a query best? A cross-encoder reads a query with each of its passages, and
gives it a score (Nogueira and Cho 2019, arXiv 1901.04085)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.bert import BertConfig
from models.bert.tasks import BertForSequenceClassification, class_logits
from models.bert.text_batches import TextBatch, distinct_texts
from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.workers import split
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.config import FinetuneConfig
from tools.finetune.rank_data import RankData, RankPart, read_part
from tools.finetune.rank_losses import rank_loss, terms
from tools.finetune.ranking_metrics import in_rank_order, ranking_metrics
from tools.finetune.tasks import TEST, Evaluation, Example, TaskFacts, finite, write_table

RANK_METRICS = ("ndcg@10", "mrr@10")
"""By which a model can be chosen; the first is the default."""


class RankTask:
    """Queries with their passages: each query is one example, whose passages stay in one micro-batch.

    Every rank makes one at the same point; the files are read and encoded on the first one alone.

    Raises:
        ValueError: of a file, naming it and the line; an unknown metric.
    """

    name, unit = "rank", "queries"

    def __init__(self, data: RankData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> None:
        self.best = recipe.run.metric or RANK_METRICS[0]
        if self.best not in RANK_METRICS:
            raise ValueError(f"run.metric of {self.name} is one of {', '.join(RANK_METRICS)}. Got {self.best!r}.")
        if data.special_tokens == "tokens":
            tokenizer.read_names()
        self._data, self._options, self._cube = data, recipe.model, cube
        self._slots = recipe.run.tokens_per_rank * cube.shape.ranks
        names = ["train", "dev", *(["test"] if data.test is not None else [])]
        read = run_on_rank0(cube, lambda: {name: read_part(data, name, tokenizer) for name in names}, any_time=True)
        self.truncated = sum(part.truncated for part in read.values())
        self._parts: dict[str, RankPart] = {name: part for name, part in read.items() if name != "train"}
        self._check_relevant()
        self.train, more = self._examples(read["train"])
        self.notes = (*(part.report for part in read.values()), *more)

    def _check_relevant(self) -> None:
        for name, part in self._parts.items():
            if part.grades is not None and all(grades.max() <= 0 for grades in part.grades):
                raise ValueError(
                    f"{getattr(self._data, name)} has no query with a relevant passage, and metrics need one."
                )

    def _examples(self, part: RankPart) -> tuple[list[Example], list[str]]:
        """Queries to train on, and what is to be told of them."""
        assert part.grades is not None, "training has grades"
        told, highest = [], max(float(grades.max()) for grades in part.grades)
        scale = 1.0
        if self._data.loss == "pointwise" and highest > 1:
            scale = 1 / highest
            told.append(f"train: grades are learnt as shares of the highest one, {highest:g} (data.loss)")
        examples = [
            Example(text=texts[0], others=texts[1:], target=grades * scale, targets=terms(grades, self._data.loss))
            for texts, grades in zip(part.texts, part.grades, strict=True)
        ]
        if large := sum(example.tokens > self._slots for example in examples):
            told.append(
                f"train: {large:,} queries have more tokens than a micro-batch of {self._slots:,}, and are one each "
                "(run.tokens_per_rank, data.max_passages)"
            )
        return examples, told

    def make_model(self, config: BertConfig, cube: Cube) -> BertForSequenceClassification:
        options = self._options
        return BertForSequenceClassification(
            config, 1, cube, recompute=options.recompute, reshard_after_forward=options.reshard_after_forward
        )

    def loss(
        self, model: BertForSequenceClassification, laid: TextBatch, examples: Sequence[Example], targets: float
    ) -> Tensor:
        scores = model.logits_of_texts(laid)[:, 0]
        grades = [example.target for example in examples]
        return rank_loss(scores, grades, self._data.loss, self._data.margin) / targets

    @property
    def parts(self) -> Sequence[str]:
        return tuple(self._parts)

    def outputs(self, model: BertForSequenceClassification, part: str) -> list[NDArray[np.float32]]:
        """Of each query (passages,): scores, equal ones of equal passages."""
        groups = self._parts[part].texts
        texts, of_texts = distinct_texts([text for group in groups for text in group])
        parts = split([len(text.ids) for text in texts], self._slots)
        logits = torch.cat([class_logits(model, texts[some]) for some in parts])
        scores = finite(logits, "scores of passages")[:, 0].float()[of_texts]
        return [own.numpy() for own in scores.split([len(group) for group in groups])]

    def evaluate(self, model: BertForSequenceClassification) -> Evaluation:
        metrics: dict[str, float] = {}
        outputs: dict[str, list[NDArray[np.float32]]] = {}
        for name, part in self._parts.items():
            if part.grades is not None:
                outputs[name] = self.outputs(model, name)
                ranked = map(in_rank_order, outputs[name], part.grades)
                found = ranking_metrics(zip(ranked, part.grades, strict=True), gain=self._data.gain).metrics
                metrics |= {(TEST if name == "test" else "") + key: found[key] for key in RANK_METRICS}
        return Evaluation(metrics=metrics, outputs=outputs)

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """Of dev and test NAME.tsv: query, passage, rank from 1, score and, where there are grades, grade; the best
        passage of each query first."""
        return run_on_rank0(self._cube, lambda: [self._written(best, name, folder) for name in self._parts])

    def _written(self, best: Evaluation, name: str, folder: Path) -> Path:
        part, lines = self._parts[name], []
        for number, (query, scores) in enumerate(zip(part.queries, best.outputs[name], strict=True)):
            for rank, place in enumerate(np.argsort(-scores, kind="stable").tolist(), start=1):
                grade = [] if part.grades is None else [f"{part.grades[number][place]:g}"]
                passage = part.passages[number][place]
                lines.append("\t".join([query, passage, str(rank), f"{scores[place]:.6f}", *grade]))
        head = ["query", "passage", "rank", "score", *([] if part.grades is None else ["grade"])]
        write_table(folder / f"{name}.tsv", "\t".join(head), lines)
        return folder / f"{name}.tsv"

    def facts(self) -> TaskFacts:
        data = self._data
        read = {} if data.special_tokens == "text" else {"special_tokens": data.special_tokens}
        return TaskFacts(problem="rank", more={"max_length": data.max_length, "loss": data.loss, **read})

"""The task `rank`: the passages of a query in the order of their scores, by a cross-encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from models.bert.huggingface.config import CROSS_ENCODER, IDENTITY
from models.bert.tasks import BertForSequenceClassification, class_logits
from models.bert.text_batches import EncodedText, distinct_texts
from tools.common.files import is_unicode, parsed_json
from tools.common.workers import split
from tools.corpus.quick.text_sources import read_lines
from tools.predict.inputs import Candidate, Fields, InputProblem, Query
from tools.predict.results import Ranked, RankedPassage
from tools.predict.tasks import PredictTask, Ready, finite, problem_of
from tools.predict.text_encoder import TextEncoder

_SIGMOID = "torch.nn.modules.activation.Sigmoid"


class RankQuery(NamedTuple):
    """A query as `Rank` computes with it."""

    query: str
    passages: Sequence[Candidate]
    """Each with its text."""
    texts: Sequence[EncodedText]
    """The query with each of them."""


class Rank(PredictTask[RankQuery, Ranked]):
    """The passages of a query, best first; equal ones have equal scores, and the order in which they were given.

    Args:
        batch_tokens: of the pairs that are computed at a time.
        top: passages of each query that are given. None: all.
        collection: texts by their ids, for passages that are given by id. Empty: none is.
        sigmoid: whether scores are brought between 0 and 1, as the model's folder has it; the order stays.

    Raises:
        ValueError: a model with several outputs, or top below 1.
    """

    fields = Fields(first="query", candidates="passages")

    def __init__(
        self,
        model: BertForSequenceClassification,
        reader: TextEncoder,
        batch_tokens: int,
        *,
        collection: Mapping[str, str],
        top: int | None = None,
        sigmoid: bool = False,
    ) -> None:
        if model.outputs != 1:
            raise ValueError(f"a model with one output, the score, is needed. Got {model.outputs} outputs.")
        if top is not None and top < 1:
            raise ValueError(f"top must be at least 1. Got {top}.")
        self.config, self.cube = model.config, model.cube
        self.model, self.reader, self.batch_tokens = model, reader, batch_tokens
        self.top, self.collection, self.sigmoid = top, collection, sigmoid

    def ready(self, queries: Sequence[Query]) -> list[Ready[RankQuery] | InputProblem]:
        found = [self._ready(query) for query in queries]
        self.truncated, self.named, self.unknown = self.reader.truncated, self.reader.named, self.reader.unknown
        return found

    def _ready(self, query: Query) -> Ready[RankQuery] | InputProblem:
        passages = [self._with_text(each) for each in query.candidates]
        unknown = next((each.id for each in passages if each.text is None), None)
        if unknown is not None:
            where = "which the collection does not have" if self.collection else "and no --collection is given"
            return problem_of(query, f"a passage has no text, but the id {unknown!r}, {where}.")
        first, *others = self.reader.encode([query.first, *(each.text or "" for each in passages)])
        texts = []
        for place, ids in enumerate(others):
            if not first or not ids:
                empty = f"passage {place}" if first else '"query"'
                return problem_of(query, f"{empty} has no token. Leave it out, or write something.")
            try:
                texts.append(self.reader.sequence(first, ids, place))
            except ValueError as problem:
                return problem_of(query, f"with its passage, {problem}")
        content = RankQuery(query.first, passages, texts)
        return Ready(content=content, tokens=sum(len(text.ids) for text in texts))

    def _with_text(self, passage: Candidate) -> Candidate:
        if passage.text is not None:
            return passage
        return dataclasses.replace(passage, text=self.collection.get(str(passage.id)))

    def results(self, batch: Sequence[RankQuery]) -> list[Ranked]:
        texts, of_texts = distinct_texts([text for query in batch for text in query.texts])
        parts = split([len(text.ids) for text in texts], self.batch_tokens)
        scores = finite(torch.cat([class_logits(self.model, texts[part]) for part in parts])[:, 0]).float()[of_texts]
        return [
            self._ranked(query, own)
            for query, own in zip(batch, scores.split([len(q.texts) for q in batch]), strict=True)
        ]

    def _ranked(self, query: RankQuery, scores: torch.Tensor) -> Ranked:
        order = np.argsort(-scores.numpy(), kind="stable")[: self.top].tolist()
        told = (scores.sigmoid() if self.sigmoid else scores).tolist()
        passages = (
            RankedPassage(rank=rank, index=place, id=passage.id, score=told[place], text=passage.text or "")
            for rank, (place, passage) in enumerate(((place, query.passages[place]) for place in order), start=1)
        )
        return Ranked(query=query.query, passages=tuple(passages))


def is_sigmoid(settings: Mapping[str, Any] | None) -> bool:
    """Whether a cross-encoder's config.json asks for scores between 0 and 1. Where it says nothing, scores are what the
    model computes, which sentence-transformers alone would bring between 0 and 1.

    Raises:
        ValueError: another function than that.
    """
    settings = settings or {}
    told = settings.get(CROSS_ENCODER) or {}
    name = told.get("activation_fn") if isinstance(told, Mapping) else told
    name = name or settings.get("sbert_ce_default_activation_function")
    if name not in (None, IDENTITY, _SIGMOID, "torch.nn.Identity", "torch.nn.Sigmoid"):
        raise ValueError(f"config.json: the scores go through {name!r}. Known are {IDENTITY} and {_SIGMOID}.")
    return str(name).endswith("Sigmoid")


def read_collection(path: Path) -> dict[str, str]:
    """The texts of a corpus.jsonl as BEIR has it, by "_id" (or "id"): the title, where there is one, and the text.

    Raises:
        ValueError: naming the file and the line, for what is no such object, or an id that is there twice.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path} line {number}"
        try:
            row = parsed_json(line, unique=True)
        except ValueError as problem:
            raise ValueError(f"{where}: it is not valid JSON: {problem}. Write one object a line.") from None
        name = row.get("_id", row.get("id")) if isinstance(row, dict) else None
        # A bool is an int to Python, not to us.
        if not isinstance(name, str | int) or isinstance(name, bool) or not is_unicode(row.get("text")):
            raise ValueError(f'{where}: an object with "_id" and "text" is needed. Got {line[:60]!r}.')
        title = row.get("title") or ""
        if not is_unicode(title):
            raise ValueError(f'{where}: "title" must be a text. Got {title!r:.60}.')
        if str(name) in found:
            raise ValueError(f"{where}: the id {name!r} is there already. Each text needs its own.")
        found[str(name)] = " ".join(part for part in (title, row["text"]) if part)
    return found

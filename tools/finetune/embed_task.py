"""Sentence vectors as a task: whose vector is near to whose? (Reimers and Gurevych 2019, arXiv 1908.10084)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.bert import BertConfig
from models.bert.embedding import BertForSentenceEmbedding, VectorLoss
from models.bert.huggingface import WeightSource
from models.bert.huggingface.weights import DENSE
from models.bert.tasks import sentence_vectors
from models.bert.text_batches import TextBatch, distinct_texts
from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.workers import split
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.config import FinetuneConfig
from tools.finetune.embed_data import (
    Collection,
    EmbedData,
    Rows,
    encoder_for,
    is_collection,
    pairs_as_collection,
    read_collection,
    read_examples,
    settings_for,
    start_settings,
)
from tools.finetune.metrics import number_metrics
from tools.finetune.ranking_metrics import in_rank_order, ranking_metrics
from tools.finetune.tasks import TEST, Evaluation, Example, TaskFacts, finite, write_table
from tools.predict.sentence_folder import sentence_json
from tools.predict.vector_search import nearest

PAIR_METRICS = ("spearman", "pearson")
RANKING_METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
_FOUND = 100  # documents of a ranking


class EmbedTask(ABC):
    """What both ways to learn have in common: files, a model without a head, cosines and rankings.

    Every rank makes one at the same point, and reads the files.

    Raises:
        ValueError: of a file, naming it and the line; an unknown metric; a step with a single pair.
    """

    name, unit = "embed", "pairs"

    def __init__(self, data: EmbedData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> None:
        if data.special_tokens == "tokens":
            tokenizer.read_names()
        _ = tokenizer.end
        self._data, self._options, self._cube = data, recipe.model, cube
        self._begun = start_settings(recipe.model)
        self._slots = recipe.run.tokens_per_rank * cube.shape.ranks
        self._settings = settings_for(data, recipe.model)
        self._loss = VectorLoss(temperature=data.temperature, symmetric=data.symmetric, sizes=data.sizes)
        encoder = encoder_for(data, self._settings, tokenizer)
        rows = read_examples(data, "train", self._settings, encoder)
        self._check_steps(rows, recipe.run.batch)
        self.train = self._examples(rows)
        prompts = [
            self._settings.prompt if each is None else each for each in (data.query_prompt, data.document_prompt)
        ]
        asked = f"queries behind the prompt {prompts[0]!r}, documents behind {prompts[1]!r}"
        given = [asked] if prompts != [self._settings.prompt] * 2 else []
        self.notes: Sequence[str] = (f"vectors: {self._settings.in_words()}", *given, *self._notes(rows))
        self._parts: dict[str, Rows | Collection] = {}
        for part, name in (("dev", data.dev), ("test", data.test)):
            if part == "dev" or name is not None:
                self._parts[part] = self._read(part, name, encoder)
        for part, found in self._parts.items():
            self.notes = (*self.notes, *(f"{part}: {note}" for note in getattr(found, "notes", ())))
        if encoder.named:
            self.notes = (*self.notes, f"{encoder.named:,} texts have the names of special tokens in them")
        self.notes = (*self.notes, *filter(None, [encoder.unknown.in_words()]))
        self.truncated = encoder.truncated
        known = RANKING_METRICS if isinstance(self._parts["dev"], Collection) else PAIR_METRICS
        self.best = recipe.run.metric or known[0]
        if self.best not in known:
            raise ValueError(f"run.metric of this dev is one of {', '.join(known)}. Got {self.best!r}.")

    def _read(self, part: str, name: str | None, encoder: Any) -> Rows | Collection:
        if name is not None and is_collection(Path(name)):
            split_name = self._data.dev_split if part == "dev" else self._data.test_split
            return read_collection(Path(name), split_name, self._settings, encoder, self._data)
        rows = read_examples(self._data, part, self._settings, encoder)
        return pairs_as_collection(rows) if rows.scores is None else rows

    # --- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _examples(self, rows: Rows) -> list[Example]: ...

    @abstractmethod
    def loss(
        self, model: BertForSentenceEmbedding, laid: TextBatch, examples: Sequence[Example], targets: float
    ) -> Tensor: ...

    def _notes(self, rows: Rows) -> Sequence[str]:
        return ()

    def _check_steps(self, rows: Rows, batch: int) -> None:
        return

    # --- the task -------------------------------------------------------------------------------------------------

    def make_model(self, config: BertConfig, cube: Cube) -> BertForSentenceEmbedding:
        """Raises ValueError for sizes that are not below that of a vector."""
        dense, options = self._settings.dense, self._options
        width, what = (dense[-1].outputs, "last dense layer") if dense else (config.hidden, "hidden size")
        if wrong := [size for size in self._data.sizes if size >= width]:
            raise ValueError(f"data.sizes must be below the model's {what}, {width}. Got {wrong[0]}.")
        return BertForSentenceEmbedding(
            config,
            cube,
            pooling=self._settings.pooling,
            dense=dense,
            recompute=options.recompute,
            reshard_after_forward=options.reshard_after_forward,
        )

    def weights_of(self, source: WeightSource) -> WeightSource:
        """With those of the dense layers of the folder to begin with, unless they are to be new."""
        if self._begun is None:
            return source
        found = self._begun.with_dense(source)
        return found if self._data.dense is None else found.only([head for head in found.heads if head != DENSE])

    @property
    def parts(self) -> Sequence[str]:
        return tuple(self._parts)

    def outputs(self, model: BertForSentenceEmbedding, part: str) -> NDArray[np.float32]:
        """(texts, D): vectors of the part's texts, equal ones of equal texts."""
        texts, of_texts = distinct_texts(self._parts[part].texts)
        parts = split([len(text.ids) for text in texts], self._slots)
        vectors = torch.cat([sentence_vectors(model.bert, texts[some], model.pooling, model.dense) for some in parts])
        return finite(vectors, "vectors").float().numpy()[of_texts]

    def evaluate(self, model: BertForSentenceEmbedding) -> Evaluation:
        """Of whole vectors, and of those that are cut after each of `data.sizes`: spearman_64, ndcg@10_64."""
        metrics: dict[str, float] = {}
        outputs = {name: self.outputs(model, name) for name in self._parts}
        for name, part in self._parts.items():
            for size in (outputs[name].shape[1], *self._data.sizes):
                vectors = torch.from_numpy(outputs[name][:, :size])
                found = _measured_ranking(part, vectors) if isinstance(part, Collection) else _measured(part, vectors)
                tail = "" if size == outputs[name].shape[1] else f"_{size}"
                metrics |= {f"{TEST if name == 'test' else ''}{key}{tail}": value for key, value in found.items()}
        return Evaluation(metrics=metrics, outputs=outputs)

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """Of dev and test NAME.tsv: of pairs index and cosine; of a collection query, document, rank, cosine."""
        written = []
        for name, part in self._parts.items():
            vectors = torch.from_numpy(best.outputs[name])
            written.append(folder / f"{name}.tsv")
            if isinstance(part, Rows):
                cosines = enumerate(_cosines(part, vectors).tolist())
                head, lines = "index\tprediction", [f"{number}\t{cosine:.6f}" for number, cosine in cosines]
            else:
                head, lines = "query\tdocument\trank\tcosine", []
                for query, (scores, places) in zip(part.query_names, _rankings(part, vectors), strict=True):
                    rows = enumerate(zip(scores.tolist(), places.tolist(), strict=True), start=1)
                    lines += [f"{query}\t{part.document_names[at]}\t{rank}\t{score:.6f}" for rank, (score, at) in rows]
            run_on_rank0(self._cube, partial(write_table, written[-1], head, lines))
        return written

    def facts(self) -> TaskFacts:
        settings = self._settings
        more: dict[str, Any] = {"max_length": settings.max_length, "sizes": list(self._data.sizes)}
        if self._data.special_tokens == "tokens":
            more["special_tokens"] = self._data.special_tokens

        def files(config: BertConfig) -> Mapping[str, Any]:
            return sentence_json(settings, config.hidden)

        return TaskFacts(problem="embed", more=more, files=files)


class InBatchTask(EmbedTask):
    """Pairs and triplets: an anchor's positive against all other positives and negatives of the step, on all ranks.

    What is known to belong to an anchor, or reads the same as it or as its positive, is none of its negatives.
    """

    @property
    def caches(self) -> bool:
        return self._data.cache

    def _examples(self, rows: Rows) -> list[Example]:
        self._positives: dict[int, set[int]] = {}
        for anchor, positive, *_ in rows.examples:
            self._positives.setdefault(int(rows.keys[anchor]), set()).add(int(rows.keys[positive]))
        return [
            Example(
                text=rows.texts[own[0]],
                others=[rows.texts[each] for each in own[1:]],
                target=rows.keys[list(own)],
            )
            for own in rows.examples
        ]

    def _notes(self, rows: Rows) -> Sequence[str]:
        firsts, seconds = (rows.keys[[own[side] for own in rows.examples]] for side in (0, 1))
        often = [np.bincount(keys, minlength=len(rows.texts))[keys] > 1 for keys in (firsts, seconds)]
        shared = int((often[0] | often[1] | np.isin(seconds, firsts)).sum())
        return [f"{shared:,} pairs share a text with another pair, of which it is no negative"] if shared else []

    def _check_steps(self, rows: Rows, batch: int) -> None:
        count = len(rows.examples)
        if len(rows.examples[0]) == 2 and (batch == 1 or count % batch == 1):
            enough = next((size for size in range(max(2, batch), count + 1) if count % size != 1), None)
            remedy = "Give more pairs" if enough is None else f"Set run.batch to {enough}, or leave a pair out"
            raise ValueError(
                f"{self._data.train} has {count:,} pairs, and with run.batch = {batch} a step has a single one, whose "
                f"positive is compared with nothing. {remedy}."
            )

    def vectors(self, model: BertForSentenceEmbedding, laid: TextBatch) -> Tensor:
        found: Tensor = model(laid)
        return found

    def step_loss(self, vectors: Tensor, examples: Sequence[Example]) -> Tensor:
        keys = [example.target for example in examples]
        firsts = np.cumsum([0, *map(len, keys)])[:-1]
        rest = [np.arange(first + 2, first + len(own)) for first, own in zip(firsts, keys, strict=True)]
        candidates = np.concatenate([firsts + 1, *rest])
        of_candidates = np.concatenate(keys)[candidates]
        allowed = np.stack([~np.isin(of_candidates, [own[0], *self._positives[int(own[0])]]) for own in keys])
        np.fill_diagonal(allowed, True)
        anchors, others = (vectors[torch.from_numpy(some).to(vectors.device)] for some in (firsts, candidates))
        return self._loss.in_batch(anchors, others, torch.from_numpy(allowed).to(vectors.device))

    def loss(
        self, model: BertForSentenceEmbedding, laid: TextBatch, examples: Sequence[Example], targets: float
    ) -> Tensor:
        """Of a step that is one micro-batch."""
        return self.step_loss(self.vectors(model, laid), examples)


class CosineTask(EmbedTask):
    """Pairs with scores: the cosine of their vectors is to be the score (mean squared error)."""

    def _examples(self, rows: Rows) -> list[Example]:
        assert rows.scores is not None, "read with this loss"
        return [
            Example(text=rows.texts[first], others=[rows.texts[second]], target=float(score))
            for (first, second), score in zip(rows.examples, rows.scores, strict=True)
        ]

    def loss(
        self, model: BertForSentenceEmbedding, laid: TextBatch, examples: Sequence[Example], targets: float
    ) -> Tensor:
        vectors: Tensor = model(laid)
        scores = torch.tensor([example.target for example in examples], dtype=vectors.dtype, device=vectors.device)
        return self._loss.cosine(vectors[::2], vectors[1::2], scores) / targets


def embed_task(data: EmbedData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> EmbedTask:
    return (CosineTask if data.loss == "cosine" else InBatchTask)(data, recipe, tokenizer, cube)


# --- How good vectors are ---------------------------------------------------------------------------------------------


def _cosines(rows: Rows, vectors: Tensor) -> NDArray[np.float32]:
    firsts, seconds = (vectors[[own[side] for own in rows.examples]] for side in (0, 1))
    cosines: NDArray[np.float32] = F.cosine_similarity(firsts, seconds).numpy()
    return cosines


def _measured(rows: Rows, vectors: Tensor) -> dict[str, float]:
    assert rows.scores is not None, "pairs without scores are a collection"
    found = number_metrics(_cosines(rows, vectors), rows.scores)
    return {name: found[name] for name in PAIR_METRICS}


def _rankings(
    collection: Collection, vectors: Tensor, more: int = 0
) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Of each query the cosines of its nearest documents, and `more` behind them, nearest first, and their places."""
    queries, documents = vectors[list(collection.queries)], vectors[list(collection.documents)]
    count = _FOUND + more
    scores, places = nearest(queries, documents, count + 1)
    found = []
    for own_scores, own, omitted in zip(scores.numpy(), places.numpy(), collection.omitted, strict=True):
        kept = (own >= 0) & (own != omitted)
        found.append((own_scores[kept][:count], own[kept][:count]))
    return found


def _measured_ranking(collection: Collection, vectors: Tensor) -> dict[str, float]:
    # Of documents as near as the last one that is found, those that are not relevant count as found. As many more as
    # are relevant bring enough of them, however many there are.
    more = max(sum(grade > 0 for grade in grades.values()) for grades in collection.grades)
    ranked = []
    for grades, (scores, places) in zip(collection.grades, _rankings(collection, vectors, more), strict=True):
        of_found = np.array([grades.get(place, 0.0) for place in places.tolist()])
        ranked.append((in_rank_order(scores, of_found)[:_FOUND], np.array(list(grades.values()))))
    found = ranking_metrics(ranked, recall_at=(1, 10, 100)).metrics
    return {name: found[name] for name in RANKING_METRICS}

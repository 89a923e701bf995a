"""The tasks `embed`, vectors of texts, and the search for the nearest of stored ones."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.bert.embedding import BertForSentenceEmbedding
from models.bert.tasks import Pooling, sentence_vectors
from models.bert.text_batches import EncodedText
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import Embedded, Found, Hit
from tools.predict.stored_vectors import StoredVectors
from tools.predict.tasks import R_co, Ready, TextTask, finite
from tools.predict.text_encoder import TextEncoder
from tools.predict.vector_search import nearest

_KEPT_BYTES = 2**26
"""Of vectors that are kept, for texts that come again: 21,845 of 768 numbers."""


class _VectorTask(TextTask[R_co]):
    """A task for which texts become vectors.

    Args:
        model: the encoder and its dense layers.
        pooling: as of `sentence_vectors`.
        normalize: whether vectors have length 1.
        prepare: what becomes of a text before the tokenizer, such as a prompt before it.
        dimensions: columns that are kept, from the first one, before lengths become 1. None: all.

    Raises:
        ValueError: an unknown pooling, or dimensions that the model does not have.
    """

    fields = Fields()

    def __init__(
        self,
        model: BertForSentenceEmbedding,
        reader: TextEncoder,
        pooling: Pooling = "mean",
        *,
        normalize: bool = False,
        prepare: Callable[[str], str] | None = None,
        dimensions: int | None = None,
    ) -> None:
        super().__init__(model.bert, reader)
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}. Got {pooling!r}.")
        if dimensions is not None and not 1 <= dimensions <= model.width:
            raise ValueError(f"dimensions must be between 1 and the model's {model.width}. Got {dimensions}.")
        self.model, self.dense = model.bert, model.dense
        self.pooling, self.normalize, self.prepare = pooling, normalize, prepare
        self.columns = dimensions or model.width
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # by texts, the latest last

    def ready(self, queries: Sequence[Query]) -> list[Ready[EncodedText] | InputProblem]:
        if self.prepare is not None:
            queries = [dataclasses.replace(query, first=self.prepare(query.first)) for query in queries]
        return super().ready(queries)

    def vectors(self, batch: Sequence[EncodedText]) -> Tensor:
        """(N, columns) in fp32. Equal texts have equal ones, to the bit, in whatever batches they come, unless so many
        others come between them that the first one is forgotten."""
        by_key = {text.key: text for text in batch}
        known = {key: self._kept[key] for key in by_key if key in self._kept}
        fresh = [key for key in by_key if key not in known]
        if fresh:
            computed = self._computed([by_key[key] for key in fresh]).numpy()
            known |= {key: vector.copy() for key, vector in zip(fresh, computed, strict=True)}
        for key in by_key:
            self._kept[key] = known[key]
            self._kept.move_to_end(key)
        while len(self._kept) * self.columns * 4 > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return torch.from_numpy(np.stack([known[text.key] for text in batch]))

    def _computed(self, batch: Sequence[EncodedText]) -> Tensor:
        vectors = finite(sentence_vectors(self.model, batch, self.pooling, self.dense)).float()[:, : self.columns]
        return F.normalize(vectors, dim=1) if self.normalize else vectors


class Embed(_VectorTask[Embedded]):
    """The vector of a text."""

    def results(self, batch: Sequence[EncodedText]) -> list[Embedded]:
        return [Embedded(vector=vector) for vector in self.vectors(batch).numpy()]


class Search(_VectorTask[Found]):
    """The nearest of stored vectors to that of a text, by cosine, exactly.

    Args:
        stored: to search in.
        top: hits of a text.

    Raises:
        ValueError: vectors of another size, `top` below 1.
    """

    def __init__(self, *arguments: Any, stored: StoredVectors, top: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if top < 1:
            raise ValueError(f"top must be at least 1. Got {top}.")
        if stored.shape[1] != self.columns:
            raise ValueError(
                f"{stored.files[0][0]} has vectors of {stored.shape[1]} numbers, and those of the texts have "
                f"{self.columns}. Take the model that has made them, and the same --dimensions."
            )
        self.stored, self.top = stored, top

    def results(self, batch: Sequence[EncodedText]) -> list[Found]:
        scores, places = nearest(self.vectors(batch), self.stored, self.top)
        return [
            Found(hits=tuple(self._hit(*pair) for pair in zip(*of_text, strict=True) if pair[1] >= 0))
            for of_text in zip(scores.tolist(), places.tolist(), strict=True)
        ]

    def _hit(self, score: float, place: int) -> Hit:
        return Hit(index=place, score=score, id=self.stored.id_of(place))

"""Texts in, results out, in the same order, in batches of a given number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from tools.corpus.tokenizers.base import UnknownText
from tools.predict.inputs import InputProblem, Query, query_of
from tools.predict.tasks import PredictTask, Ready

OnError = Literal["stop", "skip"]
Item = str | Mapping[str, Any]
"""A text, or an object with texts, as a line of JSON has them."""
_BLOCK = 4  # batches that are read at a time
_BYTES = 4  # of a token, roughly
R = TypeVar("R")


class StopError(ValueError):
    """A text cannot be answered, and nothing is to be left out."""


class Predictor(Generic[R]):
    """A model with its tokenizer, ready to be asked; `tools.predict.load` makes one.

    On a cube every rank makes the same calls with the same texts, and all get the same results.

    Args:
        batch_tokens: tokens of a batch, about, special ones included; a text that is longer is a batch of its own.

    Raises:
        ValueError: batch_tokens below 1.
    """

    def __init__(self, task: PredictTask[Any, R], batch_tokens: int) -> None:
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1. Got {batch_tokens}.")
        self.task, self.batch_tokens = task, batch_tokens
        self.tokens = 0
        """Computed so far, special ones included."""

    @property
    def truncated(self) -> int:
        """Texts so far of which a part was left out."""
        return self.task.truncated

    @property
    def named(self) -> int:
        """Texts so far with the name of a special token in them."""
        return self.task.named

    @property
    def unknown(self) -> UnknownText:
        """How much of the texts so far the tokenizer has no pieces for."""
        return self.task.unknown

    @property
    def block_bytes(self) -> int:
        """Of texts to be read at a time: some batches, so that these can be made alike."""
        return _BLOCK * _BYTES * self.batch_tokens

    def predict(self, items: Iterable[Item]) -> list[R]:
        """The result of each text.

        Raises:
            ValueError: one text, where several are to be given; or a text that cannot be: its number, from 0, is named.
        """
        return list(self.stream(items))

    def stream(self, items: Iterable[Item]) -> Iterator[R]:
        """The results of any number of texts, of which only some batches are held at a time.

        Raises:
            ValueError: as `predict`, after the results of the texts before it.
        """
        if isinstance(items, str | Mapping):
            raise ValueError(f"a list of texts is needed, and this is one text: {items!r:.60}. Put it into a list.")
        return self._stream(items)

    def _stream(self, items: Iterable[Item]) -> Iterator[R]:
        for block in self._blocks(items):
            for batch in self.outcomes(block):
                for _, result in batch:
                    assert not isinstance(result, InputProblem), "a problem stops"
                    yield result

    def outcomes(
        self, queries: Sequence[Query | InputProblem], on_error: OnError = "stop"
    ) -> Iterator[list[tuple[Query | InputProblem, R | InputProblem]]]:
        """The results of queries, in their order, batch by batch.

        Args:
            on_error: "skip": a query that cannot be answered has its problem for a result.

        Raises:
            StopError: "stop", and a query that cannot be answered; after the results of those before it.
        """
        asked = [query for query in queries if isinstance(query, Query)]
        found = iter(self.task.ready(asked)) if asked else iter(())
        ready = [next(found) if isinstance(query, Query) else query for query in queries]
        stop = None
        if on_error == "stop":
            stop = next((number for number, one in enumerate(ready) if isinstance(one, InputProblem)), None)
        sizes = [one.tokens if isinstance(one, Ready) else 0 for one in ready[:stop]]
        for first, last in _even(sizes, self.batch_tokens):
            yield list(zip(queries[first:last], self._results(ready[first:last]), strict=True))
        if stop is not None:
            raise StopError(str(ready[stop]))

    def _results(self, batch: Sequence[Ready[Any] | InputProblem]) -> list[R | InputProblem]:
        computed = [one for one in batch if isinstance(one, Ready)]
        results = iter(self.task.results([one.content for one in computed])) if computed else iter(())
        self.tokens += sum(one.tokens for one in computed)
        return [next(results) if isinstance(one, Ready) else one for one in batch]

    def _blocks(self, items: Iterable[Item]) -> Iterator[list[Query | InputProblem]]:
        block: list[Query | InputProblem] = []
        size = 0
        for number, item in enumerate(items):
            query = query_of(item, self.task.fields, number)
            block.append(query)
            size += len(query.first) + len(query.second or "") if isinstance(query, Query) else 0
            if size >= self.block_bytes or isinstance(query, InputProblem):
                yield block
                block, size = [], 0
        if block:
            yield block


def _even(tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Bounds of consecutive batches of about as many tokens each, and of about `most` at most."""
    if not tokens:
        return []
    sizes = np.array(tokens, dtype=np.int64)
    total = max(1, int(sizes.sum()))
    batches = -(-total // most)
    # A text belongs to the batch in which its middle lies. In whole numbers: all ranks must come to the same.
    batch_of = np.minimum((2 * np.cumsum(sizes) - sizes) * batches // (2 * total), batches - 1)
    edges = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(tokens)]
    return list(pairwise(edges))

"""The task `fill-mask`: what may stand in the places of a text that are marked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from models.bert.model import BertForPreTraining
from models.bert.tasks import likely_pieces
from models.bert.text_batches import EncodedText
from tools.corpus.tokenizers.base import SPECIAL_NAMES
from tools.corpus.tokenizers.sentencepiece import SPACE
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import Filled, Piece
from tools.predict.tasks import Ready, TextTask, finite, problem_of
from tools.predict.text_encoder import TextEncoder

_BEGINNINGS = (SPACE, "Ġ")
"""Of the pieces that begin a word, in vocabularies of characters and of bytes."""
_BEFORE = ("a", "0", "e", "1", ".", "-", "(", "x", "q", "Z")
"""Words that may stand for a mask, so that what follows is encoded as behind a word: the first one with which it has
no piece in common."""


class _Part(NamedTuple):
    """What stands between two masks."""

    text: str
    goes_on: bool
    """There is no space between the mask and this."""


class FillMask(TextTask[Filled]):
    """The likeliest pieces for places of a text that its mask tokens mark.

    A mask takes the space before it, as pieces do in vocabularies whose pieces begin with one.

    Args:
        k: pieces of each place.

    Raises:
        ValueError: k below 1 or above the vocabulary.
    """

    fields = Fields()

    def __init__(self, model: BertForPreTraining, reader: TextEncoder, k: int = 5) -> None:
        super().__init__(model, reader)
        if not 1 <= k <= model.config.vocab:
            raise ValueError(f"k must lie between 1 and the vocabulary of {model.config.vocab}. Got {k}.")
        self.model, self.k = model, k
        self.mask = reader.tokenizer.special.mask
        self.name = reader.tokenizer.pieces([self.mask])[0]
        names = dict.fromkeys((self.name, SPECIAL_NAMES["mask"][0]))
        self._split = re.compile("|".join(map(re.escape, names))).split

    def ready(self, queries: Sequence[Query]) -> list[Ready[EncodedText] | InputProblem]:
        parts = [self._split(query.first) for query in queries]
        self.named += self.reader.tokenizer.count_named(map("\n".join, parts))  # masks are no texts' names here
        encoded = iter(self._encoded([part for of_text in parts for part in _between_masks(of_text)]))
        return [
            self._marked(query, [next(encoded) for _ in of_text]) for query, of_text in zip(queries, parts, strict=True)
        ]

    def _encoded(self, parts: Sequence[_Part]) -> list[list[int]]:
        """The ids of parts of texts. What goes on a word has no piece that begins one, as in a text without masks."""
        encode, texts = self.reader.tokenizer.encode, [part.text for part in parts]
        found = encode(texts)
        self.unknown += self.reader.tokenizer.count_unknown(texts, found)
        waiting = [place for place, part in enumerate(parts) if part.goes_on and self._begins_word(found[place])]
        for word in _BEFORE:
            if not waiting:
                break
            head, *whole = encode([word, *(word + parts[place].text for place in waiting)])
            for place, ids in zip(waiting, whole, strict=True):
                if ids[: len(head)] == head:
                    found[place] = ids[len(head) :]
            waiting = [place for place, ids in zip(waiting, whole, strict=True) if ids[: len(head)] != head]
        for place in waiting:
            if self.reader.tokenizer.pieces(found[place][:1]) == [SPACE]:
                del found[place][0]
        return found

    def _begins_word(self, ids: list[int]) -> bool:
        return bool(ids) and self.reader.tokenizer.pieces(ids[:1])[0].startswith(_BEGINNINGS)

    def _marked(self, query: Query, parts: list[list[int]]) -> Ready[EncodedText] | InputProblem:
        if len(parts) == 1:
            return problem_of(query, f"no mask. Write {self.name} where a piece is asked for.")
        ids = [number for part in parts for number in (self.mask, *part)][1:]
        found = self._ready(query, ids)
        if isinstance(found, InputProblem):
            return found
        text = found.content
        # No text becomes a special token by itself: these are the places that were marked.
        masked = np.flatnonzero(text.ids == self.mask)
        if len(masked) < len(parts) - 1:
            return problem_of(
                query, f"a mask stands behind the {self.reader.max_length} places of the model. Shorten the text."
            )
        return Ready(content=EncodedText(ids=text.ids, types=text.types, masked=masked), tokens=found.tokens)

    def results(self, batch: Sequence[EncodedText]) -> list[Filled]:
        ids, probabilities = likely_pieces(self.model, batch, self.k)
        finite(probabilities)
        # The embedding may have more rows than the vocabulary has pieces.
        known = self.reader.tokenizer.vocab_size
        pieces = [
            tuple(
                Piece(
                    piece=self.reader.tokenizer.pieces([number])[0] if number < known else "",
                    id=number,
                    probability=probability,
                    text=self.reader.tokenizer.decode([number]) if number < known else "",
                )
                for number, probability in zip(numbers, chances, strict=True)
            )
            for numbers, chances in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        places = iter(pieces)
        return [self._filled(text, [next(places) for _ in text.masked]) for text in batch]

    def _filled(self, text: EncodedText, masks: list[tuple[Piece, ...]]) -> Filled:
        ids = text.ids.copy()
        known = self.reader.tokenizer.vocab_size
        ids[text.masked] = [pieces[0].id if pieces[0].id < known else self.mask for pieces in masks]
        return Filled(text=self.reader.tokenizer.decode(ids[1:-1].tolist()), masks=tuple(masks))


def _between_masks(texts: Sequence[str]) -> Iterator[_Part]:
    for number, text in enumerate(texts):
        # The space before a mask is its own.
        kept = text.rstrip() if number < len(texts) - 1 else text
        yield _Part(kept, goes_on=number > 0 and not text[:1].isspace())

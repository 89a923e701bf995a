"""The task `score`: how likely a masked language model finds a text, which no model reads from left to right.

Each piece is hidden in turn, and the log-probabilities that the model gives them are added up: the text's
pseudo-log-likelihood (Salazar et al. 2020, "Masked language model scoring"). A text of n pieces is n sequences, which
differ in one token; they are packed, so hundreds of them are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.bert.model import BertForPreTraining
from models.bert.tasks import piece_losses
from models.bert.text_batches import EncodedText
from tools.common.workers import split
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import Scored, ScoredPiece, perplexity_of
from tools.predict.tasks import Ready, TextTask, finite
from tools.predict.text_encoder import TextEncoder


class Score(TextTask[Scored]):
    """The pseudo-log-likelihood of a text, or the masked-LM loss of it.

    Args:
        batch_tokens: of the variants that are computed at a time.
        masked_share: None: each piece is hidden in turn. Else this share of the pieces, at least one, is hidden at
            once: the loss of pre-training, but that all of them are replaced by the mask.
        seed: of the draw of places, which depends on the text's number too, and on nothing else.

    Raises:
        ValueError: a share not above 0, or above 1, or a negative seed.
    """

    fields = Fields()

    def __init__(
        self,
        model: BertForPreTraining,
        reader: TextEncoder,
        batch_tokens: int,
        masked_share: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, reader)
        if masked_share is not None and not 0 < masked_share <= 1:
            raise ValueError(f"masked_share must be above 0 and at most 1. Got {masked_share}.")
        if seed < 0:
            raise ValueError(f"seed must be at least 0. Got {seed}.")
        self.model, self.batch_tokens, self.masked_share, self.seed = model, batch_tokens, masked_share, seed
        self._mask = reader.tokenizer.special.mask
        self._pieces = self._guessed = 0
        self._losses: list[float] = []

    @property
    def findings(self) -> str:
        if not self._pieces:
            return ""
        loss = math.fsum(self._losses) / self._pieces
        return (
            f"; {self._pieces:,} pieces hidden, loss {loss:.4f} nats, perplexity {perplexity_of(loss):,.2f}, "
            f"{self._guessed / self._pieces:.2%} guessed"
        )

    def _ready(
        self, query: Query, first: list[int], second: list[int] | None = None
    ) -> Ready[EncodedText] | InputProblem:
        found = super()._ready(query, first, second)
        if isinstance(found, InputProblem):
            return found
        text = found.content
        places = np.arange(1, len(text.ids) - 1)  # not [CLS] and [SEP]
        variants = len(places)
        if self.masked_share is not None:
            draw = np.random.default_rng([self.seed, query.number])
            count = max(1, round(self.masked_share * len(places)))
            places, variants = np.sort(draw.choice(places, count, replace=False)), 1
        whole = EncodedText(ids=text.ids, types=text.types, masked=places, hidden=text.ids[places])
        return Ready(content=whole, tokens=variants * len(text.ids))

    def results(self, batch: Sequence[EncodedText]) -> list[Scored]:
        variants = [variant for text in batch for variant in self._variants(text)]
        losses, right = [], []
        for part in split([len(variant.ids) for variant in variants], self.batch_tokens):
            of_part, best = piece_losses(self.model, variants[part])
            losses += finite(of_part).tolist()
            hidden = np.concatenate([variant.hidden for variant in variants[part] if variant.hidden is not None])
            right += (best.numpy() == hidden).tolist()
        self._pieces, self._guessed = self._pieces + len(losses), self._guessed + sum(right)
        self._losses = [math.fsum([*self._losses, *losses])]
        told = zip(losses, right, strict=True)
        return [
            Scored(
                pieces=tuple(
                    ScoredPiece(piece=piece, log_probability=-loss, likeliest=is_right)
                    for piece, (loss, is_right) in zip(self._names(text), told, strict=False)
                )
            )
            for text in batch
        ]

    def _variants(self, text: EncodedText) -> list[EncodedText]:
        places = text.masked if self.masked_share is None else [text.masked]
        return [self._hiding(text, np.atleast_1d(place)) for place in places]

    def _hiding(self, text: EncodedText, places: NDArray[np.int64]) -> EncodedText:
        ids = text.ids.copy()
        ids[places] = self._mask
        return EncodedText(ids=ids, types=text.types, masked=places, hidden=text.ids[places])

    def _names(self, text: EncodedText) -> list[str]:
        return self.reader.tokenizer.pieces(text.ids[text.masked].tolist())

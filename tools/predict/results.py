"""What a model says of one text, by kind of question."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_NATS = 700.0
"""Above it the exponential is no number any more."""
_DIGITS = 8
"""Decimals of a vector's numbers in JSON: an fp32 number near 1 has 7."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One way to fill a mask."""

    piece: str
    """As the vocabulary has it."""
    id: int
    probability: float
    text: str
    """In letters: a vocabulary of bytes has them in letters of its own."""

    def in_words(self) -> str:
        """The piece, with its text where that cannot be read off it."""
        text = self.text.strip()
        return self.piece if text in self.piece or "\ufffd" in text else f"{self.piece}  {text}"


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A text with its masks filled."""

    text: str
    """The text with the likeliest piece in each mask, as the tokenizer writes it."""
    masks: tuple[tuple[Piece, ...], ...]
    """The likeliest pieces of each mask, likeliest first; each mask is filled as if the others stayed masks."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> list[str]:
        """Lines to be read on a terminal."""
        lines = [self.text]
        for number, pieces in enumerate(self.masks, start=1):
            lines += [f"  mask {number}:"] if len(self.masks) > 1 else []
            lines += [f"  {found.probability:7.2%}  {found.in_words()}" for found in pieces]
        return lines


def perplexity_of(loss: float) -> float:
    """Of the mean loss of a piece, in nats."""
    return math.exp(min(loss, _MOST_NATS))


@dataclass(frozen=True, kw_only=True)
class ScoredPiece:
    """A piece of a text that was hidden from the model."""

    piece: str
    """As the vocabulary has it."""
    log_probability: float
    """nats"""
    likeliest: bool
    """Whether the model would have guessed it."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """How likely a text is to a model that sees it with pieces hidden (Salazar et al. 2020)."""

    pieces: tuple[ScoredPiece, ...]
    """Those that were hidden, in their order."""

    @property
    def score(self) -> float:
        """The sum of the log-probabilities, in nats: the pseudo-log-likelihood where every piece was hidden in turn."""
        return math.fsum(piece.log_probability for piece in self.pieces)

    @property
    def perplexity(self) -> float:
        return perplexity_of(-self.score / len(self.pieces))

    @property
    def accuracy(self) -> float:
        """The share of the pieces that the model would have guessed."""
        return sum(piece.likeliest for piece in self.pieces) / len(self.pieces)

    def as_json(self) -> dict[str, Any]:
        return {
            "score": self.score,
            "tokens": len(self.pieces),
            "perplexity": self.perplexity,
            "accuracy": self.accuracy,
        }

    def with_pieces(self) -> dict[str, Any]:
        return {**self.as_json(), "pieces": [asdict(piece) for piece in self.pieces]}

    def in_words(self) -> list[str]:
        head = f"{self.score:.3f} nats, perplexity {self.perplexity:,.2f}, {self.accuracy:.1%} guessed"
        shown = [f"  {math.exp(each.log_probability):7.2%}  {each.piece}" for each in self.pieces]
        return [head, *shown]


@dataclass(frozen=True, kw_only=True)
class Classified:
    """The class of a text or a pair."""

    label: str
    """The likeliest one."""
    probabilities: dict[str, float]
    """By label, in the model's order."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> list[str]:
        others = sorted(self.probabilities.items(), key=lambda item: -item[1])
        return [self.label, *(f"  {probability:7.2%}  {label}" for label, probability in others)]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """The classes of a text or a pair, of a model by which several may hold at once, or none."""

    probabilities: dict[str, float]
    """By label, in the model's order; each between 0 and 1, whatever the others are."""
    thresholds: dict[str, float] | None = None
    """By label, as fine-tuning has found them."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that reach their thresholds, or are likelier than not where there are none, in the model's order."""
        least = self.thresholds
        return tuple(
            label
            for label, probability in self.probabilities.items()
            if (probability > 0.5 if least is None else probability >= least[label])
        )

    def as_json(self) -> dict[str, Any]:
        return {"labels": list(self.labels), "probabilities": self.probabilities}

    def in_words(self) -> list[str]:
        others = sorted(self.probabilities.items(), key=lambda item: -item[1])
        shown = [f"  {probability:7.2%}  {label}" for label, probability in others]
        return [", ".join(self.labels) or "(no label)", *shown]


@dataclass(frozen=True, kw_only=True)
class Valued:
    """The number that a regression model gives a text or a pair."""

    value: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> list[str]:
        return [f"{self.value:.6g}"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of the context. Empty, at 0: no answer."""

    text: str
    start: int
    """First character in the context."""
    end: int
    """The character after the last."""
    probability: float
    """Over the answers that were compared."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Answers to a question, best first."""

    answers: tuple[Span, ...]

    @property
    def best(self) -> Span:
        return self.answers[0]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.best), "n_best": [asdict(answer) for answer in self.answers]}

    def in_words(self) -> list[str]:
        shown = [f"  {span.probability:7.2%}  {span.text or '(no answer)'}" for span in self.answers]
        return [self.best.text or "(no answer)", *shown]


@dataclass(frozen=True, kw_only=True)
class RankedPassage:
    """A passage in its place."""

    rank: int
    """From 1."""
    index: int
    """Its place among those that were given, from 0."""
    id: Any
    """What the input calls it; None where it has no name."""
    score: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The passages of a query, best first; of equal scores in the order in which they were given."""

    query: str
    passages: tuple[RankedPassage, ...]

    def as_json(self) -> dict[str, Any]:
        told = (asdict(each) for each in self.passages)
        passages = [{key: value for key, value in each.items() if key != "id" or value is not None} for each in told]
        return {"query": self.query, "passages": passages}

    def in_words(self) -> list[str]:
        return [f"  {each.score:9.4f}  {each.text}" for each in self.passages]


@dataclass(frozen=True, kw_only=True)
class TaggedSpan:
    """A part of a text that is one thing, such as a name."""

    start: int
    """First character in the text."""
    end: int
    """The character after the last."""
    label: str
    text: str
    probability: float
    """Mean over the words, each by itself, of those of their tags."""


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """A text with a tag for each of its words, and what they spell."""

    text: str
    """As it was given, or the given words with a space between them."""
    tokens: tuple[str, ...]
    """The words."""
    tags: tuple[str, ...]
    spans: tuple[TaggedSpan, ...]

    def as_json(self) -> dict[str, Any]:
        return {"text": self.text, "spans": [asdict(span) for span in self.spans]}

    def as_tokens(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "tags": list(self.tags)}

    def in_words(self) -> list[str]:
        lines = [f"  {span.probability:7.2%}  {span.label}  {span.text}" for span in self.spans]
        return lines or ["(nothing is tagged)"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Embedded:
    """The vector of a text."""

    vector: NDArray[np.float32]
    """(H,)"""

    def as_json(self) -> dict[str, Any]:
        return {"vector": self.vector.astype(np.float64).round(_DIGITS).tolist()}

    def in_words(self) -> list[str]:
        return [" ".join(f"{value:.4f}" for value in self.vector.tolist())]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A text whose vector was found."""

    index: int
    """Its place among those that were searched in, from 0."""
    score: float
    """Cosine."""
    id: Any = None
    """As its file has it; None in an array."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The texts whose vectors are nearest to that of a text."""

    hits: tuple[Hit, ...]
    """Nearest first; of equal ones the first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "hits": [{name: value for name, value in asdict(hit).items() if value is not None} for hit in self.hits]
        }

    def in_words(self) -> list[str]:
        return [f"  {hit.score:.4f}  {hit.index if hit.id is None else hit.id}" for hit in self.hits]


Result = Filled | Scored | Classified | Labelled | Valued | Answered | Tagged | Ranked | Embedded | Found

"""Answers of a trained model: pieces for masks, scores of texts, classes, spans, tags, ranks, vectors.

from tools.predict import load
load("runs/quickstart", "fill-mask").predict(["The [MASK] of a list is counted from zero."])
"""

from tools.predict.loading import load
from tools.predict.predictor import Predictor
from tools.predict.results import (
    Answered,
    Classified,
    Embedded,
    Filled,
    Found,
    Hit,
    Labelled,
    Piece,
    Ranked,
    RankedPassage,
    Scored,
    ScoredPiece,
    Span,
    Tagged,
    TaggedSpan,
    Valued,
)

__all__ = [
    "Answered",
    "Classified",
    "Embedded",
    "Filled",
    "Found",
    "Hit",
    "Labelled",
    "Piece",
    "Predictor",
    "Ranked",
    "RankedPassage",
    "Scored",
    "ScoredPiece",
    "Span",
    "Tagged",
    "TaggedSpan",
    "Valued",
    "load",
]

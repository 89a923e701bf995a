"""Answers of a trained model: pieces for masks, classes, spans, tags, vectors.

from tools.predict import load
load("runs/quickstart", "fill-mask").predict(["The [MASK] of a list is counted from zero."])
"""

from tools.predict.predictor import Predictor, load
from tools.predict.results import (
    Answered,
    Classified,
    Embedded,
    Filled,
    Labelled,
    Piece,
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
    "Labelled",
    "Piece",
    "Predictor",
    "Span",
    "Tagged",
    "TaggedSpan",
    "Valued",
    "load",
]

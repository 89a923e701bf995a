"""How good answers are, as SQuAD's own scripts count it (evaluate-v1.1.py and evaluate-v2.0.py)."""

from __future__ import annotations

import dataclasses
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.squad.dataset import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """Lower case, without punctuation of ASCII and articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 where both are the same, normalised; else 0."""
    return float(normalize(prediction) == normalize(reference))


def f1(prediction: str, reference: str, *, impossible: bool = False) -> float:
    """Harmonic mean of precision and recall of the words, each counted as often as it stands there.

    Args:
        impossible: as version 2.0 counts: 1 where neither has a word; in version 1.1 this is 0.
    """
    said, wanted = normalize(prediction).split(), normalize(reference).split()
    if not said or not wanted:
        return float(impossible and said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2.0 * common / (len(said) + len(wanted))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Of each question, the best over its references; 0 where there is no prediction."""

    exact: NDArray[np.float64]
    f1: NDArray[np.float64]
    answerable: NDArray[np.bool_]
    """Whether the question has an answer."""
    said: NDArray[np.bool_]
    """Whether the prediction is an answer, not the empty text."""
    missing: int
    """Questions without a prediction."""

    def summary(self, *, impossible: bool) -> dict[str, float]:
        """Percentages, by the names that the script of this version gives them.

        Args:
            impossible: of version 2.0.
        """
        if not impossible:
            return {"exact_match": _percent(self.exact), "f1": _percent(self.f1)}
        found: dict[str, float] = {"exact": _percent(self.exact), "f1": _percent(self.f1), "total": len(self.exact)}
        for name, chosen in (("HasAns", self.answerable), ("NoAns", ~self.answerable)):
            if chosen.any():
                found[f"{name}_exact"] = _percent(self.exact[chosen])
                found[f"{name}_f1"] = _percent(self.f1[chosen])
                found[f"{name}_total"] = int(chosen.sum())
        return found


def score(questions: Sequence[Question], predictions: Mapping[str, str], *, impossible: bool) -> Scores:
    """Scores of predictions by the ids of the questions.

    Args:
        impossible: count as version 2.0 does: references without a word are left out, and where none is left, the empty
            text is the one to be met.
    """
    exact, overlap = np.zeros(len(questions)), np.zeros(len(questions))
    said = np.zeros(len(questions), dtype=np.bool_)
    missing = 0
    for number, question in enumerate(questions):
        prediction = predictions.get(question.id)
        if prediction is None:
            missing += 1
            continue
        said[number] = bool(prediction)
        references = [text for text, _ in question.answers if normalize(text) or not impossible] or [""]
        exact[number] = max(exact_match(prediction, reference) for reference in references)
        overlap[number] = max(f1(prediction, reference, impossible=impossible) for reference in references)
    return Scores(
        exact=exact,
        f1=overlap,
        answerable=np.array([bool(question.answers) for question in questions], dtype=np.bool_),
        said=said,
        missing=missing,
    )


def without_answer(scores: Scores, odds: NDArray[np.float64], threshold: float) -> Scores:
    """The scores where questions whose odds of "no answer" are above the threshold are taken to have none."""
    none = odds > threshold
    right = (~scores.answerable).astype(np.float64)
    return dataclasses.replace(
        scores, exact=np.where(none, right, scores.exact), f1=np.where(none, right, scores.f1), said=scores.said & ~none
    )


def best_threshold(values: NDArray[np.float64], scores: Scores, odds: NDArray[np.float64]) -> tuple[float, float]:
    """The best mean score, in percent, and the threshold on the odds of "no answer" that gives it: questions with odds
    above it have no answer, whatever was predicted.

    Args:
        values: of `scores`: its `exact` or its `f1`.
        odds: of each question.
    """
    order = np.argsort(odds, kind="stable")
    # From "no answer" to all questions, one prediction after another comes to count.
    gains = np.where(scores.answerable, values, np.where(scores.said, -1.0, 0.0))[order]
    sums = int((~scores.answerable).sum()) + np.concatenate(([0.0], np.cumsum(gains)))
    place = int(sums.argmax())
    return 100.0 * float(sums[place]) / len(values), float(odds[order[place - 1]]) if place else 0.0


def reachable_threshold(values: NDArray[np.float64], scores: Scores, odds: NDArray[np.float64]) -> float:
    """The threshold with the best mean of `values` when it is applied with `without_answer`.

    That of the script, `best_threshold`, need not have the score that it is told with: it may part questions with the
    same odds, and where silence is best it is 0. This one lies below all odds, above them, or between two of them.

    Args:
        values: of `scores`: its `exact` or its `f1`.
        odds: of each question; finite.
    """
    order = np.argsort(odds, kind="stable")
    ranked = odds[order]
    gains = (values - ~scores.answerable)[order]
    sums = np.concatenate(([0.0], np.cumsum(gains)))
    # Questions with the same odds come to count together.
    ends = np.concatenate(([True], ranked[1:] > ranked[:-1], [True]))
    place = int(np.where(ends, sums, -np.inf).argmax())
    if place == 0:
        return float(min(ranked[0] - 1.0, np.nextafter(ranked[0], -np.inf)))
    if place == len(ranked):
        return float(ranked[-1])
    low, high = float(ranked[place - 1]), float(ranked[place])
    middle = low + (high - low) / 2
    return middle if low <= middle < high else low


def best_thresholds(scores: Scores, odds: NDArray[np.float64]) -> dict[str, float]:
    """Both best scores and their thresholds, as evaluate-v2.0.py names them."""
    found: dict[str, float] = {}
    for name, values in (("exact", scores.exact), ("f1", scores.f1)):
        found[f"best_{name}"], found[f"best_{name}_thresh"] = best_threshold(values, scores, odds)
    return found


def _percent(values: NDArray[np.float64]) -> float:
    return 100.0 * float(values.mean()) if len(values) else 0.0

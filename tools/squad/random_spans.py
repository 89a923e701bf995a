"""What guessing gives: a baseline for scores."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tools.squad.questions import Question

_WORD = re.compile(r"\S+")


def random_spans(questions: Sequence[Question], *, longest: int = 30, seed: int = 0) -> dict[str, str]:
    """An answer to each question, by its id, that does not look at the question: words of the context, the first one
    drawn uniformly from all of them, and then their number, from 1 to `longest` or as many as there are.

    Raises:
        ValueError: a context without a word.
    """
    random = np.random.default_rng(seed)
    spans = {}
    for question in questions:
        words = [found.span() for found in _WORD.finditer(question.context)]
        if not words:
            raise ValueError(f"the context of question {question.id!r} has no word to guess. Leave it out.")
        first = int(random.integers(len(words)))
        last = first + int(random.integers(min(longest, len(words) - first)))
        spans[question.id] = question.context[words[first][0] : words[last][1]]
    return spans

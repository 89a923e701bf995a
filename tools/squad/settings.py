"""How contexts are cut into windows, and which spans may be answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FACTS = "answer"
"""Where `facts` of a model.json keep these settings."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """Numbers as Devlin et al. 2018 and their code have them.

    Raises:
        ValueError: a number out of its range, or windows with no room for a context.
    """

    max_length: int = 384
    """Tokens of a window, special ones included."""
    stride: int = 128
    """Tokens of the context between the beginnings of two windows."""
    question_length: int = 64
    """Tokens of a question, at most; the rest is left out."""
    answer_length: int = 30
    """Tokens of an answer, at most."""
    no_answer: bool = False
    """A question may have no answer, as in SQuAD v2.0."""
    null_threshold: float = 0.0
    """There is no answer where the score of [CLS] exceeds the best answer's by more than this: in a model.json the one
    that was found on dev, where fine-tuning looked for one."""

    def __post_init__(self) -> None:
        for name in ("stride", "question_length", "answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.max_length < self.question_length + 4:
            raise ValueError(
                f"max_length must be at least question_length={self.question_length} and 4 more: three special tokens "
                f"and one of the context. Got {self.max_length}."
            )
        if not math.isfinite(self.null_threshold):
            raise ValueError(f"null_threshold must be finite. Got {self.null_threshold}.")

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> AnswerSettings:
        """The settings that a model was fine-tuned with, of `facts` of its model.json; defaults where it tells none.

        Raises:
            ValueError: what stands there is no such settings.
        """
        told = facts.get(FACTS, {})
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in told.items() if name in names})
        except (TypeError, AttributeError) as problem:
            raise ValueError(f"model.json: facts.{FACTS} are no settings of answers: {told!r:.80}.") from problem

    def fitted(self, positions: int) -> AnswerSettings:
        """The same for sequences of at most so many tokens: shorter windows, and what depends on their length."""
        if self.max_length <= positions:
            return self
        return dataclasses.replace(
            self,
            max_length=positions,
            stride=max(1, min(self.stride, positions // 3)),
            question_length=max(1, min(self.question_length, positions // 3 - 3)),
        )

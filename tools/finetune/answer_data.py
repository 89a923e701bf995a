"""The section `data` of question answering, and the windows of the questions that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.corpus.tokenizers import Tokenizer
from tools.squad.questions import Bad, Question, Questions, read_questions, subset
from tools.squad.settings import AnswerSettings
from tools.squad.windows import Windows, make_windows


@dataclass(frozen=True, kw_only=True)
class AnswerData:
    """Files of SQuAD v1.1 or v2.0. Questions may have no answer where the training file is one of v2.0.

    Raises:
        ValueError: a number out of its range, or windows with no room for a context.
    """

    train: str = ""
    """File to train on."""
    dev: str = ""
    """File to measure on while training: it decides which weights are kept."""
    test: str | None = None
    """File of questions to answer at the end. It needs no answers."""
    max_length: int = 384
    """Tokens of a window, special ones included."""
    stride: int = 128
    """Tokens of the context between the beginnings of two windows."""
    question_length: int = 64
    """Tokens of a question, at most; the rest is left out."""
    answer_length: int = 30
    """Tokens of an answer, at most."""
    null_threshold: float | None = None
    """Of v2.0: there is no answer where the score of [CLS] exceeds the best answer's by more than this. Default: the
    best one on dev."""
    n_best: int = 20
    """Answers that nbest_predictions.json has of a question, at most."""
    max_train_questions: int = 0
    """Train on so many, drawn at random, the same in every run. 0: on all."""
    max_dev_questions: int = 0
    """Measure on so many, drawn in the same way. 0: on all."""
    bad: Bad = "refuse"
    """What becomes of a question whose answer does not occur in its context: an error, or it is left out."""

    def __post_init__(self) -> None:
        for name, least in (("n_best", 1), ("max_train_questions", 0), ("max_dev_questions", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} must be at least {least}. Got {getattr(self, name)}.")
        try:
            self.settings(no_answer=False)
        except ValueError as problem:
            raise ValueError(f"data.{problem}") from None

    def settings(self, *, no_answer: bool) -> AnswerSettings:
        return AnswerSettings(
            max_length=self.max_length,
            stride=self.stride,
            question_length=self.question_length,
            answer_length=self.answer_length,
            no_answer=no_answer,
            null_threshold=self.null_threshold or 0.0,
        )

    def files(self) -> list[Path]:
        """Raises ValueError where train or dev is not named."""
        for name in ("train", "dev"):
            if not getattr(self, name):
                raise ValueError(f"data.{name} must name a file of SQuAD v1.1 or v2.0: --data.{name} FILE. Got none.")
        return [Path(name) for name in (self.train, self.dev, self.test) if name is not None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The questions of one file, as the model reads them."""

    questions: Sequence[Question]
    windows: Windows
    impossible: bool
    """Of v2.0."""

    @property
    def contexts(self) -> list[str]:
        return [question.context for question in self.questions]


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """All that is read, and what is said of it."""

    train: Part
    targets: np.ndarray
    """int64 (windows of train, 2): see `Windows.targets`."""
    dev: Part
    test: Part | None
    report: tuple[str, ...]
    """A line a file."""


def read_parts(data: AnswerData, tokenizer: Tokenizer, *, progress: bool) -> Parts:
    """Reads and encodes the files.

    Raises:
        ValueError: see `read_questions`; the training file is of another version than dev.
    """
    data.files()
    report: list[str] = []

    def read(name: str, most: int = 0) -> Part:
        path = Path(getattr(data, name))
        found = read_questions(path, bad=data.bad, answers=name != "test")
        questions = subset(found.questions, most)
        try:
            windows = make_windows(
                [(question.text, question.context) for question in questions],
                tokenizer,
                data.settings(no_answer=found.impossible),
                names=[question.id for question in questions],
                progress=progress,
            )
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None
        report.append(_told(name, found, len(questions), len(windows)))
        return Part(questions=questions, windows=windows, impossible=found.impossible)

    train, dev = read("train", data.max_train_questions), read("dev", data.max_dev_questions)
    if train.impossible != dev.impossible:
        versions = {True: "v2.0 (its questions have is_impossible)", False: "v1.1"}
        raise ValueError(
            f"{data.train} is SQuAD {versions[train.impossible]}, and {data.dev} is {versions[dev.impossible]}. "
            "Take two files of the same version."
        )
    targets = train.windows.targets([_span(question) for question in train.questions])
    lost = len(np.unique(train.windows.question[targets[:, 0] < 0]))
    if lost:
        report.append(f"train: {lost:,} questions are left out, as no token has a character of their answer")
    if lost == len(train.questions):
        raise ValueError(f"{data.train}: no token has a character of any answer. Take another tokenizer.")
    return Parts(
        train=train,
        targets=targets,
        dev=dev,
        test=None if data.test is None else read("test"),
        report=tuple(report),
    )


def _span(question: Question) -> tuple[int, int] | None:
    """Characters of the first answer, which is the one to learn, as in the published code."""
    if not question.answers:
        return None
    text, start = question.answers[0]
    return start, start + len(text)


def _told(name: str, found: Questions, questions: int, windows: int) -> str:
    parts = [f"{name}: {questions:,} questions of {len(found.questions):,}, {windows:,} windows"]
    if found.moved:
        parts.append(f"{found.moved:,} answers moved to where their text is")
    if found.skipped:
        parts.append(f"{found.skipped:,} questions left out, whose answer does not occur")
    return "; ".join(parts)

"""Question answering as a task: where in a text does its answer begin, and where does it end? (Devlin et al. 2018,
§4.2 and §4.3)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.bert import BertConfig
from models.bert.tasks import BertForQuestionAnswering
from models.bert.text_batches import TextBatch
from tensor3d import Cube
from tensor3d.data.packed_batch import IGNORED
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.bounds import AtLeast, check_bounds
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.config import FinetuneConfig
from tools.finetune.tasks import Evaluation, Example, TaskFacts
from tools.squad.dataset import Bad, Question, Questions, read_questions, subset, write_answers
from tools.squad.decode import Choice, all_logits, choose
from tools.squad.scoring import reachable_threshold, score, without_answer
from tools.squad.windows import FACTS, AnswerSettings, Windows, make_windows, unknown_in

# --- The section `data` of question answering, and the windows of the questions that it names -------------------------


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
    n_best: Annotated[int, AtLeast(1)] = 20
    """Answers that nbest_predictions.json has of a question, at most."""
    max_train_questions: Annotated[int, AtLeast(0)] = 0
    """Train on so many, drawn at random, the same in every run. 0: on all."""
    max_dev_questions: Annotated[int, AtLeast(0)] = 0
    """Measure on so many, drawn in the same way. 0: on all."""
    bad: Bad = "refuse"
    """What becomes of a question whose answer does not occur in its context: an error, or it is left out."""

    def __post_init__(self) -> None:
        check_bounds(self, "data")
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
        texts = [(question.text, question.context) for question in questions]
        try:
            windows = make_windows(
                texts,
                tokenizer,
                data.settings(no_answer=found.impossible),
                names=[question.id for question in questions],
                progress=progress,
            )
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None
        unknown = unknown_in(texts, windows, tokenizer)
        told = [_told(name, found, len(questions), len(windows)), unknown.in_words()]
        report.append("; ".join(filter(None, told)))
        return Part(questions=questions, windows=windows, impossible=found.impossible)

    train, dev = read("train", data.max_train_questions), read("dev", data.max_dev_questions)
    if train.impossible != dev.impossible:
        versions = {True: "v2.0 (its questions have is_impossible)", False: "v1.1"}
        raise ValueError(
            f"{data.train} is SQuAD {versions[train.impossible]}, and {data.dev} is {versions[dev.impossible]}. "
            "Take two files of the same version."
        )
    if data.null_threshold is not None and not train.impossible:
        report.append(
            f"data.null_threshold = {data.null_threshold!r} changes nothing: it is for SQuAD v2.0, and {data.train} is "
            "v1.1"
        )
    targets = train.windows.targets([_span(question) for question in train.questions])
    lost = len(np.unique(train.windows.question[targets[:, 0] < 0]))
    if lost:
        report.append(f"train: {lost:,} questions are left out, as no token has a character of their answer")
    if cut := _cut_answers(train, targets):
        report.append(
            f"train: {cut:,} answers lie in no window as a whole, and their questions are learnt as if there were no "
            f"answer. Windows that overlap more hold them: lower data.stride = {data.stride}, or raise data.max_length"
        )
    if lost == len(train.questions):
        raise ValueError(f"{data.train}: no token has a character of any answer. Take another tokenizer.")
    return Parts(
        train=train,
        targets=targets,
        dev=dev,
        test=None if data.test is None else read("test"),
        report=tuple(report),
    )


def _cut_answers(part: Part, targets: np.ndarray) -> int:
    """Questions with an answer of which some token is in each window, or none, and not all are in one."""
    count = len(part.questions)
    best = np.full(count, -1)
    np.maximum.at(best, part.windows.question, targets[:, 0])
    answered = np.array([bool(question.answers) for question in part.questions])
    return int(np.count_nonzero(answered & (best == 0)))


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


# --- Question answering as a task -------------------------------------------------------------------------------------

_METRICS = {False: ("f1", "exact_match"), True: ("f1", "exact", "best_f1", "best_exact")}
"""By which the best weights may be known, the default first, by whether questions may have no answer."""


class AnswerTask:
    """Windows of questions and contexts, with the places of the answer's first and last token.

    Every rank makes one at the same point; the files are read and encoded on the first one alone.

    Raises:
        ValueError: of a file, naming it and the question; an unknown metric.
    """

    name, unit = "answer", "windows"
    truncated = 0  # contexts are read whole, in windows

    def __init__(self, data: AnswerData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> None:
        parts = run_on_rank0(cube, lambda: read_parts(data, tokenizer, progress=True), any_time=True)
        self.notes = parts.report
        self._settings = data.settings(no_answer=parts.train.impossible)
        self._find_threshold = parts.train.impossible and data.null_threshold is None
        self._n_best, self._options, self._cube = data.n_best, recipe.model, cube
        self._slots = recipe.run.tokens_per_rank * cube.shape.ranks
        self._parts = {"dev": parts.dev} | ({} if parts.test is None else {"test": parts.test})
        self.train = _Examples(parts.train.windows, parts.targets)
        metrics = _METRICS[parts.train.impossible]
        self.best = recipe.run.metric or metrics[0]
        if self.best not in metrics:
            raise ValueError(f"run.metric of {self.name} is one of {', '.join(metrics)} here. Got {self.best!r}.")

    def make_model(self, config: BertConfig, cube: Cube) -> BertForQuestionAnswering:
        return BertForQuestionAnswering(
            config, cube, recompute=self._options.recompute, reshard_after_forward=self._options.reshard_after_forward
        )

    def loss(self, model: BertForQuestionAnswering, laid: TextBatch, examples: Sequence[Example], texts: int) -> Tensor:
        targets = torch.from_numpy(np.stack([example.target for example in examples]))
        starts, ends = (laid.spread(side, IGNORED) for side in targets.unbind(1))
        loss: Tensor = model(laid, starts, ends, texts)
        return loss

    @property
    def parts(self) -> Sequence[str]:
        return tuple(self._parts)

    def outputs(self, model: BertForQuestionAnswering, part: str) -> list[NDArray[np.float32]]:
        """Of each window (tokens, 2)."""
        return all_logits(model, self._parts[part].windows, batch_tokens=self._slots)

    def evaluate(self, model: BertForQuestionAnswering) -> Evaluation:
        """Scores as SQuAD's own scripts count them, in percent. Of v2.0, "best_f1" and "best_exact" are those with the
        best thresholds on dev; "f1" and "exact" have the threshold of the recipe, or without one that of the best
        "f1" ("exact", where `best` is about that)."""
        logits = self.outputs(model, "dev")
        metrics, settings = run_on_rank0(self._cube, lambda: self._measured(logits))
        return Evaluation(metrics=metrics, outputs={"dev": logits}, facts={FACTS: dataclasses.asdict(settings)})

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """predictions.json and nbest_predictions.json of dev, and null_odds.json of v2.0; the same of test, with
        "test-" before the names."""
        settings = AnswerSettings.from_facts(best.facts)

        def written() -> list[Path]:
            files: list[Path] = []
            for name, part in self._parts.items():
                choices = self._choices(part, best.outputs[name])
                files += write_answers(folder, part.questions, choices, settings, "" if name == "dev" else f"{name}-")
            return files

        return run_on_rank0(self._cube, written)

    def facts(self) -> TaskFacts:
        settings = dataclasses.asdict(self._settings)
        return TaskFacts(problem="answer", more={"max_length": self._settings.max_length, FACTS: settings})

    def _choices(self, part: Part, logits: Sequence[NDArray[np.float32]]) -> list[Choice]:
        return choose(part.windows, logits, part.contexts, self._settings, n_best=self._n_best)

    def _measured(self, logits: Sequence[NDArray[np.float32]]) -> tuple[dict[str, float], AnswerSettings]:
        """Scores on dev, and the settings that have them."""
        dev, settings = self._parts["dev"], self._settings
        choices = self._choices(dev, logits)
        best: dict[str, float] = {}
        if dev.impossible:
            best = _best_scores(dev, choices)
        if self._find_threshold:
            found = best["best_exact_thresh" if "exact" in self.best else "best_f1_thresh"]
            settings = dataclasses.replace(settings, null_threshold=found)
        said = {question.id: choice.text(settings) for question, choice in zip(dev.questions, choices, strict=True)}
        summary = score(dev.questions, said, impossible=dev.impossible).summary(impossible=dev.impossible)
        return {name: value for name, value in summary.items() if not name.endswith("total")} | best, settings


class _Examples(Sequence[Example]):
    """The windows of training as they are asked for: all at once would take some gigabytes."""

    def __init__(self, windows: Windows, targets: NDArray[np.int64]) -> None:
        self._windows, self._targets = windows, targets
        self._kept = np.flatnonzero(targets[:, 0] >= 0)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]  # of both kinds, as Sequence has it
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        window = int(self._kept[place])
        return Example(text=self._windows.text(window), target=self._targets[window])


def _best_scores(part: Part, choices: Sequence[Choice]) -> dict[str, float]:
    """Of v2.0, by the names of its script: scores that can be had with a threshold, and that threshold."""
    spans = {question.id: choice.spans[0].text for question, choice in zip(part.questions, choices, strict=True)}
    scores = score(part.questions, spans, impossible=True)
    odds = np.array([choice.null_odds for choice in choices])
    found: dict[str, float] = {}
    for name in ("exact", "f1"):
        threshold = reachable_threshold(getattr(scores, name), scores, odds)
        found[f"best_{name}"] = without_answer(scores, odds, threshold).summary(impossible=True)[name]
        found[f"best_{name}_thresh"] = threshold
    return found

"""Questions with the texts that answer them, as SQuAD's files have them (Rajpurkar et al. 2016, 2018)."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tools.common.files import is_unicode, parsed_json, read_file, write_file
from tools.squad.decode import Choice
from tools.squad.windows import AnswerSettings

_log = logging.getLogger(__name__)

Bad = Literal["refuse", "skip"]
"""What becomes of a file with a question whose answer does not occur in its context: an error, or the question is left
out and counted."""
T = TypeVar("T")


class Reference(NamedTuple):
    """An answer that somebody gave."""

    text: str
    start: int
    """Its place in the context, in characters; -1 where nobody looked for it."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, and the text that may hold its answer."""

    id: str
    title: str
    context: str
    text: str
    answers: tuple[Reference, ...]
    """Empty where there is no answer, and where none is told."""
    is_impossible: bool
    """The context does not answer it; of SQuAD v2.0 alone."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A file of questions."""

    questions: tuple[Question, ...]
    impossible: bool
    """Of version 2.0: its questions may have no answer."""
    moved: int
    """Answers that did not stand where the file says, and were found elsewhere in their context."""
    skipped: int
    """Questions that were left out because an answer does not occur in the context."""


def read_questions(path: Path, *, bad: Bad = "refuse", answers: bool = True) -> Questions:
    """Reads SQuAD's JSON, version 1.1 or 2.0.

    An answer that does not stand at its `answer_start` is taken from the nearest place where its text occurs, and
    counted.

    Args:
        bad: what becomes of an answer whose text does not occur at all.
        answers: every question must have an answer, or be marked as impossible. Without, answers may be missing.

    Raises:
        ValueError: invalid JSON or UTF-8, a missing key or one of another type, an id that is there twice, an empty
            question or context, no question at all, or questions of both versions; the message names the file and the
            question.
    """
    return _read(_Reading(path, bad, answers))


def read_references(path: Path) -> Questions:
    """Reads of SQuAD's JSON what scores need, as its own scripts do: ids and the texts of answers.

    Nothing is asked of the context, the question or the places of answers: references may be written otherwise than
    they stand there, and may be empty. Of several questions of v2.0 with one id the last one counts.

    Raises:
        ValueError: invalid JSON or UTF-8, a missing key or one of another type, no question at all, or a question of
            v1.1 without an answer; the message names the file and the question.
    """
    found = _read(_References(path, "refuse", answers=True))
    if found.impossible:
        return dataclasses.replace(found, questions=tuple({each.id: each for each in found.questions}.values()))
    silent = next((each.id for each in found.questions if not each.answers), None)
    if silent is not None:
        raise ValueError(
            f"{path}: question {silent!r} has no answer, and no question has is_impossible, as in SQuAD v2.0. Leave it "
            "out, or give that key to the questions."
        )
    return found


def _read(reading: _Reading) -> Questions:
    found = [question for question in reading.questions() if question is not None]
    if not found:
        why = " that can be used" if reading.skipped else ""
        raise ValueError(f"{reading.path} has no question{why}. Take another file.")
    return Questions(
        questions=tuple(found),
        impossible=bool(reading.version_2),
        moved=reading.moved,
        skipped=reading.skipped,
    )


def subset(questions: Sequence[Question], most: int, *, seed: int = 0) -> Sequence[Question]:
    """At most so many of the questions, drawn at random, in their order; 0: all. The same for the same seed."""
    if not 0 < most < len(questions):
        return questions
    drawn = np.random.default_rng(seed).permutation(len(questions))[:most]
    return [questions[number] for number in sorted(drawn.tolist())]


class _Reading:
    """What is known while a file is read."""

    def __init__(self, path: Path, bad: Bad, answers: bool) -> None:
        self.path, self.bad, self.answers = path, bad, answers
        self.moved = self.skipped = 0
        self.version_2: bool | None = None
        self._ids: set[str] = set()
        self._first = ""

    def questions(self) -> Iterator[Question | None]:
        data = self._get(_parsed(self.path), "data", list, "the file")
        for number, article in enumerate(data):
            where = f"article {number}"
            title = article.get("title", "") if isinstance(article, dict) else ""
            for place, paragraph in enumerate(self._get(article, "paragraphs", list, where)):
                where = f"paragraph {place} of article {number}"
                context = self._context(paragraph, where)
                for entry in self._get(paragraph, "qas", list, where):
                    yield self._question(entry, str(title), context, where)

    def _context(self, paragraph: Any, where: str) -> str:
        context = self._get(paragraph, "context", str, where)
        if not context.strip():
            raise ValueError(f"{self.path}: the context of {where} is empty. Leave it out.")
        return context

    def _question(self, entry: Any, title: str, context: str, where: str) -> Question | None:
        number = self._get(entry, "id", str, f"a question in {where}")
        where = f"question {number!r}"
        if number in self._ids:
            raise ValueError(f"{self.path}: {where} is there twice. Give each question an id of its own.")
        self._ids.add(number)
        text = self._get(entry, "question", str, where)
        if not text.strip():
            raise ValueError(f"{self.path}: {where} is empty. Write something, or leave it out.")
        impossible = self._impossible(entry, number)
        told = self._get(entry, "answers", list, where) if self.answers or "answers" in entry else []
        if self.answers and bool(told) == impossible:
            has = "answers and is_impossible" if told else "no answer"
            raise ValueError(
                f"{self.path}: {where} has {has}. A question has one answer or more, or is_impossible = true."
            )
        references = [self._reference(answer, context, where) for answer in told]
        if None in references:
            self.skipped += 1
            return None
        return Question(
            id=number,
            title=title,
            context=context,
            text=text,
            answers=tuple(reference for reference in references if reference is not None),
            is_impossible=impossible,
        )

    def _impossible(self, entry: dict[str, Any], number: str) -> bool:
        """Whether the question has no answer. All questions of a file must be of one version."""
        version_2 = "is_impossible" in entry
        if self.version_2 is None:
            self.version_2, self._first = version_2, number
        elif self.version_2 != version_2:
            with_it, without = (number, self._first) if version_2 else (self._first, number)
            raise ValueError(
                f"{self.path}: question {with_it!r} has is_impossible, as in SQuAD v2.0, and question {without!r} has "
                "not, as in v1.1. Give it to all questions, or to none."
            )
        return version_2 and self._get(entry, "is_impossible", bool, f"question {number!r}")

    def _reference(self, answer: Any, context: str, where: str) -> Reference | None:
        where = f"an answer of {where}"
        text, start = self._get(answer, "text", str, where), self._get(answer, "answer_start", int, where)
        if not text.strip():
            raise ValueError(f"{self.path}: {where} is empty. Leave it out, or say is_impossible.")
        if start >= 0 and context.startswith(text, start):
            return Reference(text, start)
        places = list(_occurrences(text, context))
        if places:
            self.moved += 1
            return Reference(text, min(places, key=lambda place: abs(place - start)))
        if self.bad == "skip":
            return None
        raise ValueError(
            f"{self.path}: {where} does not occur in its context: {text!r}. Mend it, or leave such questions out: "
            'bad = "skip" in [data] of a recipe, --data.bad skip, or --bad skip of tools.squad windows.'
        )

    def _get(self, table: Any, key: str, kind: type[T], where: str) -> T:
        if not isinstance(table, dict) or key not in table:
            raise ValueError(f"{self.path}: {where} has no {key!r}. Is it a file of SQuAD v1.1 or v2.0?")
        value = table[key]
        if type(value) is not kind or (kind is str and not is_unicode(value)):
            raise ValueError(f"{self.path}: {key!r} of {where} must be of type {kind.__name__}. Got {value!r:.60}.")
        return value


class _References(_Reading):
    """The same of a file that nothing but its references is wanted of."""

    def _context(self, paragraph: Any, where: str) -> str:
        is_there = isinstance(paragraph, dict) and "context" in paragraph
        return self._get(paragraph, "context", str, where) if is_there else ""

    def _question(self, entry: Any, title: str, context: str, where: str) -> Question:
        number = self._get(entry, "id", str, f"a question in {where}")
        where = f"question {number!r}"
        self.version_2 = self.version_2 or "is_impossible" in entry
        answers = self._get(entry, "answers", list, where)
        texts = [self._get(answer, "text", str, f"an answer of {where}") for answer in answers]
        return Question(
            id=number,
            title=title,
            context=context,
            text=str(entry.get("question", "")),
            answers=tuple(Reference(text, -1) for text in texts),
            is_impossible=not texts,
        )


def _parsed(path: Path) -> Any:
    try:
        return parsed_json(read_file(path), unique=True)
    except FileNotFoundError:
        raise ValueError(f"{path.absolute()} does not exist. Give a file of SQuAD v1.1 or v2.0.") from None
    except ValueError as problem:
        raise ValueError(f"{path} is not valid JSON in UTF-8: {problem}.") from None


def _occurrences(text: str, context: str) -> Iterator[int]:
    place = context.find(text)
    while place >= 0:
        yield place
        place = context.find(text, place + 1)


# --- The files of SQuAD's own scripts: predictions, the best ones of each question, and the odds of "no answer" -------


def write_json(path: Path, content: Any) -> Path:
    write_file(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    return path


def write_answers(
    folder: Path, questions: Sequence[Question], choices: Sequence[Choice], settings: AnswerSettings, prefix: str = ""
) -> list[Path]:
    """Writes predictions.json, nbest_predictions.json and, where there may be no answer, null_odds.json.

    Args:
        prefix: of the names of the files.
    """
    best, text, odds = {}, {}, {}
    for question, choice in zip(questions, choices, strict=True):
        ranked = choice.ranked(settings)
        text[question.id], odds[question.id] = ranked[0][0].text, choice.null_odds
        best[question.id] = [
            {
                "text": candidate.text,
                "probability": probability,
                "start_logit": candidate.start_logit,
                "end_logit": candidate.end_logit,
            }
            for candidate, probability in ranked
        ]
    contents: dict[str, Any] = {"predictions": text, "nbest_predictions": best}
    if settings.no_answer:
        contents["null_odds"] = odds
    return [write_json(folder / f"{prefix}{name}.json", content) for name, content in contents.items()]


def read_predictions(path: Path) -> dict[str, str]:
    """Answers by the ids of their questions.

    Raises:
        ValueError: no such file, invalid JSON, or something else in it.
    """
    return dict(_table(path, str, "answers, which are text"))


def read_odds(path: Path, questions: Sequence[Question]) -> NDArray[np.float64]:
    """Odds of "no answer" of each question. A warning says of how many others there are any.

    Raises:
        ValueError: no such file, invalid JSON, something else in it, or a question is missing.
    """
    table = _table(path, (int, float), "odds, which are numbers")
    missing = next((question.id for question in questions if question.id not in table), None)
    if missing is not None:
        raise ValueError(f"{path} has no odds of question {missing!r}. Each question needs them.")
    for question in questions:
        # A comparison with NaN is false, whichever way.
        if not abs(odds := table[question.id]) <= sys.float_info.max:
            raise ValueError(f"{path}: the odds of question {question.id!r} must be a finite number. Got {odds!r:.60}.")
    warn_of_unasked(path, table, questions)
    return np.array([table[question.id] for question in questions], dtype=np.float64)


def warn_of_unasked(path: Path, ids: Iterable[str], questions: Sequence[Question]) -> None:
    """Of what a file has about questions that nobody asks, as where it belongs to another file of questions."""
    asked = {question.id for question in questions}
    if others := [number for number in ids if number not in asked]:
        _log.warning(
            "warning: %s has %d ids that no question has, such as %r: what it says of them counts nowhere",
            path,
            len(others),
            others[0],
        )


def _table(path: Path, kind: type | tuple[type, ...], what: str) -> dict[str, Any]:
    try:
        table = parsed_json(read_file(path), unique=True)
    except FileNotFoundError:
        raise ValueError(f"{path.absolute()} does not exist.") from None
    except ValueError as problem:
        raise ValueError(f"{path} is not valid JSON in UTF-8: {problem}.") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} must hold one object: ids of questions with {what}. Got {table!r:.60}.")
    for number, value in table.items():
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is str and not is_unicode(value)):
            raise ValueError(f"{path}: question {number!r} must have {what}. Got {value!r:.60}.")
    return table

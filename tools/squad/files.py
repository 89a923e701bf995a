"""The files of SQuAD's own scripts: predictions, the best ones of each question, and the odds of "no answer"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus.work import draft
from tools.json_text import parsed_json
from tools.squad.choosing import Choice
from tools.squad.questions import Question
from tools.squad.settings import AnswerSettings


def write_json(path: Path, content: Any) -> Path:
    with draft(path) as output:
        output.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
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
    """Odds of "no answer" of each question.

    Raises:
        ValueError: no such file, invalid JSON, something else in it, or a question is missing.
    """
    table = _table(path, (int, float), "odds, which are numbers")
    missing = next((question.id for question in questions if question.id not in table), None)
    if missing is not None:
        raise ValueError(f"{path} has no odds of question {missing!r}. Each question needs them.")
    return np.array([table[question.id] for question in questions], dtype=np.float64)


def _table(path: Path, kind: type | tuple[type, ...], what: str) -> dict[str, Any]:
    try:
        table = parsed_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except ValueError as problem:
        raise ValueError(f"{path} is not valid JSON in UTF-8: {problem}.") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} must hold one object: ids of questions with {what}. Got {table!r:.60}.")
    for number, value in table.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path}: question {number!r} must have {what}. Got {value!r:.60}.")
    return table

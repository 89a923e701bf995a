"""`answer_questions`: the same answers on any cube, in any batches, and a message where it cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from models.bert import BertConfig
from models.bert.tasks import BertForQuestionAnswering
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.tools.squad.small import COLORS, DIGITS, PIECES, small_tokenizer
from tools.squad import Answer, AnswerSettings, answer_questions

CONFIG = BertConfig(layers=1, hidden=16, heads=2, vocab=len(PIECES), positions=24, std=0.5)
SETTINGS = AnswerSettings(max_length=24, stride=6, question_length=8, answer_length=4)
NO_ANSWER = dataclasses.replace(SETTINGS, no_answer=True)
QUESTIONS = [
    ("What number is it?", " ".join(COLORS[place * place % 5] for place in range(40))),
    ("what", "The house,  7"),
    ("what is the number of the house in the uncommons?", " ".join(DIGITS * 3)),
    ("?", "red"),
]


def asked(vocab_folder: Path, settings: AnswerSettings, cube: Cube, batch_tokens: int = 64) -> list[list[Answer]]:
    cube.manual_seed(0)
    model = BertForQuestionAnswering(CONFIG, cube)
    found = answer_questions(
        model, small_tokenizer(vocab_folder), QUESTIONS, settings=settings, n_best=3, batch_tokens=batch_tokens
    )
    assert model.training
    return found


def on_cube(folder: Path, shape: tuple[int, int, int]) -> tuple[list[list[Answer]], str]:
    cube = Cube(*shape)
    folder = folder / str(cube.rank)
    folder.mkdir()
    found = asked(folder, NO_ANSWER, cube)
    spoilt = BertForQuestionAnswering(CONFIG, cube)
    with torch.no_grad():
        for parameter in spoilt.answers.parameters():
            parameter.fill_(torch.nan)
    told = []
    for model, pair in ((spoilt, QUESTIONS[1]), (spoilt, ("", "red"))):
        with pytest.raises((ValueError, FloatingPointError)) as caught:
            answer_questions(model, small_tokenizer(folder), [pair], settings=SETTINGS)
        told.append(str(caught.value))
    return found, "; ".join(told)


def assert_same(found: list[list[Answer]], wanted: list[list[Answer]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert [(a.text, a.start, a.end) for a in one] == [(a.text, a.start, a.end) for a in other]
        assert [a.probability for a in one] == pytest.approx([a.probability for a in other], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1), pytest.param((2, 2, 2), marks=pytest.mark.long(reason="eight ranks answer what two do"))],
    ids=str,
)
def test_answers_do_not_depend_on_the_cube(shape: tuple[int, int, int], tmp_path: Path) -> None:
    results = run_ranks(int(np.prod(shape)), on_cube, tmp_path, shape)
    alone = asked(tmp_path, NO_ANSWER, Cube.single())
    for found, told in results:
        assert_same(found, alone)
        assert found == results[0][0], "every rank has the very same"
        assert "scores of answers are not finite" in told
        assert "question 0 has no token: ''" in told


def test_answers_stand_in_their_contexts_and_do_not_depend_on_the_batches(tmp_path: Path) -> None:
    found = asked(tmp_path, SETTINGS, Cube.single())
    for (_, context), answers in zip(QUESTIONS, found, strict=True):
        assert all(answer.text == context[answer.start : answer.end] != "" for answer in answers)
        assert sum(answer.probability for answer in answers) == pytest.approx(1.0)
    assert [len(answers) for answers in found] == [3, 3, 3, 1]
    assert_same(asked(tmp_path, SETTINGS, Cube.single(), batch_tokens=1), found)


def test_no_answer_is_one_of_the_answers(tmp_path: Path) -> None:
    for threshold, first in ((-100.0, True), (100.0, False)):
        found = asked(tmp_path, dataclasses.replace(NO_ANSWER, null_threshold=threshold), Cube.single())
        assert [len(answers) for answers in found] == [4, 4, 4, 2]
        assert all((answers[0].text == "") == first for answers in found)
        assert all((answer.start, answer.end) == (0, 0) for answers in found for answer in answers if not answer.text)


def test_windows_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    settings = AnswerSettings(max_length=25, question_length=8)
    model = BertForQuestionAnswering(CONFIG, Cube.single())
    with pytest.raises(ValueError, match=r"max_length=25 .* this one has 24\. Lower max_length"):
        answer_questions(model, small_tokenizer(tmp_path), QUESTIONS, settings=settings)
    assert answer_questions(model, small_tokenizer(tmp_path), [], settings=SETTINGS) == []
    assert len(answer_questions(model, small_tokenizer(tmp_path), QUESTIONS, settings=settings.fitted(24))) == 4

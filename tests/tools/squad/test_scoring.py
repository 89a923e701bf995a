"""Scores as SQuAD's own scripts count them, by values that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tools.squad.dataset import Question, Reference
from tools.squad.scoring import (
    best_threshold,
    best_thresholds,
    exact_match,
    f1,
    normalize,
    reachable_threshold,
    score,
    without_answer,
)


def question(number: str, *answers: str, impossible: bool = False) -> Question:
    references = tuple(Reference(text, 0) for text in answers)
    return Question(id=number, title="", context="c", text="q", answers=references, is_impossible=impossible)


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The  Cat's\tan a Hat.", "cats hat"),
        ("a", ""),
        ("U.S.A. -- theory", "usa theory"),
        ("the-end", "theend"),  # punctuation goes before articles
        ("Ünïcode “Quotes” – 3½", "ünïcode “quotes” – 3½"),  # other punctuation than ASCII's stays
        ("İstanbul", "i̇stanbul"),
        ("", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    "said, wanted, value",
    [
        ("the red house", "Red House!", 1.0),
        ("red house", "red", 2 / 3),
        ("red red blue", "red blue blue", 2 / 3),  # each word as often as both have it: red, blue
        ("red red red", "red", 0.5),
        ("red red blue", "red red green", 2 / 3),
        ("green", "red", 0.0),
        ("", "red", 0.0),
        ("the", "red", 0.0),
    ],
)
def test_f1_counts_words(said: str, wanted: str, value: float) -> None:
    assert f1(said, wanted) == pytest.approx(value)
    assert exact_match(said, wanted) == (value == 1.0)


def test_two_empty_texts_differ_between_the_versions() -> None:
    assert (f1("", "the"), f1("", "the", impossible=True), f1("a", "", impossible=True)) == (0.0, 1.0, 1.0)
    assert exact_match("", "the") == 1.0


def test_version_1_takes_the_best_reference_and_counts_what_is_missing_as_0() -> None:
    questions = [question("a", "red", "the red house"), question("b", "blue"), question("c", "x")]
    scores = score(questions, {"a": "red house", "b": "light blue", "other": "x"}, impossible=False)
    assert scores.missing == 1
    assert scores.summary(impossible=False) == pytest.approx({"exact_match": 100 / 3, "f1": 100 * (1 + 2 / 3) / 3})


def test_version_2_tells_questions_without_answer_apart() -> None:
    questions = [
        question("a", "red house"),
        question("b", "blue"),
        question("n", impossible=True),
        question("m", impossible=True),
        question("o", "the", "an"),  # no reference with a word: the empty text meets it
    ]
    scores = score(questions, {"a": "red", "b": "", "n": "", "m": "blue", "o": ""}, impossible=True)
    assert scores.summary(impossible=True) == pytest.approx(
        {
            "exact": 40.0,
            "f1": 100 * (2 / 3 + 0 + 1 + 0 + 1) / 5,
            "total": 5,
            "HasAns_exact": 100 / 3,
            "HasAns_f1": 100 * (2 / 3 + 0 + 1) / 3,
            "HasAns_total": 3,
            "NoAns_exact": 50.0,
            "NoAns_f1": 50.0,
            "NoAns_total": 2,
        }
    )
    none = without_answer(scores, np.array([0.0, 0.0, 0.0, 2.0, 2.0]), 1.0)
    assert none.exact.tolist() == [0, 0, 1, 1, 0]
    assert none.said.tolist() == [True, False, False, False, False]


def test_the_best_threshold_is_that_of_trying_all() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        questions = [
            question(str(number), *(["red"] if random.random() < 0.6 else []), impossible=False) for number in range(30)
        ]
        said = {item.id: str(random.choice(["red", "red house", "blue", ""])) for item in questions}
        scores = score(questions, said, impossible=True)
        odds = random.normal(size=30)
        tried = [without_answer(scores, odds, threshold).f1.mean() for threshold in (-np.inf, *odds)]
        best, threshold = best_threshold(scores.f1, scores, odds)
        assert best == pytest.approx(100 * max(tried))
        assert best == pytest.approx(100 * without_answer(scores, odds, threshold).f1.mean()) or threshold == 0.0
        found = best_thresholds(scores, odds)
        assert list(found) == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]
        assert (found["best_f1"], found["best_f1_thresh"]) == (best, threshold)


def test_a_reachable_threshold_has_the_best_score_that_any_threshold_has() -> None:
    random = np.random.default_rng(1)
    for _ in range(40):
        questions = [question(str(number), *(["red"] if random.random() < 0.5 else [])) for number in range(12)]
        said = {item.id: str(random.choice(["red", "red house", "blue", "the"])) for item in questions}
        scores = score(questions, said, impossible=True)
        odds = random.integers(-3, 3, size=12).astype(float)  # with ties
        tried = [without_answer(scores, odds, threshold).f1.mean() for threshold in np.arange(-4.0, 4.0, 0.5)]
        threshold = reachable_threshold(scores.f1, scores, odds)
        assert without_answer(scores, odds, threshold).f1.mean() == pytest.approx(max(tried))


def test_silence_and_close_neighbours_can_be_reached() -> None:
    questions = [question("a", "red"), question("n", impossible=True)]
    scores = score(questions, {"a": "blue", "n": "blue"}, impossible=True)
    odds = np.array([1e300, 2e300])
    assert without_answer(scores, odds, reachable_threshold(scores.f1, scores, odds)).f1.tolist() == [0, 1]
    right = score(questions, {"a": "red", "n": "blue"}, impossible=True)
    odds = np.array([1.0, np.nextafter(1.0, 2.0)])
    assert without_answer(right, odds, reachable_threshold(right.f1, right, odds)).f1.tolist() == [1, 1]


def test_where_nothing_beats_silence_the_threshold_is_0() -> None:
    questions = [question("a", "red"), question("n", impossible=True)]
    scores = score(questions, {"a": "blue", "n": "blue"}, impossible=True)
    assert best_threshold(scores.f1, scores, np.array([3.0, 5.0])) == (50.0, 0.0)

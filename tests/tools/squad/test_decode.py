"""The choice of answers from logits, against loops over all spans."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tools.squad.small import COLORS, DIGITS, small_tokenizer
from tools.corpus.tokenizers import Tokenizer
from tools.squad.decode import choose
from tools.squad.windows import AnswerSettings, Windows, make_windows

SETTINGS = AnswerSettings(max_length=16, stride=4, question_length=4, answer_length=3)
CONTEXTS = [" ".join((*DIGITS, *COLORS, *DIGITS[::-1]))[: 11 * size] for size in (1, 2, 4)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return small_tokenizer(tmp_path)


def some_windows(tokenizer: Tokenizer) -> tuple[Windows, list[NDArray[np.float32]]]:
    windows = make_windows([("what is a house", context) for context in CONTEXTS], tokenizer, SETTINGS)
    random = np.random.default_rng(0)
    return windows, [random.normal(size=(int(length), 2)).astype(np.float32) for length in windows.lengths]


def tried(windows: Windows, logits: list[NDArray[np.float32]], number: int) -> list[tuple[float, str]]:
    """All spans of a question by the rules of run_squad.py, the best first, each text once."""
    own = range(*windows.of_questions[number : number + 2])
    passage = windows.passages[windows.passage[number]]
    head = len(windows.heads[number])

    def room(window: int, token: int) -> float:
        first, count = int(windows.first[window]), int(windows.tokens[window])
        if not first <= token < first + count:
            return -1.0
        return min(token - first, first + count - 1 - token) + 0.01 * count

    found: dict[str, float] = {}
    for window in own:
        first, count = int(windows.first[window]), int(windows.tokens[window])
        for start in range(count):
            token = first + start
            if max(own, key=lambda other: room(other, token)) != window:
                continue
            for end in range(start, min(count, start + SETTINGS.answer_length)):
                total = float(logits[window][head + start, 0]) + float(logits[window][head + end, 1])
                text = CONTEXTS[number][passage.starts[token] : passage.ends[first + end]]
                found[text] = max(total, found.get(text, -np.inf))
    return sorted(((total, text) for text, total in found.items()), reverse=True)


def test_the_best_spans_are_those_of_trying_all(tokenizer: Tokenizer) -> None:
    windows, logits = some_windows(tokenizer)
    assert np.diff(windows.of_questions).tolist() == [1, 2, 3]
    for n_best in (1, 7, 1000):
        choices = choose(windows, logits, CONTEXTS, SETTINGS, n_best=n_best)
        for number, choice in enumerate(choices):
            wanted = tried(windows, logits, number)[:n_best]
            assert [span.text for span in choice.spans] == [text for _, text in wanted]
            assert [span.score for span in choice.spans] == pytest.approx([total for total, _ in wanted])
            assert all(CONTEXTS[number][span.start : span.end] == span.text for span in choice.spans)
            own = logits[slice(*windows.of_questions[number : number + 2])]
            assert choice.null.score == pytest.approx(min(float(part[0].sum()) for part in own))


def test_probabilities_and_the_place_of_no_answer(tokenizer: Tokenizer) -> None:
    windows, logits = some_windows(tokenizer)
    (choice, *_) = choose(windows, logits, CONTEXTS, SETTINGS, n_best=4)
    scores = np.array([span.score for span in choice.spans])
    assert [share for _, share in choice.ranked(SETTINGS)] == pytest.approx(
        (np.exp(scores) / np.exp(scores).sum()).tolist()
    )
    assert "" not in [candidate.text for candidate, _ in choice.ranked(SETTINGS)]
    odds = choice.null_odds
    assert odds == pytest.approx(choice.null.score - scores[0])
    for threshold, first in ((odds - 0.1, True), (odds, False), (odds + 0.1, False)):
        settings = dataclasses.replace(SETTINGS, no_answer=True, null_threshold=threshold)
        ranked = choice.ranked(settings)
        assert (ranked[0][0].text == "") == first
        assert sum(candidate.text == "" for candidate, _ in ranked) == 1
        assert sum(share for _, share in ranked) == pytest.approx(1.0)
        assert choice.text(settings) == ranked[0][0].text


def test_a_text_is_taken_as_it_stands(tokenizer: Tokenizer) -> None:
    context = "The Uncommons,  a HOUSE."
    settings = AnswerSettings(max_length=24, question_length=4)
    windows = make_windows([("red", context)], tokenizer, settings)
    scores = np.zeros((int(windows.lengths[0]), 2))
    scores[4, 0] = scores[9, 1] = (
        9.0  # "un" of "Uncommons", and "house": [CLS] red [SEP] the un ##common ##s , a house .
    )
    (choice,) = choose(windows, [scores], [context], settings, n_best=1)
    assert choice.spans[0].text == "Uncommons,  a HOUSE"


def test_an_answer_ends_behind_the_marks_that_the_tokenizer_drops(tokenizer: Tokenizer) -> None:
    context = "a house\u0301\u0323, \u0e14re\u0301d\u0e31 a\u200d"
    settings = AnswerSettings(max_length=24, question_length=4)
    windows = make_windows([("red", context)], tokenizer, settings)
    passage = windows.passages[0]
    assert tokenizer.pieces(passage.ids.tolist()) == ["a", "house", ",", "[UNK]", "a"]
    for token, text in ((1, "house\u0301\u0323"), (2, ","), (3, "\u0e14re\u0301d\u0e31"), (4, "a\u200d")):
        scores = np.zeros((int(windows.lengths[0]), 2))
        scores[3 + token] = 9.0
        (choice,) = choose(windows, [scores], [context], settings, n_best=1)
        found = choice.spans[0]
        assert found.text == context[found.start : found.end] == text


def test_an_answer_never_begins_in_the_question_or_ends_before_it_begins(tokenizer: Tokenizer) -> None:
    settings = AnswerSettings(max_length=24, question_length=4)
    windows = make_windows([("red blue", "green black white")], tokenizer, settings)
    scores = np.full((8, 2), -5.0)
    scores[:4] = scores[-1] = 50.0
    scores[6, 0], scores[4, 1] = 9.0, 8.0
    (choice,) = choose(windows, [scores], ["green black white"], settings, n_best=20)
    assert len(choice.spans) == 6, "all spans of three words"
    assert choice.spans[0].text == "white"

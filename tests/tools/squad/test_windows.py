"""Windows of contexts: as the published code counts them, with the answers in their places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tools.squad.small import COLORS, PIECES, small_tokenizer
from tools.corpus.tokenizers import Tokenizer
from tools.squad.windows import AnswerSettings, make_windows

SETTINGS = AnswerSettings(max_length=12, stride=3, question_length=4)
LONG = " ".join(COLORS[place * place % 5] for place in range(17))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return small_tokenizer(tmp_path)


def published(tokens: int, question: int, settings: AnswerSettings) -> list[tuple[int, int]]:
    """First token and number of tokens of each window, as run_squad.py of google-research/bert has it."""
    most = settings.max_length - min(question, settings.question_length) - 3
    spans, start = [], 0
    while start < tokens:
        length = min(tokens - start, most)
        spans.append((start, length))
        if start + length == tokens:
            break
        start += min(length, settings.stride)
    return spans


@pytest.mark.parametrize("max_length, stride", [(12, 3), (12, 100), (9, 1), (30, 16)])
def test_windows_are_those_of_the_published_code(max_length: int, stride: int, tokenizer: Tokenizer) -> None:
    settings = AnswerSettings(max_length=max_length, stride=stride, question_length=4)
    pairs = [
        (" ".join(COLORS[:size]) or "what", " ".join(COLORS[(place * size) % 5] for place in range(length)))
        for size in (1, 3, 5)
        for length in range(1, 40)
    ]
    windows = make_windows(pairs, tokenizer, settings)
    for number, (question, context) in enumerate(pairs):
        own = slice(*windows.of_questions[number : number + 2])
        spans = list(zip(windows.first[own].tolist(), windows.tokens[own].tolist(), strict=True))
        assert spans == published(len(context.split()), len(question.split()), settings)
    assert [len(windows.text(window).ids) for window in range(len(windows))] == windows.lengths.tolist()
    assert windows.lengths.max() == min(max_length, 4 + 39 + 3)


def test_a_window_reads_as_a_pair(tokenizer: Tokenizer) -> None:
    windows = make_windows(
        [("what is uncommon?", "The house.")], tokenizer, AnswerSettings(max_length=20, question_length=4)
    )
    text = windows.text(0)
    pieces = [PIECES[number] for number in text.ids]
    assert pieces == ["[CLS]", "what", "is", "un", "##common", "[SEP]", "the", "house", ".", "[SEP]"]
    assert text.types.tolist() == [0] * 6 + [1] * 4


def test_targets_are_the_places_of_the_answer_or_of_cls(tokenizer: Tokenizer) -> None:
    windows = make_windows([("red", LONG)], tokenizer, SETTINGS)
    assert windows.first.tolist() == [0, 3, 6, 9]  # 8 tokens each: 12 - [CLS] red [SEP] [SEP]
    words = LONG.split()
    start = len(" ".join(words[:9])) + 1
    end = start + len(" ".join(words[9:11]))
    targets = windows.targets([(start, end)])
    assert targets.tolist() == [[0, 0], [3 + 6, 3 + 7], [3 + 3, 3 + 4], [3 + 0, 3 + 1]]
    for window, (first, last) in list(enumerate(targets.tolist()))[1:]:
        pieces = [PIECES[number] for number in windows.text(window).ids[first : last + 1]]
        assert pieces == words[9:11]
    assert windows.targets([None]).tolist() == [[0, 0]] * 4


def test_an_answer_inside_of_words_takes_all_pieces_that_it_touches(tokenizer: Tokenizer) -> None:
    context = "a house, Uncommons."
    windows = make_windows([("red", context)], tokenizer, SETTINGS)
    ids = windows.text(0).ids
    for text, pieces in (
        ("common", ["##common"]),
        ("ncommo", ["un", "##common"]),
        (" Uncommons.", ["un", "##common", "##s", "."]),
    ):
        start = context.index(text)
        ((first, last),) = windows.targets([(start, start + len(text))]).tolist()
        assert [PIECES[number] for number in ids[first : last + 1]] == pieces
    # The space between two words belongs to no piece.
    assert windows.targets([(1, 2)]).tolist() == [[-1, -1]]


def test_a_context_that_comes_again_is_kept_once(tokenizer: Tokenizer) -> None:
    windows = make_windows([("red", LONG), ("blue", "a house"), ("what", LONG)], tokenizer, SETTINGS)
    assert (len(windows.passages), windows.passage.tolist()) == (2, [0, 1, 0])
    assert np.diff(windows.of_questions).tolist() == [4, 1, 4]


@pytest.mark.parametrize(
    "pair, what", [(("\u0001", "a"), "question x"), (("a", "\u0001"), "the context of question x")]
)
def test_what_has_no_token_is_refused_by_its_name(pair: tuple[str, str], what: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"^{what} has no token"):
        make_windows([pair], tokenizer, SETTINGS, names=["x"])


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"max_length.*question_length=64 and \b4\b more.*67"):
        AnswerSettings(max_length=67)
    with pytest.raises(ValueError, match=r"stride.*1.*0"):
        AnswerSettings(stride=0)
    with pytest.raises(ValueError, match=r"null_threshold must be finite"):
        AnswerSettings(null_threshold=float("nan"))
    with pytest.raises(ValueError, match=r"facts\.answer are no settings"):
        AnswerSettings.from_facts({"answer": {"stride": "128"}})
    assert AnswerSettings.from_facts({"answer": {"stride": 64, "later": 1}}) == AnswerSettings(stride=64)
    assert AnswerSettings.from_facts({}) == AnswerSettings()
    for positions in (16, 64, 128, 200):
        assert AnswerSettings().fitted(positions).max_length == positions
    assert AnswerSettings().fitted(512) == AnswerSettings()

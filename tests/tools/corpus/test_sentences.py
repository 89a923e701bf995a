"""Sentences of long paragraphs and of other languages."""

from __future__ import annotations

import random
import time

import pytest
import sentencex

from tools.corpus.sentences import BLOCK, _is_code, _letters, _segment, check_language, split_sentences


def test_a_long_paragraph_is_split_like_a_short_one() -> None:
    draw = random.Random(0)
    words = ["Words", "and more words", "go", "on, e.g.", "with Dr. Who", "ünï", "or “no”"]
    text = " ".join("It " + " ".join(draw.choices(words, k=9)) + "." for _ in range(900))
    assert len(text) > 3 * BLOCK
    assert list(_segment(text, "en")) == sentencex.segment("en", text)
    assert len(split_sentences(text)) >= 900


def test_nothing_is_lost_between_blocks() -> None:
    draw = random.Random(0)
    for words in (["a b. ", "Zed! ", "漢字。", "Mr. X ", "\nq", "“No.” ", "(e.g. "], ["word "], ["unbroken"]):
        text = "".join(draw.choices(words, k=6 * BLOCK // len(words[0])))
        assert "".join(_segment(text, "en")) == text
        if words == ["word "]:
            assert all(part.endswith("word ") for part in _segment(text, "en")), "no word is cut"


def test_time_grows_with_the_text_alone() -> None:
    text = "漢字文字。" * 100_000
    start = time.perf_counter()
    assert len(split_sentences(text, "zh")) == 100_000
    assert time.perf_counter() - start < 20, "it takes a second; without blocks, half a minute and the square of it"


def test_letters_of_all_alphabets_count() -> None:
    assert [_letters(text) for text in ("", "aZ 1.", "é漢½", "a\u0301ß_")] == [0, 2, 2, 2]
    assert [_is_code(text) for text in ("Ein Maß.", "漢字かな。", "x = 1 + 2", ">>> word word", "Жил был")] == [
        False, False, True, True, False,
    ]  # fmt: skip


def test_a_code_of_a_language_is_known_by_its_form() -> None:
    for code in ("en", "zh", "ceb", "zh-yue"):
        check_language(code)
    for code in ("", "EN", "english", "e", "en_US"):
        with pytest.raises(ValueError, match="is an ISO 639-1 code"):
            check_language(code)
    assert split_sentences("Das kostet ca. 5 Euro. Gut.", "de") == ["Das kostet ca. 5 Euro.", "Gut."]


def test_a_session_of_python_is_code_whatever_it_says() -> None:
    assert _is_code(">>> all of these are letters and would be prose")
    assert not _is_code("all of these are letters and would be prose")

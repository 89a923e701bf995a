"""Small files of SQuAD, and a tokenizer whose pieces can be counted by eye."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer

COLORS = ("red", "blue", "green", "black", "white")
DIGITS = tuple(str(number) for number in range(10))
WORDS = ("the", "what", "number", "is", "of", "a", "in", "house", "un", "##common", "##s", ".", "?", ",", "'")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *COLORS, *DIGITS, *WORDS)


def write_vocab(folder: Path) -> Path:
    path, own = folder / "vocab.txt", folder / f"vocab-{os.getpid()}.txt"
    own.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return own.replace(path)  # several ranks may write it, while others read


def small_tokenizer(folder: Path) -> Tokenizer:
    return WordPieceTokenizer(write_vocab(folder), lowercase=True)


def entry(number: str, question: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    told = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": number, "question": question, "answers": told, **more}


def squad(*paragraphs: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "version": "1.1",
        "data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas} for context, qas in paragraphs]}],
    }


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def digit_questions(count: int, *, impossible: bool = False, first: int = 0) -> dict[str, Any]:
    """A context of colours with one digit, which is the answer; of v2.0 each third one has none."""
    paragraphs = []
    for number in range(first, first + count):
        words = [COLORS[(number * 7 + place * place * 3 + place) % len(COLORS)] for place in range(4 + number % 13)]
        answers: list[tuple[str, int]] = []
        if not (impossible and number % 3 == 0):
            place = (number * 5) % len(words)
            words[place] = DIGITS[(number * 3) % 10]
            answers = [(words[place], len(" ".join([*words[:place], ""])))]
        more = {"is_impossible": not answers} if impossible else {}
        paragraphs.append((" ".join(words), [entry(f"q{number}", "what number is in the house?", *answers, **more)]))
    return squad(*paragraphs)

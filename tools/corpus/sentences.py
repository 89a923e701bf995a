"""From a document to its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

import sentencex

LEAST_LETTERS = 0.8
"""Share of letters among the visible characters; prose has more, tables, grammars and code have fewer."""
MOST_WORDS = 100
"""A longer sentence is a list, or text without full stops."""


def split_sentences(document: str, language: str = "en") -> list[str]:
    """The sentences of a document, each on one line with single spaces between its words.

    Prose is split by `sentencex`, across line breaks. Where its rules have no hold, in what looks like code and in
    sentences of more than 100 words, each line counts as a sentence. What has neither letter nor digit is left out.

    Args:
        document: text; blank lines separate paragraphs.
        language: ISO 639-1 code.
    """
    parts = (part for paragraph in re.split(r"\n\s*\n", document) for part in _parts(paragraph, language))
    sentences = (" ".join(part.split()) for part in parts)
    return [sentence for sentence in sentences if any(map(str.isalnum, sentence))]


def _parts(paragraph: str, language: str) -> Iterator[str]:
    if _is_code(paragraph):
        yield from paragraph.splitlines()
        return
    for sentence in sentencex.segment(language, paragraph):
        if len(sentence.split()) > MOST_WORDS:
            yield from sentence.splitlines()
        else:
            yield sentence


def _is_code(paragraph: str) -> bool:
    visible = "".join(paragraph.split())
    letters = sum(map(str.isalpha, visible))
    return visible.startswith(">>>") or letters < LEAST_LETTERS * len(visible)

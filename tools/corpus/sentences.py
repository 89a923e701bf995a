"""From a document to its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.corpus.plain_text import count_letters

LEAST_LETTERS = 0.8
"""Share of letters (`count_letters`) among the visible characters; prose has more, tables, grammars and code have
fewer."""
MOST_WORDS = 100
"""A longer sentence is a list, or text without full stops."""
BLOCK = 8192
"""Characters that `sentencex` is given at a time: its time grows with the square of the sentences in one text."""
LOOKED_AT = 1 << 16
"""Characters of a paragraph that tell whether it is code: its words, one by one, would take many times its memory."""
_has_letter_or_digit = re.compile(r"[^\W_]").search


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
    return [sentence for sentence in sentences if _has_letter_or_digit(sentence)]


def check_language(language: str) -> None:
    """Raises ValueError for what is no code of a language. Languages without rules of their own have those of "en"."""
    if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*", language):
        raise ValueError(f'--language is an ISO 639-1 code, such as "en" or "de". Got {language!r}.')


def _parts(paragraph: str, language: str) -> Iterator[str]:
    if _is_code(paragraph):
        yield from paragraph.split("\n")
        return
    for sentence in _segment(paragraph, language):
        # Words have two characters at least, with the space after them.
        if len(sentence) > 2 * MOST_WORDS and len(sentence.split()) > MOST_WORDS:
            yield from sentence.split("\n")
        else:
            yield sentence


def _segment(paragraph: str, language: str) -> Iterator[str]:
    """The sentences of a paragraph, nothing left out. The last one of a block is cut off by the block's end, so the
    next block begins with it; if it is all there is, it ends at a space."""
    import sentencex  # here alone: who splits nothing need not have it

    start = 0
    while len(paragraph) - start > BLOCK:
        block = paragraph[start : start + BLOCK]
        sentences = sentencex.segment(language, block)[:-1] or [block[: block.rfind(" ") + 1] or block]
        yield from sentences
        start += sum(map(len, sentences))
    yield from sentencex.segment(language, paragraph[start:])


def _is_code(paragraph: str) -> bool:
    visible = "".join(paragraph[:LOOKED_AT].split())
    return visible.startswith(">>>") or count_letters(visible) < LEAST_LETTERS * len(visible)

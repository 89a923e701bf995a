"""What text is, for every reader of it (where a line is blank, what is no text, what an entity stands for, what counts
as a letter), and the way from a document to its sentences."""

from __future__ import annotations

import html
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from html.entities import html5

from tools.common.bounds import LANGUAGE

_ASCII_LETTERS = string.ascii_letters.encode()
_foreign = re.compile(r"[^\x00-\x7f]+").findall
# First bytes, in UTF-8, of spaces that Python's `bytes.strip` does not know: U+001C to U+001F, U+0085, U+00A0, U+1680,
# U+2000 and those after it, U+3000.
_OTHER_SPACES = frozenset((0x1C, 0x1D, 0x1E, 0x1F, 0xC2, 0xE1, 0xE2, 0xE3))


def is_blank(line: bytes) -> bool:
    """Whether a line of UTF-8 has nothing to see: spaces of any kind, a no-break or an ideographic one too."""
    rest = line.strip()
    return not rest or (rest[0] in _OTHER_SPACES and not rest.decode("utf-8", "replace").strip())


def likely_encoding(data: bytes) -> str:
    """What bytes with NULs among them are, which are valid UTF-8 and no text: in words."""
    even, odd = data[::2].count(0), data[1::2].count(0)
    if max(even, odd) < 4 * min(even, odd) or max(even, odd) * 8 < len(data):
        return "binary data"
    return "UTF-16 (little-endian, UTF-16LE)" if odd > even else "UTF-16 (big-endian, UTF-16BE)"


ENTITY = re.compile(r"&(?:#0{0,20}[0-9]{1,7}|#[xX]0{0,20}[0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
"""`&shy` without its `;` is none."""


def entity_text(entity: str) -> str:
    """What an entity stands for: itself where HTML has none of that name; nothing where its number is that of no
    character (`&#0;`, half of a surrogate pair), for which others write U+FFFD, or of U+FFFD itself."""
    return entity if entity[1] != "#" and entity[1:] not in html5 else html.unescape(entity).replace("\ufffd", "")


def decode_entities(text: str, counts: Counter[str]) -> str:
    """Text with what its entities stand for; `characters_dropped` counts those that stand for nothing."""

    def counted(entity: re.Match[str]) -> str:
        found = entity_text(entity[0])
        counts["characters_dropped"] += not found
        return found

    return ENTITY.sub(counted, text) if "&" in text else text


def count_letters(text: str) -> int:
    """How many characters are what words are made of: letters of ASCII; of all other scripts letters, marks (vowel
    signs, points, accents) and digits, the categories L, M and N of Unicode.

    Letters of ASCII are most of them, and are counted all at once. Digits of ASCII do not count: tables and code are
    made of them.
    """
    plain = text.encode("ascii", "ignore")
    letters = len(plain) - len(plain.translate(None, _ASCII_LETTERS))
    if len(plain) < len(text):
        foreign = "".join(_foreign(text))
        others = [character for character in foreign if not character.isalpha()]
        letters += len(foreign) - len(others) + sum(unicodedata.category(character)[0] in "MN" for character in others)
    return letters


# --- Sentences --------------------------------------------------------------------------------------------------------


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


LEFT_OUT = ("sentences_left_out", "characters_left_out")
"""What is counted of sentences that become nothing; characters without spaces."""


def split_sentences(document: str, language: str = "en", left_out: dict[str, int] | None = None) -> list[str]:
    """The sentences of a document, each on one line with single spaces between its words.

    Prose is split by `sentencex`, across line breaks. Where its rules have no hold, in what looks like code and in
    sentences of more than 100 words, each line counts as a sentence. What has neither letter nor digit is left out.

    Args:
        document: text; blank lines separate paragraphs.
        language: ISO 639-1 code.
        left_out: the counts `LEFT_OUT`, which what is left out here is added to.
    """
    parts = (part for paragraph in re.split(r"\n\s*\n", document) for part in _parts(paragraph, language))
    sentences = [" ".join(part.split()) for part in parts]
    kept = [sentence for sentence in sentences if _has_letter_or_digit(sentence)]
    if left_out is not None and len(kept) < len(sentences):
        count_left_out((sentence for sentence in sentences if not _has_letter_or_digit(sentence)), left_out)
    return kept


def count_left_out(sentences: Iterable[str], counts: dict[str, int]) -> None:
    """Adds sentences that become nothing to the counts `LEFT_OUT`; those of spaces alone are none."""
    for sentence in sentences:
        counts["sentences_left_out"] += bool(sentence)
        counts["characters_left_out"] += len(sentence.replace(" ", ""))


def check_language(language: str) -> None:
    """Raises ValueError for what is no code of a language. Languages without rules of their own have those of "en"."""
    if needed := LANGUAGE.needed(language):
        raise ValueError(f"--language must be {needed}. Got {language!r}.")


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

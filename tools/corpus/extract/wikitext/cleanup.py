"""The last touches on a paragraph: quotes for bold and italic, entities, empty brackets, spaces."""

from __future__ import annotations

import html
import re

from tools.corpus.extract.wikitext.strip import LONE

# Typographic quotes are meant.
# ruff: noqa: RUF001


# Bold and italic


_APOSTROPHES = re.compile("'{2,}")


def drop_quotes(line: str) -> str:
    """Removes `''` and `'''`, and keeps the apostrophes among them: `l'''mot''` is "l'" and an italic word.

    As MediaWiki reads them: of four the first is an apostrophe, of more than five all but five; and where both bold and
    italic are left open at the line's end, one `'''` is an apostrophe and `''`.
    """
    if "''" not in line:
        return line
    runs = [min(len(run), 5) if len(run) != 4 else 3 for run in _APOSTROPHES.findall(line)]
    bolds = sum(run in (3, 5) for run in runs)
    italics = sum(run in (2, 5) for run in runs)
    spare = _spare_apostrophe(line) if bolds % 2 and italics % 2 else -1
    parts, end = [], 0
    for found in _APOSTROPHES.finditer(line):
        length = len(found[0])
        left = 1 if length == 4 or found.start() == spare else max(length - 5, 0)
        parts += [line[end : found.start()], "'" * left]
        end = found.end()
    return "".join([*parts, line[end:]])


def _spare_apostrophe(line: str) -> int:
    """Where the `'''` stands that is an apostrophe and `''`: after a word of one letter, else of any, else anywhere."""
    bolds = [found.start() for found in _APOSTROPHES.finditer(line) if len(found[0]) == 3]
    before = [(line[max(start - 2, 0) : start], start) for start in bolds]
    one_letter = [start for near, start in before if near[-1:].strip() and len(near) == 2 and near[0] == " "]
    words = [start for near, start in before if near[-1:].strip()]
    return (one_letter or words or bolds or [-1])[0]


# Entities and characters

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff"
                        "\ufdd0-\ufdef\ufffe\uffff]")  # fmt: skip
"""Controls, soft hyphens and marks of direction. Joiners (U+200C, U+200D) belong to the spelling of some languages."""
_MARKUP = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|''+|__[A-Z]{3,}__")
_IN_MARKUP = re.compile(r"[\[\]{}|_]")
_MOST_SWEEPS = 4
_MEANT = "[]{}|'_"
_STANDS_FOR = {ord(character): chr(0xFDD8 + place) for place, character in enumerate(_MEANT)}
_MEANS = {ord(stands): chr(character) for character, stands in _STANDS_FOR.items()}
"""Characters that a writer has escaped, so that they are shown; others stand for them while markup is swept."""


def normalize(text: str) -> str:
    """A paragraph as it is read: no markup but what was written as entities, no gaps, any run of spaces as one."""
    text = text.replace(LONE, "[")
    if not text.isascii() or not text.isprintable():
        text = _INVISIBLE.sub("", text)
    escaped = "&" in text
    text = swept(_ENTITY.sub(_character, text) if escaped else text)
    if escaped:
        # Among gaps a bracket is a bracket, however it was written; two that look like markup stay disguised.
        text = _MARKUP.sub(lambda found: found[0].translate(_STANDS_FOR), text.translate(_MEANS))
    text = " ".join(text.split())
    closed = close_gaps(text)
    if closed != text:
        closed = " ".join(swept(closed).split())  # it may have brought brackets together
    return closed.translate(_MEANS) if escaped else closed


def _character(entity: re.Match[str]) -> str:
    return _INVISIBLE.sub("", html.unescape(entity[0])).translate(_STANDS_FOR)


def swept(text: str) -> str:
    """Without leftovers of markup."""
    for _ in range(_MOST_SWEEPS):  # where one goes, its neighbours may make another
        text, found = _MARKUP.subn("", text)
        if not found:
            return text
    # A heap of it, of which each round might take no more than the innermost.
    return _APOSTROPHES.sub("", _IN_MARKUP.sub("", text)) if _MARKUP.search(text) else text


# What a template leaves behind

_HOLLOW = re.compile(r"\(([^()]{0,60})\)|\[ *\]|“ *”|« *»")
_FILLING = re.compile(r"[\W_]*(?:(?:pronounced|pronunciation|ipa|or|and|also|from|listen|in|born|lit|is|the)\b[\W_]*)*")
# Repeats are bounded where a pattern may begin at each of them: a page of a million commas must not take a day.
_AFTER_OPEN = re.compile(r"([(\[])[ ,;:]+")
_BEFORE_CLOSE = re.compile(r"[ ,;:]{1,9}([)\]])")
_DOUBLED = re.compile(r"([,;:])(?: ?[,;]){1,9}(?= |$)")
_BEFORE_POINT = re.compile(r" ([,.])(?=[\s\"'”’)\]]|$)")
_START = re.compile(r"^[ ,;:.)\]]+(?=\s|\w)")


def close_gaps(text: str) -> str:
    """Mends what is around cut templates: "Angola (; ), officially" -> "Angola, officially"."""
    if "(" in text or "[" in text or "“" in text or "«" in text:
        for _ in range(3):  # brackets in brackets
            mended = _HOLLOW.sub(_unless_hollow, text)
            if mended == text:
                break
            text = mended
        text = _BEFORE_CLOSE.sub(r"\1", _AFTER_OPEN.sub(r"\1", text))
    if " ," in text or " ." in text:
        text = _BEFORE_POINT.sub(r"\1", text)
    return " ".join(_START.sub("", _DOUBLED.sub(r"\1", text)).split())


def _unless_hollow(found: re.Match[str]) -> str:
    inside = found[1] or ""
    # "(!)" and "(?)" are marks of a writer, "(-)" and "(+)" of a formula.
    hollow = _FILLING.fullmatch(inside.casefold()) is not None and not re.search(r"[!?+\-−*%$#&=…]", inside)
    return "" if hollow else found[0]

"""What text is, for every reader of it: where a line is blank, what is no text, and what counts as a letter."""

from __future__ import annotations

import re
import string
import unicodedata

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

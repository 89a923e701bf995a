"""Which documents stay."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tools.corpus.sentences import count_letters, is_mostly_letters

SCRIPTS = {
    "latin": "A-Za-zªºÀ-ÖØ-öø-ʯᴀ-ᴥḀ-ỿⱠ-Ɀꜣ-ꞿ",
    "greek": "Ͱ-ͽΆΈ-Ͽἀ-ῼ",
    "cyrillic": "\u0400-\u052f\u1c80-\u1c88",
    "armenian": "\u0531-\u0588",
    "georgian": "\u10a0-\u10ff\u1c90-\u1cbf",
    "hebrew": "\u05d0-\u05f2",
    "arabic": "\u0620-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefc",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "thai": "\u0e01-\u0e4e",
    "han": "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af",
    "kana": "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d",
    "hangul": "\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3",
}
"""Letters of scripts, as ranges of a character class."""
_RANGE = re.compile(r"U\+([0-9A-F]{4,6})(?:-U\+([0-9A-F]{4,6}))?", re.IGNORECASE)
_LETTERS = re.compile(r"[^\W\d_]+")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What a document must be to stay.

    Raises:
        ValueError: a share outside 0 to 1, a length below 0, or a script that is not known.
    """

    min_characters: int = 0
    max_characters: int | None = None
    least_letters: float = 0.0
    """Share of letters (`count_letters`) among the visible characters; see `is_mostly_letters`."""
    language_characters: tuple[str, ...] = ()
    least_language: float = 0.8
    """Share of the language's characters among the letters."""
    _language: re.Pattern[str] | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("least_letters", "least_language"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share and lies from 0 to 1. Got {getattr(self, name)}.")
        if self.min_characters < 0 or (self.max_characters is not None and self.max_characters < self.min_characters):
            raise ValueError(
                "min_characters must be at least 0, and max_characters no less than that. "
                f"Got {self.min_characters} and {self.max_characters}."
            )
        if self.language_characters:
            ranges = "".join(map(_ranges, self.language_characters))
            object.__setattr__(self, "_language", re.compile(f"[{ranges}]+"))

    def refuse(self, text: str) -> str | None:
        """The name of the count that the document falls under; None where it stays."""
        if not text:
            return "empty"
        if len(text) < self.min_characters:
            return "too_short"
        if self.max_characters is not None and len(text) > self.max_characters:
            return "too_long"
        if not self.least_letters and self._language is None:
            return None
        visible = len(text) - _count(_SPACE, text) if self.least_letters else 0
        if self.least_letters and not is_mostly_letters(text, self.least_letters, count_letters(text), visible):
            return "few_letters"
        # Of letters alone: marks are of no script of their own.
        least = self.least_language * _count(_LETTERS, text)
        if self._language is not None and _count(self._language, text) < max(1.0, least):
            return "other_language"
        return None


def _count(pattern: re.Pattern[str], text: str) -> int:
    return len(text) - len(pattern.sub("", text))


def _ranges(name: str) -> str:
    if name.lower() in SCRIPTS:
        return SCRIPTS[name.lower()]
    match = _RANGE.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} is no script that is known ({', '.join(SCRIPTS)}), nor a range like U+0400-U+04FF of Unicode."
        )
    first, last = (int(end, 16) for end in (match[1], match[2] or match[1]))
    if not first <= last <= 0x10FFFF:
        raise ValueError(f"{name!r} is no range of Unicode; it must ascend and end at U+10FFFF at most.")
    return f"\\U{first:08x}-\\U{last:08x}"

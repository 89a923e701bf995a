"""Which dump of which Wikipedia."""

from __future__ import annotations

import re
from dataclasses import dataclass

LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Which dump.

    Raises:
        ValueError: a language or date that can be none.
    """

    language: str
    """As in the wiki's address: "en", "simple", "zh-min-nan"."""
    date: str
    """YYYYMMDD, or "latest": the newest that has the files."""
    content: str
    """"pages-articles-multistream" and the like."""
    parts: bool
    """The files that the content comes in, where it comes both whole and in parts."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.language):
            raise ValueError(f'--language is that of the wiki\'s address, such as "en". Got {self.language!r}.')
        if self.date != LATEST and not re.fullmatch(r"\d{8}", self.date):
            raise ValueError(f'--date is written YYYYMMDD, such as 20261101, or "latest". Got {self.date!r}.')
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.content):
            raise ValueError(f'--content is a part of a file name, such as "pages-articles". Got {self.content!r}.')

    @property
    def wiki(self) -> str:
        return f"{self.language.replace('-', '_')}wiki"

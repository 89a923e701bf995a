"""What is to be fetched, and what it must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit, urlunsplit

from tools.corpus.pipeline.step import LEFT_OUT, STEP
from tools.corpus.pipeline.units import Unit

DIGITS = MappingProxyType({"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128})
"""Hexadecimal digits of a checksum, by its kind."""
_TAKEN = frozenset({STEP, LEFT_OUT})
_LONGEST_NAME = 200
_FORM = "A line is a URL, then perhaps its size in bytes and a checksum such as sha256:HEX."


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file on a server.

    Raises:
        ValueError: no http(s) URL, one that names no file, or a checksum or size that can be none.
    """

    url: str
    checksum: str = ""
    """"sha256:" and hexadecimal digits, or another kind of `DIGITS`. Empty: not known."""
    size: int | None = None
    """Bytes, if they are known beforehand."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"only http:// and https:// URLs can be fetched. Got {self.url!r}.")
        _check_name(self.name, self.public_url)
        if self.checksum:
            kind, _, digits = self.checksum.partition(":")
            if kind not in DIGITS or not re.fullmatch(rf"[0-9a-f]{{{DIGITS[kind]}}}", digits):
                raise ValueError(
                    f"{self.public_url}: a checksum is one of {', '.join(DIGITS)}, a colon and its hexadecimal digits "
                    f"({', '.join(map(str, DIGITS.values()))} of them). Got {self.checksum!r}."
                )
        if self.size is not None and self.size < 0:
            raise ValueError(f"{self.public_url}: a size must be at least 0 bytes. Got {self.size}.")

    @property
    def name(self) -> str:
        """Of the file here: the last part of the URL's path."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def server(self) -> str:
        """Whom a request goes to; its ports and the ways to write it are one."""
        return urlsplit(self.url).hostname or ""

    @property
    def public_url(self) -> str:
        """Without user and password, which belong into no record and no message."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


@dataclass(frozen=True, kw_only=True)
class FileUnit(Unit):
    """A file as a unit of work."""

    source: Download


def read_list(path: Path) -> list[Download]:
    """The sources of a list file: one a line, empty lines and what follows a # left out.

    Raises:
        ValueError: no such file, not UTF-8, nothing in it, or a line that is none; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}. Convert the file to UTF-8 first.") from error
    except OSError as error:
        raise ValueError(f"the list {path} cannot be read: {error.strerror}.") from error
    sources = []
    for number, line in enumerate(lines, start=1):
        try:
            # A # inside a URL is part of it.
            words = re.sub(r"(^|\s)#.*", "", line).split()
            if words:
                sources.append(_read_line(words))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not sources:
        raise ValueError(f"{path} lists no URL. {_FORM}")
    return sources


def check_names(sources: Sequence[Download]) -> None:
    """Raises ValueError where two URLs would write one file."""
    seen: dict[str, Download] = {}
    for source in sources:
        other = seen.setdefault(source.name, source)
        if other is not source:
            raise ValueError(
                f"{other.public_url} and {source.public_url} would both be written to {source.name}. Drop one, or "
                "fetch them into two folders."
            )


def _read_line(words: Sequence[str]) -> Download:
    checksum, size = "", None
    for word in words[1:]:
        if word.isascii() and word.isdecimal() and size is None:
            size = int(word)
        elif ":" in word and not checksum:
            checksum = word.lower()
        else:
            raise ValueError(f"{word!r} is not understood. {_FORM}")
    return Download(url=words[0], checksum=checksum, size=size)


def _check_name(name: str, url: str) -> None:
    usable = name and name.isprintable() and not name.startswith(".") and "\\" not in name
    if not usable or name in _TAKEN or name.endswith(".tmp") or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"{url} ends in {name!r}, which cannot be the name of the file here. Name the URL of a file, with a name "
            f"of at most {_LONGEST_NAME} bytes that does not begin with a dot."
        )


# --- Which dump of which Wikipedia ------------------------------------------------------------------------------------

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


# --- How long a server is waited for ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How much is put up with.

    Raises:
        ValueError: fewer than 0 retries, or seconds that are none.
    """

    retries: int = 8
    """Failures in a row, without a new byte, after which a file is given up."""
    first_wait: float = 1.0
    """Seconds before the second attempt; twice as many before each further one, up to a minute."""
    timeout: float = 60.0
    """Seconds without a byte after which a connection counts as cut."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0. Got {self.retries}.")
        if not (self.first_wait >= 0 and 0 < self.timeout < float("inf")):
            raise ValueError(f"seconds must be positive. Got a wait of {self.first_wait}, a timeout of {self.timeout}.")

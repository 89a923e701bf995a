"""A page's lines as paragraphs: sections, lists and indentation."""

from __future__ import annotations

# Punctuation of other scripts is meant.
# ruff: noqa: RUF001
import re
from collections.abc import Iterator

from tools.corpus.extract.wikitext.names import END_MATTER

_PREFIX = re.compile(r"[*#:;]+")
_SENTENCE_END = re.compile(r"[.!?…。！？؟।][\"'”’»)\]」』]*$")
_FEWEST_WORDS = 4
_UNSPACED = re.compile(r"[。！？]")


def paragraphs(text: str) -> Iterator[tuple[str, bool]]:
    """Paragraphs of wikitext on one line each, and whether each is an item of a list.

    Headings are left out: they are no sentences. So are the sections at the end that hold works and links, and what is
    left of tables.
    """
    lines: list[str] = []
    skipping = 0  # level of the section that is left out; 0: none
    for line in text.split("\n"):
        stripped = line.strip()
        level, title = heading(stripped)
        prefix = "" if level else _leading(stripped)
        if lines and (not stripped or level or prefix or stripped.startswith(("|", "----"))):
            yield " ".join(lines), False
            lines = []
        if level:
            # Only sections of the first rank: one about literature, or a note, inside another section is prose.
            if not skipping or level <= skipping:
                skipping = level if level <= 2 and title.casefold() in END_MATTER else 0
        elif skipping or not stripped or stripped.startswith("|"):
            pass
        elif prefix:
            yield stripped[len(prefix) :].strip(), True
        elif rest := stripped.lstrip("-") if stripped.startswith("----") else stripped:
            lines.append(rest)
    if lines:
        yield " ".join(lines), False


def heading(line: str) -> tuple[int, str]:
    """Level and title of a heading; (0, "") where the stripped line is none."""
    if not line.startswith("=") or not line.endswith("=") or len(line) < 3:
        return 0, ""
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), (len(line) - 1) // 2, 6)
    return level, line[level:-level].strip(" \t='*_:")


def _leading(line: str) -> str:
    found = _PREFIX.match(line)
    return found[0] if found else ""


def is_prose(text: str) -> bool:
    """Whether a list's item reads as a sentence. BERT's authors left lists out (Devlin et al. 2019, section 3.1); items
    of whole sentences, and indented quotations, are as good as paragraphs."""
    if _SENTENCE_END.search(text) is None:
        return False
    return len(text.split()) >= _FEWEST_WORDS or _UNSPACED.search(text) is not None

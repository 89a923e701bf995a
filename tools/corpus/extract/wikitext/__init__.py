"""MediaWiki's markup as clean prose.

cut      comments, references, tables, files and templates that are no prose go; brackets are closed from here on
blocks   sections and lists: which lines are a paragraph
nodes    links and templates as what a reader sees, by `mwparserfromhell`
tidy     bold and italic, entities, and the gaps that cut templates leave
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import mwparserfromhell
from mwparserfromhell.nodes import Argument, ExternalLink, Heading, HTMLEntity, Node, Tag, Template, Text, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from tools.corpus.extract.wikitext.names import (
    END_MATTER,
    is_disambiguation_template,
    is_disambiguation_title,
    normal_name,
)
from tools.corpus.extract.wikitext.strip import BREAK, cut, drop_quotes, link_text, normalize
from tools.corpus.extract.wikitext.templates import Call, shown

# --- A page's lines as paragraphs: sections, lists and indentation ----------------------------------------------------

# Punctuation of other scripts is meant.
# ruff: noqa: RUF001


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


# --- The parser's tree of a line of wikitext as the text that a reader sees -------------------------------------------

_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TARGET = re.compile(r"\[\[[^\[\]{}|]*\|")


def needs_parser(line: str) -> bool:
    return "[[" in line or "{{" in line


def parsed(line: str) -> str:
    """A line that `cut` has been over, without links and templates. Quotes and entities are still in it."""
    try:
        return _text(mwparserfromhell.parse(line, skip_style_tags=True)).replace(BREAK, "\n")
    except (ParserError, RecursionError):
        # Never seen on what `cut` leaves.
        return unparsed(line)


def unparsed(line: str) -> str:
    """The same without the parser: templates go, and what brackets of links are left is for `tidy`."""
    return _TARGET.sub("", _TEMPLATE.sub("", line)).replace(BREAK, "\n")


def _text(code: Wikicode) -> str:
    return "".join(_node(node) for node in code.nodes)


def _node(node: Node) -> str:
    if isinstance(node, Text):
        return str(node.value)
    if isinstance(node, Wikilink):
        return link_text(str(node.title), None if node.text is None else _text(node.text))
    if isinstance(node, Template):
        return shown(_call(node))
    if isinstance(node, HTMLEntity):
        return str(node)
    if isinstance(node, ExternalLink):
        if node.brackets:
            return _text(node.title) if node.title is not None else ""
        return _text(node.url)
    if isinstance(node, Argument):
        return _text(node.default) if node.default is not None else ""
    if isinstance(node, Tag):
        return _text(node.contents) if node.contents is not None else ""
    return _text(node.title) if isinstance(node, Heading) else ""


def _call(node: Template) -> Call:
    spelled = str(node.name)
    positions: dict[int, str] = {}
    named: dict[str, str] = {}
    for parameter in node.params:
        name = str(parameter.name).strip()
        value = _text(parameter.value).replace(BREAK, "\n").strip()
        # More arguments than these no rule reads, and a number may be of any size.
        if name.isascii() and name.isdecimal() and len(name) < 4:
            positions[int(name)] = value
        else:
            named[name] = value
    last = max(positions, default=0)
    return Call(
        name=normal_name(spelled),
        spelled=spelled,
        positions=tuple(positions.get(number, "") for number in range(1, last + 1)),
        named=named,
    )


# --- MediaWiki's markup as clean prose --------------------------------------------------------------------------------

__all__ = ["PARSER_VERSION", "clean_page"]

PARSER_VERSION = 2
"""Goes up with every change of these rules that changes a text."""

MOST_PARSED = 1 << 20
"""Characters of one page that go through the parser, which takes some microseconds for each. MediaWiki's own limit
for a page is 2 MiB, of which a few per cent are left for the parser."""

_LETTERS = re.compile(r"[^\W\d_]{2}")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_OWN_NAME = re.compile(r"\{\{\s*(?:FULL|BASE|SUB)?PAGENAME\s*\}\}")


def clean_page(wikitext: str, title: str) -> str | None:
    """The prose of an article, in time that grows with its length, whatever is in it.

    Args:
        wikitext: the page's source, as a dump has it.
        title: of the page.

    Returns:
        Paragraphs of one line each, separated by an empty line; "" where there is no prose. None for a page that only
        lists what its title can mean.
    """
    if is_disambiguation_title(title):
        return None
    page = cut(_OWN_NAME.sub(lambda _: title, wikitext))
    if any(is_disambiguation_template(name) for name in page.templates):
        return None
    result = []
    budget = MOST_PARSED
    for paragraph, listed in paragraphs(page.text):
        if needs_parser(paragraph):
            budget -= len(paragraph)
            paragraph = parsed(paragraph) if budget >= 0 else unparsed(paragraph)
        for part in _PARAGRAPH_END.split(drop_quotes(paragraph)):
            text = normalize(part)
            if _LETTERS.search(text) and (not listed or is_prose(text)):
                result.append(text)
    return "\n\n".join(result)

"""MediaWiki's markup as clean prose.

tags     comments, references and tags go
variants of a text for readers of several scripts, one stays
cut      tables, files and templates that are no prose go; brackets are closed from here on
blocks   sections and lists: which lines are a paragraph
nodes    links and templates as what a reader sees, by `mwparserfromhell`
tidy     bold and italic, entities, and the gaps that cut templates leave
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import mwparserfromhell
from mwparserfromhell.nodes import Argument, ExternalLink, Heading, HTMLEntity, Node, Tag, Template, Text, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from tools.corpus.extract.read_context import Site
from tools.corpus.extract.wikitext.calls import Call
from tools.corpus.extract.wikitext.names import (
    END_MATTER,
    is_disambiguation_template,
    is_disambiguation_title,
    is_redirect,
    namespaces_of,
    plain_name,
    template_key,
)
from tools.corpus.extract.wikitext.strip import (
    BREAK,
    HOLE,
    Page,
    close_holes,
    cut,
    cut_tags,
    drop_quotes,
    link_text,
    normalize,
)
from tools.corpus.extract.wikitext.templates import templates_of
from tools.corpus.sentences import has_word

# --- Text for readers of several scripts: `-{zh-hans:计算机;zh-hant:電腦}-` ---------------------------------

_FALLBACKS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "zh": {
        "zh": "zh-hans zh-hant zh-cn zh-tw zh-hk zh-sg zh-mo zh-my", "zh-hans": "zh-cn zh-sg zh-my",
        "zh-hant": "zh-tw zh-hk zh-mo", "zh-cn": "zh-hans zh-sg zh-my", "zh-sg": "zh-my zh-hans zh-cn",
        "zh-my": "zh-sg zh-hans zh-cn", "zh-tw": "zh-hant zh-hk zh-mo", "zh-hk": "zh-mo zh-hant zh-tw",
        "zh-mo": "zh-hk zh-hant zh-tw",
    },
    "ban": {"ban": "", "ban-bali": "ban", "ban-x-dharma": "ban", "ban-x-palmleaf": "ban", "ban-x-pku": "ban"},
    "crh": {"crh": "crh-latn", "crh-cyrl": "crh-latn", "crh-latn": "crh-cyrl"},
    "gan": {"gan": "gan-hans gan-hant", "gan-hans": "gan", "gan-hant": "gan"},
    "iu": {"iu": "ike-cans", "ike-cans": "iu", "ike-latn": "iu"},
    "kk": {
        "kk": "kk-cyrl", "kk-cyrl": "kk", "kk-latn": "kk", "kk-arab": "kk", "kk-kz": "kk-cyrl", "kk-tr": "kk-latn",
        "kk-cn": "kk-arab",
    },
    "ku": {"ku": "ku-latn", "ku-arab": "ku-latn", "ku-latn": "ku-arab"},
    "mni": {"mni": "", "mni-beng": "mni"},
    "sh": {"sh": "sh-latn", "sh-latn": "", "sh-cyrl": "sh-latn"},
    "shi": {"shi": "shi-latn shi-tfng", "shi-tfng": "shi", "shi-latn": "shi"},
    "sr": {"sr": "sr-ec", "sr-ec": "sr", "sr-el": "sr"},
    "tg": {"tg": "", "tg-latn": ""},
    "tly": {"tly": "", "tly-cyrl": "tly"},
    "uz": {"uz": "uz-latn", "uz-latn": "uz", "uz-cyrl": "uz"},
    "wuu": {"wuu": "wuu-hans wuu-hant", "wuu-hans": "wuu", "wuu-hant": "wuu"},
    "zgh": {"zgh": "", "zgh-latn": ""},
})  # fmt: skip
"""By language, its variants, and which others each takes where it is not given, in this order; as MediaWiki does."""
_OTHER_CODES: Mapping[str, str] = MappingProxyType({
    "zh-hans-cn": "zh-cn", "zh-hans-sg": "zh-sg", "zh-hans-my": "zh-my", "zh-hant-tw": "zh-tw", "zh-hant-hk": "zh-hk",
    "zh-hant-mo": "zh-mo", "sr-cyrl": "sr-ec", "sr-latn": "sr-el", "iu-cans": "ike-cans", "iu-latn": "ike-latn",
    "sr-cyrl-ekavsk": "sr-ec", "sr-latn-ekavsk": "sr-el", "kk-cyrl-kz": "kk-kz", "kk-latn-tr": "kk-tr",
    "kk-arab-cn": "kk-cn",
})  # fmt: skip
"""Codes of BCP 47 for variants that MediaWiki calls otherwise."""
_FIRST_OF_ANY = frozenset({"zh", "gan", "wuu"})
"""Variants that convert nothing. Where none of their fallbacks is given either, the first one that is stays."""
_VARIANT_TOKEN = re.compile(r"-\{(?!\{)|\{\{|\}\}|\}-")
_OUTSIDE_TOKEN = re.compile(r"\b(?:https?|ftps?)://(?:[^\s\[\]<>|{}-]|-(?!\{)|-\{[^\s\[\]<>|;:{}]{0,200}\})*|-\{(?!\{)")
"""An address is passed over, with what looks like a rule in it."""
_FLAGS = re.compile(r"([^\[\]{}<>|]{0,200})\|")
_ENTITY_END = re.compile(r"(&[#A-Za-z0-9]{1,32});")
_MOST_RULES = 10
"""Rules in rules, as in MediaWiki; the mark of a deeper one is text."""


@dataclass(frozen=True)
class Converter:
    """Chooses among the variants of a language."""

    variant: str
    order: tuple[str, ...]
    """The variant that is asked for, then those that may stand in for it."""
    codes: Mapping[str, str]
    """All variants of the language, by all their codes."""
    separator: re.Pattern[str]

    def choose(self, inner: str) -> str | None:
        """What a reader sees of a rule without its brackets; None: nothing."""
        flags, text = self._flags(inner)
        if flags is None:
            return text
        if "N" in flags or "D" in flags or "-" in flags or "H" in flags or flags == {"T"}:
            return None  # the name of a variant, a description, or a rule for the text elsewhere
        variants, others = self._rules(text)
        if not variants and not others:
            return None if "T" in flags else text
        for code in self.order:
            if code in variants:
                return variants[code]
        if self.variant in others:
            return others[self.variant]
        given = next(iter([*variants.values(), *others.values()]))
        return given if self.variant in _FIRST_OF_ANY else None

    def _flags(self, inner: str) -> tuple[set[str] | None, str]:
        """The flags and what they are for; None where it is raw text."""
        found = _FLAGS.match(inner)
        if found is None:
            return set(), inner
        text = inner[found.end() :]
        flags = {flag.strip() for flag in found[1].split(";")}
        if "R" in flags or any(flag.casefold() in self.codes for flag in flags):
            # `-{zh-hans;zh-hant|text}-` is converted for these variants alone, and nothing is converted here.
            return None, text
        return flags & {"A", "T", "D", "-", "H", "N"}, text

    def _rules(self, text: str) -> tuple[dict[str, str], dict[str, str]]:
        """The texts of variants, and those of one direction (`计算机=>zh-hant:電腦`). Both are empty where a part is of
        no variant: then it is no rule but text."""
        variants: dict[str, str] = {}
        others: dict[str, str] = {}
        for part in self.separator.split(_ENTITY_END.sub("\\1\x01", text)):
            name, colon, shown = part.replace("\x01", ";").partition(":")
            if not colon:
                continue
            source, arrow, target = name.partition("=>")
            code = self.codes.get((target if arrow else source).strip().casefold())
            if code is None:
                return {}, {}
            if arrow and source.strip():
                others.setdefault(code, shown.strip())
            elif not arrow and shown.strip():
                variants[code] = shown.strip()
        return variants, others


@lru_cache(maxsize=64)
def converter_of(language: str) -> Converter | None:
    """The converter for a language or a variant of one; None where it has no variants."""
    asked = _OTHER_CODES.get(language, language)
    family = next((known for known in _FALLBACKS.values() if asked in known), None)
    if family is None:
        return None
    codes = {code: code for code in family} | {code: name for code, name in _OTHER_CODES.items() if name in family}
    names = "|".join(sorted(map(re.escape, codes), key=len, reverse=True))
    # No more than the ";" is taken: a space before the look ahead would be given back one by one.
    separator = rf";(?=\s*(?:{names})\s*:|[^;]*?=>\s*(?:{names})\s*:|\s*$)"
    return Converter(asked, (asked, *family[asked].split()), codes, re.compile(separator, re.IGNORECASE))


def choose_variants(text: str, converter: Converter, counts: Counter[str]) -> str:
    """Text of one variant. Of rules in rules the inner ones are chosen first. What opens and is not closed is text."""
    parts: list[list[str]] = [[]]  # of the text, and of every rule that is open
    opened: list[str] = []  # "-{" and "{{", as they are around the place
    place = 0
    while found := (_VARIANT_TOKEN if len(parts) > 1 else _OUTSIDE_TOKEN).search(text, place):
        token, start = found[0], found.start()
        parts[-1].append(text[place:start])
        place = found.end()
        if token == "-{" and len(parts) <= _MOST_RULES:
            opened.append(token)
            parts.append([])
        elif token == "{{":
            opened.append(token)
            parts[-1].append(token)
        elif token == "}}" and opened[-1] == "{{":
            opened.pop()
            parts[-1].append(token)
        elif token == "}}":
            place -= 1  # of "}}-" the second may end a rule
            parts[-1].append("}")
        elif token == "}-" and len(parts) > 1:
            while opened.pop() != "-{":
                pass
            shown = converter.choose("".join(parts.pop()))
            counts["variants_dropped" if shown is None else "variants_written"] += 1
            parts[-1].append(shown or "")
        else:
            parts[-1].append(token)
    counts["variants_unclosed"] += len(parts) - 1
    return "-{".join("".join(part) for part in [*parts[:-1], [*parts[-1], text[place:]]])


# --- A page's lines as paragraphs: sections, lists and indentation ----------------------------------------------------

# Punctuation of other scripts is meant.
# ruff: noqa: RUF001


_PREFIX = re.compile(r"[*#:;]+")
_SENTENCE_END = re.compile(r"[.!?…。！？؟।॥۔։።፧။។៕།༎᠃꧉｡][\"'”’»)\]」』]*$")
_FEWEST_WORDS = 4
_UNSPACED = re.compile(r"[。！？｡။។៕།༎꧉]")


def paragraphs(text: str, counts: Counter[str]) -> Iterator[tuple[str, bool]]:
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
            counts["headings_dropped"] += 1
            # Only sections of the first rank: one about literature, or a note, inside another section is prose.
            if not skipping or level <= skipping:
                skipping = level if level <= 2 and title.casefold() in END_MATTER else 0
                counts["sections_dropped"] += bool(skipping)
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

_TEMPLATE = re.compile(r"\{\{([^{}|]*)[^{}]*\}\}")
_TARGET = re.compile(r"\[\[[^\[\]{}|]*\|")


def needs_parser(line: str) -> bool:
    return "[[" in line or "{{" in line


def parsed(line: str, page: Page) -> str:
    """A line that `cut` has been over, without links and templates. Quotes and entities are still in it."""
    try:
        text = _text(mwparserfromhell.parse(line, skip_style_tags=True), page)
        return close_holes(text).replace(BREAK, "\n")
    except (ParserError, RecursionError):
        # Never seen on what `cut` leaves.
        return unparsed(line, page)


def unparsed(line: str, page: Page) -> str:
    """The same without the parser: templates go, and what brackets of links are left is for `tidy`."""
    page.counts["paragraphs_unparsed"] += 1

    def left_out(found: re.Match[str]) -> str:
        page.drop_template(plain_name(found[1], page.namespaces))
        return ""

    return close_holes(_TARGET.sub("", _TEMPLATE.sub(left_out, line))).replace(BREAK, "\n")


def _text(code: Wikicode, page: Page) -> str:
    return "".join(_node(node, page) for node in code.nodes)


def _node(node: Node, page: Page) -> str:
    if isinstance(node, Text):
        return str(node.value)
    if isinstance(node, Wikilink):
        return link_text(str(node.title), None if node.text is None else _text(node.text, page), page)
    if isinstance(node, Template):
        return _template(node, page)
    if isinstance(node, HTMLEntity):
        return str(node)
    if isinstance(node, ExternalLink):
        if node.brackets:
            return _text(node.title, page) if node.title is not None else ""
        return _text(node.url, page)
    if isinstance(node, Argument):
        return _text(node.default, page) if node.default is not None else ""
    if isinstance(node, Tag):
        return _text(node.contents, page) if node.contents is not None else ""
    return _text(node.title, page) if isinstance(node, Heading) else ""


def _template(node: Template, page: Page) -> str:
    name = plain_name(str(node.name).replace(BREAK, " "), page.namespaces)
    call = _call(node, name, page)
    shown = None if call is None else page.templates.shown(call, name)
    if shown is None:
        page.drop_template(name)
        return HOLE
    page.counts["templates_written"] += 1
    return shown


def _call(node: Template, name: str, page: Page) -> Call | None:
    """None where nothing is left of an argument but the hole of a template in it."""
    positions: dict[int, str] = {}
    named: dict[str, str] = {}
    for parameter in node.params:
        key = str(parameter.name).replace(BREAK, " ").strip()
        text = _text(parameter.value, page).replace(BREAK, "\n")
        value = close_holes(text).strip()
        # More arguments than these no rule reads, and a number may be of any size.
        if key.isascii() and key.isdecimal() and len(key) < 4:
            if not value and HOLE in text:
                return None
            positions[int(key)] = value
        elif value:
            named[key] = value
    last = max((number for number, value in positions.items() if value), default=0)
    return Call(
        name=template_key(name),
        positions=tuple(positions.get(number, "") for number in range(1, last + 1)),
        named=named,
    )


# --- MediaWiki's markup as clean prose --------------------------------------------------------------------------------

__all__ = ["PARSER_VERSION", "clean_page", "is_redirect", "namespaces_of"]

PARSER_VERSION = 5
"""Goes up with every change of these rules that changes a text."""

MOST_PARSED = 1 << 20
"""Characters of one page that go through the parser, which takes some microseconds for each. MediaWiki's own limit
for a page is 2 MiB, of which a few per cent are left for the parser."""

ENGLISH = Site(language="en")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_OWN_NAME = re.compile(r"\{\{\s*(?:FULL|BASE|SUB)?PAGENAME\s*\}\}")


def clean_page(
    wikitext: str,
    title: str,
    site: Site = ENGLISH,
    counts: Counter[str] | None = None,
    dropped: Counter[str] | None = None,
) -> str | None:
    """The prose of an article, in time that grows with its length, whatever is in it.

    Args:
        wikitext: the page's source, as a dump has it.
        title: of the page.
        site: the wiki that it is of.
        counts: takes up how much of the article was cut or written out, by kind.
        dropped: takes up which templates were left out of it, by name.

    Returns:
        Paragraphs of one line each, separated by an empty line; "" where there is no prose. None for a page that only
        lists what its title can mean: that is no article, and nothing of it is counted.
    """
    if is_disambiguation_title(title):
        return None
    page = Page(namespaces=namespaces_of(site), templates=templates_of(site))
    text = cut_tags(_OWN_NAME.sub(lambda _: title, wikitext), page)
    if "-{" in text and (converter := converter_of(site.language)) is not None:
        text = choose_variants(text, converter, page.counts)
    text = cut(text, page)
    if any(is_disambiguation_template(name) for name in page.seen):
        return None
    result = []
    budget = MOST_PARSED
    for paragraph, listed in paragraphs(text, page.counts):
        if needs_parser(paragraph):
            budget -= len(paragraph)
            paragraph = parsed(paragraph, page) if budget >= 0 else unparsed(paragraph, page)
        for part in _PARAGRAPH_END.split(drop_quotes(paragraph)):
            text = normalize(part, page.counts)
            if not has_word(text):
                page.counts["paragraphs_without_words"] += bool(text)
            elif listed and not is_prose(text):
                page.counts["list_items_dropped"] += 1
            else:
                result.append(text)
    if counts is not None:
        counts.update(page.counts)
    if dropped is not None:
        dropped.update(page.dropped)
    return "\n\n".join(result)

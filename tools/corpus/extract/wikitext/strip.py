"""What no reader of prose needs is cut out of wikitext, in time linear in its length, before the parser sees it.

A parser of wikitext guesses at what an unclosed bracket means, and pays for each guess: a page of 10 000 openers can
take it a minute. After these cuts every bracket is closed, nesting is shallow, and half of the text is gone.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tools.corpus.extract.wikitext.calls import ITALIC, SUB, SUB_END, SUP, SUP_END, place_scripts
from tools.corpus.extract.wikitext.names import (
    BREAKING_TAGS,
    HIDDEN_TAGS,
    LITERAL_TAGS,
    PROJECTS,
    Namespaces,
    plain_name,
    template_key,
)
from tools.corpus.extract.wikitext.templates import FUNCTIONS, Templates
from tools.corpus.sentences import ENTITY, entity_text

BREAK = "\ufdd0"
"""Stands for a line's end inside a template, so that a template is on one line; the cleaned input has none."""
LOST = "\ufdd1"
"""Stands for a `{{` or `{|` that nothing closes."""
LONE = "\ufdd2"
"""Stands for a `[` that belongs to no other."""
HOLE = "\ufdd3"
"""Stands, inside of a template or a link, for a template that has been left out."""
MOST_NESTED = 20
"""Brackets around brackets: what lies deeper is cut. Articles have up to ten."""

_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(kw_only=True)
class Page:
    """What is known of a page's wiki, and what has been found in it so far."""

    namespaces: Namespaces
    templates: Templates
    seen: set[str] = field(default_factory=set)
    """Names of all templates outside of references and tables, without case."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of what has been cut, by kind."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Of templates that have been left out, by name."""

    def drop_template(self, name: str) -> None:
        self.counts["templates_dropped"] += 1
        function, colon, _ = name.partition(":")
        is_function = colon and (function.isupper() or function[:1] == "#" or function.lower() in FUNCTIONS)
        self.dropped[f"{function}:" if is_function else name] += 1

    def hides(self, target: str, labelled: bool) -> bool:
        """Whether `[[target]]` shows nothing where it stands; counts it."""
        kind = self.namespaces.hidden(target, labelled)
        if kind:
            self.counts[kind] += 1
            self.counts["namespaces_guessed"] += self.namespaces.is_guess(target)
        return bool(kind)


def cut(text: str, page: Page) -> str:
    """Cuts files, categories, tables and the templates that have no rule out of a text without tags: every `{{` and
    `[[` that is left is closed on its line."""
    if "[" in text:
        text = cut_flat_links(text, page)
    return cut_brackets(text, page)


def cut_tags(wikitext: str, page: Page) -> str:
    """Cuts comments, references, tags, and characters that are no text."""
    text, count = _NOT_TEXT.subn("", wikitext.replace("\r\n", "\n").replace("\r", "\n"))
    page.counts["characters_dropped"] += count
    return strip_tags(text, page)


# Tags

_TAG = re.compile(r"<(?:!--|(/?)([A-Za-z][A-Za-z0-9-]*)((?:[\s/][^<>]*)?)>)")
_PLAIN_FORMULA = re.compile(r"(?:[^\W_]|[\s+\-−=>(),.!/*|]|<(?![A-Za-z/])){1,60}")
_ESCAPES = str.maketrans({character: f"&#{ord(character)};" for character in "[]{}|<>=*:'_~!\n"})


def strip_tags(text: str, page: Page) -> str:
    """Comments and tags: hidden ones with their content, literal ones escaped, the others alone."""
    if "<" not in text:
        return text
    parts: list[str] = []
    unclosed: set[str] = set()
    end = 0
    while found := _TAG.search(text, end):
        parts.append(text[end : found.start()].replace("<", "&lt;"))
        shown, end = _cut_tag(text, found, unclosed, page)
        parts.append(shown)
    parts.append(text[end:].replace("<", "&lt;"))
    return "".join(parts)


_SCRIPTS = {"sup": (SUP, SUP_END), "sub": (SUB, SUB_END)}
_ITALIC = re.compile(r"\s{0,9}(?:''(?!')|<var>|<i>)")
_SHOWN = frozenset({"ref", "math", "ce", "chem", "score", "hiero"})
"""Hidden tags of which a reader sees something, so that what is around them is no one word."""
_UNSPACED = re.compile("[\u0e00-\u109f\u1780-\u17ff\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""Scripts without spaces between words."""


def gap(text: str, start: int, end: int) -> str:
    """What stands for a part of a text that is left out: a space between two words or numbers, else nothing."""
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return " " if before.isalnum() and after.isalnum() and not _UNSPACED.search(before + after) else ""


_HOLES = re.compile(f"{HOLE}+")


def close_holes(text: str) -> str:
    """Text without the marks of templates that have been left out of it."""
    if HOLE not in text:
        return text
    return _HOLES.sub(lambda found: gap(text, found.start(), found.end()), text)


def _cut_tag(text: str, found: re.Match[str], unclosed: set[str], page: Page) -> tuple[str, int]:
    """What stands for the tag, and where the text goes on. `unclosed` gathers names that are closed nowhere below."""
    if found[2] is None:
        end = text.find("-->", found.end())
        page.counts["comments_dropped"] += 1
        return "", len(text) if end < 0 else end + 3
    name = found[2].lower()
    closing, alone = found[1] == "/", found[3].rstrip().endswith("/")
    if name == "br":
        return " ", found.end()
    if name == "li":
        return ("\n" if closing else "\n* "), found.end()
    if name == "table":  # a wikitext table from here on
        return ("\n|}\n" if closing else "\n{|\n"), found.end()
    if name in BREAKING_TAGS and not (name == "section" and alone):  # that marks what other pages show
        return "\n\n", found.end()
    if name in _SCRIPTS and not alone:
        italic = not closing and _ITALIC.match(text, found.end())
        return _SCRIPTS[name][closing] + (ITALIC if italic else ""), found.end()
    if closing or alone or name in unclosed or not (name in HIDDEN_TAGS or name in LITERAL_TAGS):
        return gap(text, found.start(), found.end()) if alone and name in _SHOWN else "", found.end()
    close = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, found.end())
    if close is None:
        unclosed.add(name)
        return "", found.end()
    shown = _content(name, found[3], text[found.end() : close.start()], page)
    return shown or (gap(text, found.start(), close.end()) if name in _SHOWN else ""), close.end()


def _content(name: str, attributes: str, content: str, page: Page) -> str:
    """What a hidden or literal tag shows after all."""
    if name in LITERAL_TAGS or (name in ("syntaxhighlight", "source") and "inline" in attributes):
        return content.translate(_ESCAPES)
    if name == "math" and _PLAIN_FORMULA.fullmatch(content.strip()):
        return content.strip().translate(_ESCAPES)
    page.counts["references_dropped" if name in ("ref", "references") else "tags_dropped"] += 1
    # What is a block of its own leaves a gap, so that the lines around it do not become one sentence.
    return "\n\n" if name in ("pre", "syntaxhighlight", "source", "gallery", "timeline", "score", "imagemap") else ""


# Links with nothing nested in them: most of them, which the parser need not see

_FLAT_LINK = re.compile(r"\[\[([^\[\]{}|<>\n:#]+)(?:\|([^\[\]{}|\n]*))?\]\]")
_FLAT_OTHER = re.compile(r"\[\[([^\[\]{}]*)\]\]")
_WEB_LINK = re.compile(r"\[(?:(?:https?|ftps?|irc|news|git|svn):)?(?://|mailto:)[^\s\[\]<>]*[^\S\n]*", re.IGNORECASE)
_OF_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{1,8}){0,3}:(?=\S)")
_WEB_LABEL = re.compile(r"(?:[^\[\]\n]+|\[[^\[\]\n]*\])*")


def cut_flat_links(text: str, page: Page) -> str:
    """Links become their labels where nothing is nested in them; in two rounds, as captions of files hold links."""

    def shown(found: re.Match[str]) -> str:
        target, bar, label = found[1].replace("\n", " ").partition("|")
        return link_text(target, label if bar else None, page)

    return _FLAT_OTHER.sub(shown, cut_web_links(_FLAT_LINK.sub(_label, text)))


def cut_web_links(text: str) -> str:
    """Links to the web become their labels, in which brackets may stand, but none in them."""
    parts: list[str] = []
    begin = place = 0  # of what is not in `parts` yet; of where the next link is looked for
    while found := _WEB_LINK.search(text, place):
        place = found.end()
        # Apart from the address: one expression for both would try every place where that may end and this begin.
        label = _WEB_LABEL.match(text, place)
        if label is not None and text.startswith("]", label.end()):
            parts += [text[begin : found.start()], label[0]]
            begin = place = label.end() + 1
    return "".join([*parts, text[begin:]])


def _label(found: re.Match[str]) -> str:
    # "[[Bus|]]" is a slip for the pipe trick, which would have written "[[Bus|Bus]]".
    return found[2] or found[1]


def link_text(target: str, label: str | None, page: Page) -> str:
    """What a reader sees of a link, whose label may be missing."""
    if ":" in target and page.hides(target, label is not None):
        return ""
    if label:
        # A label has no bar; where there is one, the options of a file of an unknown namespace stand before it.
        return label.rpartition("|")[2]
    target = target.strip().lstrip(":")
    prefix, colon, rest = target.partition(":")
    if not colon or prefix.strip().casefold() not in PROJECTS:
        return target
    found = _OF_LANGUAGE.match(rest)
    return rest[found.end() :] if found else rest  # "s:fr:Title"


# Brackets of all kinds

_ARGUMENT = re.compile(r"\{\{\{[^{}|]*(?:\|([^{}]*))?\}\}\}")
_BRACKET = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}(?!\})")
_TABLE_INDENT = " \t:*#;"
_MOST_INDENTED = 12
_NAME = re.compile(r"\s*([^|{}\[\]<>\n]{0,120})")
_TARGET = re.compile(r"([^|{}\[\]<>\n]{0,300})(\|?)")
_ARGUMENTS = re.compile(f"{LOST}[^\n]*(?:\n[ \t]*[|!][^\n]*)*")
_OTHER_BRACKETS = re.compile(r"\[+")


def cut_brackets(text: str, page: Page) -> str:
    """Closed links, and templates with a rule, stay, on one line each; others and tables go with their content.
    Brackets without a partner go alone, a template's with the lines that look like its arguments."""
    if "{{{" in text:
        text = _ARGUMENT.sub(lambda found: found[1] or "", text)
    starts, partners = pair_brackets(text)
    parts: list[str] = []
    end = number = depth = 0
    while number < len(starts):
        between = text[end : starts[number]]
        parts.append(between.replace("\n", BREAK) if depth else between)
        partner = partners[number]
        shown, inside = _shown(text, starts[number], starts[partner] if partner >= 0 else -1, page)
        if inside and partner > number and depth >= MOST_NESTED:
            page.counts["nested_too_deep"] += 1
        if partner > number and not (inside and depth < MOST_NESTED):
            number = partner  # over all that is inside
        elif partner >= 0:
            depth += 1 if partner > number else -1
        begin, end = end + len(between), starts[number] + 2
        parts.append(gap(text, begin, end) if shown == HOLE and not depth else shown)
        number += 1
    parts.append(text[end:])
    kept = _ARGUMENTS.sub("", "".join(parts))
    return _OTHER_BRACKETS.sub(_escaped, kept)


def _escaped(found: re.Match[str]) -> str:
    # What is left of links to the web closes nowhere, and the parser would look for its end at each one anew.
    return LONE if len(found[0]) == 1 else "[["


def pair_brackets(text: str) -> tuple[array[int], array[int]]:
    """Where each bracket starts, and the number of its partner; -1: it has none.

    One that closes belongs to the innermost open one of its kind; those opened between are none. Numbers in arrays: a
    page of nothing but brackets needs 16 bytes for each.
    """
    starts, partners, opened = array("q"), array("q"), array("q")
    counts = dict.fromkeys(_OPENERS.values(), 0)
    for found in _BRACKET.finditer(text):
        kind, start = found[0], found.start()
        if "|" in kind and not _begins_line(text, start):
            continue
        number = len(starts)
        starts.append(start)
        partners.append(-1)
        if kind in counts:
            opened.append(number)
            counts[kind] += 1
        elif counts[_OPENERS[kind]]:
            other_kind = ""
            while other_kind != _OPENERS[kind]:
                other = opened.pop()
                other_kind = text[starts[other] : starts[other] + 2]
                counts[other_kind] -= 1
            partners[other], partners[number] = number, other
    return starts, partners


def _begins_line(text: str, start: int) -> bool:
    earliest = max(start - _MOST_INDENTED, 0)  # no further, or many on a long line would take long
    line = text.rfind("\n", earliest, start)
    return (line >= 0 or earliest == 0) and not text[line + 1 : start].strip(_TABLE_INDENT)


_OPENERS = {"}}": "{{", "]]": "[[", "|}": "{|"}


def _shown(text: str, start: int, partner: int, page: Page) -> tuple[str, bool]:
    """What stays of a bracket, and whether what is inside it stays. Of one that opens and whose inside does not stay:
    what stands for all of it. `partner`: where the other one starts; -1: there is none."""
    kind = text[start : start + 2]
    if partner < 0:
        page.counts["brackets_unclosed"] += 1
        return (LOST if kind in ("{{", "{|") else ""), False
    if kind == "{{":
        return _shown_template(text, start + 2, partner, page)
    if kind == "[[":
        found = _TARGET.match(text, start + 2)
        hidden = found is not None and ":" in found[1] and page.hides(found[1], bool(found[2]))
        return ("", False) if hidden else ("[[", True)
    if kind == "{|":
        page.counts["tables_dropped"] += 1
        return "\n", False
    return kind, False


def _shown_template(text: str, start: int, end: int, page: Page) -> tuple[str, bool]:
    found = _NAME.match(text, start)
    name = plain_name(found[1], page.namespaces) if found else ""
    page.seen.add(name.casefold())
    key = template_key(name)
    constant = page.templates.layout.get(key)
    if constant is None and found is not None and found.end() == end:
        constant = page.templates.constants.get(key)
    if constant is not None:
        page.counts["templates_written"] += 1
        return constant, False
    if page.templates.has_rule(name, key):
        return "{{", True
    page.drop_template(name)
    return HOLE, False


# --- Cleaning up ------------------------------------------------------------------------------------------------------


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

_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff"
                        "\ufdd0-\ufdd3\ufdd8-\ufddf\ufde2-\ufdef\ufffe\uffff]")  # fmt: skip
"""Controls, soft hyphens and marks of direction. Joiners (U+200C, U+200D) belong to the spelling of some languages."""
_MARKUP = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|''+|__[A-Z]{3,}__")
_SWITCH = re.compile(r"__([^\W\d_](?:[^\s_\[\]{}|<>=]|_(?!_)){2,39})__")
"""Switches of a page in any language, `__БЕЗ_ОГЛАВЛЕНИЯ__` too."""
_IN_MARKUP = re.compile(r"[\[\]{}|_]")
_MOST_SWEEPS = 4
_MEANT = "[]{}|'_"
_STANDS_FOR = {ord(character): chr(0xFDD8 + place) for place, character in enumerate(_MEANT)}
_MEANS = {ord(stands): chr(character) for character, stands in _STANDS_FOR.items()}
"""Characters that a writer has escaped, so that they are shown; others stand for them while markup is swept."""


def normalize(text: str, counts: Counter[str]) -> str:
    """A paragraph as it is read: no markup but what was written as entities, no gaps, any run of spaces as one."""
    text = text.replace(LONE, "[")
    if not text.isascii() or not text.isprintable():
        text, count = _INVISIBLE.subn("", text)
        counts["characters_dropped"] += count
    if "__" in text:
        text = _SWITCH.sub(lambda found: "" if found[1] == found[1].upper() else found[0], text)
    escaped = "&" in text
    text = swept(place_scripts(ENTITY.sub(partial(_character, counts=counts), text) if escaped else text))
    if escaped:
        # Among gaps a bracket is a bracket, however it was written; two that look like markup stay disguised.
        text = _MARKUP.sub(lambda found: found[0].translate(_STANDS_FOR), text.translate(_MEANS))
    text = " ".join(text.split())
    closed = close_gaps(text)
    if closed != text:
        closed = " ".join(swept(closed).split())  # it may have brought brackets together
        counts["gap_characters_dropped"] += _visible(text) - _visible(closed)
    return closed.translate(_MEANS) if escaped else closed


def _visible(text: str) -> int:
    return len(text) - text.count(" ")  # which any run of spaces has become


def _character(entity: re.Match[str], counts: Counter[str]) -> str:
    shown = _INVISIBLE.sub("", entity_text(entity[0]))
    counts["characters_dropped"] += not shown
    return shown.translate(_STANDS_FOR)


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
_BEFORE_OTHER_POINT = re.compile(r" (?=[।॥،؛۔。，、])")
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
    if not text.isascii():
        text = _BEFORE_OTHER_POINT.sub("", text)
    return " ".join(_START.sub("", _DOUBLED.sub(r"\1", text)).split())


def _unless_hollow(found: re.Match[str]) -> str:
    inside = found[1] or ""
    # "(!)" and "(?)" are marks of a writer, "(-)" and "(+)" of a formula.
    hollow = _FILLING.fullmatch(inside.casefold()) is not None and not re.search(r"[!?+\-−*%$#&=…]", inside)
    return "" if hollow else found[0]

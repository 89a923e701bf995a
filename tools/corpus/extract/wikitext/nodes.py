"""The parser's tree of a line of wikitext as the text that a reader sees."""

from __future__ import annotations

import re

import mwparserfromhell
from mwparserfromhell.nodes import Argument, ExternalLink, Heading, HTMLEntity, Node, Tag, Template, Text, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from tools.corpus.extract.wikitext.cut import BREAK, link_text
from tools.corpus.extract.wikitext.names import normal_name
from tools.corpus.extract.wikitext.templates import Call, shown

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

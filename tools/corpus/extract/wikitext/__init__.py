"""MediaWiki's markup as clean prose.

cut      comments, references, tables, files and templates that are no prose go; brackets are closed from here on
blocks   sections and lists: which lines are a paragraph
nodes    links and templates as what a reader sees, by `mwparserfromhell`
tidy     bold and italic, entities, and the gaps that cut templates leave
"""

from __future__ import annotations

import re

from tools.corpus.extract.wikitext.blocks import is_prose, paragraphs
from tools.corpus.extract.wikitext.cut import cut
from tools.corpus.extract.wikitext.names import is_disambiguation_template, is_disambiguation_title
from tools.corpus.extract.wikitext.nodes import needs_parser, parsed, unparsed
from tools.corpus.extract.wikitext.tidy import drop_quotes, tidied

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
            text = tidied(part)
            if _LETTERS.search(text) and (not listed or is_prose(text)):
                result.append(text)
    return "\n\n".join(result)

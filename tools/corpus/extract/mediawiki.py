"""Pages of a MediaWiki dump (the export format of Special:Export, version 0.3 to 0.11)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

from tools.corpus.extract.chunks import Place
from tools.corpus.extract.reading import Document, Reading
from tools.corpus.extract.records import cut_elements

_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


CleanPage = Callable[[str, str], str | None]


def load_parser() -> tuple[CleanPage, int]:
    """What cleans a page, given its text and title, and the version of it.

    Raises:
        ValueError: mwparserfromhell is not installed.
    """
    try:
        from tools.corpus.extract.wikitext import PARSER_VERSION, clean_page
    except ImportError as error:
        raise ValueError(f"MediaWiki dumps need mwparserfromhell ({error}): pip install 'tensor3d[corpus]'") from error
    return clean_page, PARSER_VERSION


def read_mediawiki(reading: Reading) -> Iterator[Document]:
    """The articles: pages of namespace 0 that are neither redirects nor disambiguations, their text without markup.

    Of a page with several revisions the last one is read.
    """
    clean_page, _ = load_parser()
    pages = cut_elements(reading.window(), b"<page>", b"</page>", reading.largest, reading.report, name="page")
    for data, place in pages:
        page = _parse(data, place, reading)
        if page is None:
            continue
        reading.counts["read"] += 1
        document = _article(page, clean_page, reading)
        if document is not None:
            yield document


def _parse(data: bytes, place: Place, reading: Reading) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        # The parser says of wrong UTF-8 only that it is no XML.
        if reading.decode(data, place) is not None:
            reading.report(place, f"the page that begins here is no well-formed XML ({error})", "Mend the file")
        return None


def _article(page: ElementTree.Element, clean_page: CleanPage, reading: Reading) -> Document | None:
    title = page.findtext("title", "").strip()
    revisions = page.findall("revision")
    text = revisions[-1].findtext("text", "") if revisions else ""
    reason = ""
    cleaned: str | None = None
    if page.findtext("ns", "0").strip() != "0":
        reason = "other_namespaces"
    elif page.find("redirect") is not None or _REDIRECT.match(text):
        reason = "redirects"
    elif revisions and revisions[-1].findtext("model", "wikitext").strip() != "wikitext":
        reason = "other_content"
    elif (cleaned := clean_page(text, title)) is None:
        reason = "disambiguations"
    if reason or cleaned is None:
        reading.counts[reason] += 1
        return None
    return Document(id=page.findtext("id", "").strip(), title=title, text=cleaned)

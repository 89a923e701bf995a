"""Files of text: plain, a book each, or as WikiExtractor writes them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Literal
from xml.etree import ElementTree

from tensor3d.files import unique_keys
from tools.corpus.extract.read_context import Document, ReadContext, keep_commonest, row_document, tidy
from tools.corpus.extract.record_splitter import RAISE, Place, Record, cut_elements, cut_lines, too_long
from tools.corpus.sentences import decode_entities, is_blank

# --- Pages of a MediaWiki dump (the export format of Special:Export, version 0.3 to 0.11) -----------------------------


def load_parser() -> ModuleType:
    """`tools.corpus.extract.wikitext`, which needs what is not installed everywhere.

    Raises:
        ValueError: mwparserfromhell is not installed.
    """
    try:
        return import_module("tools.corpus.extract.wikitext")
    except ImportError as error:
        raise ValueError(f"MediaWiki dumps need mwparserfromhell ({error}): pip install 'tensor3d[corpus]'") from error


def read_mediawiki(reading: ReadContext) -> Iterator[Document]:
    """The articles: pages of namespace 0 that are neither redirects nor disambiguations, their text without markup.

    Of a page with several revisions the last one is read.
    """
    wikitext = load_parser()
    pages = cut_elements(reading.window(), b"<page>", b"</page>", reading.largest, reading.report, name="page")
    for data, place in pages:
        page = _parse_page(data, place, reading)
        if page is None:
            continue
        reading.counts["read"] += 1
        document = _article(page, wikitext, reading)
        keep_commonest(reading.templates)
        if document is not None:
            yield document


def _parse_page(data: bytes, place: Place, reading: ReadContext) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        # The parser says of wrong UTF-8 only that it is no XML.
        if reading.decode(data, place) is not None:
            reading.report(place, f"the page that begins here is no well-formed XML ({error})", "Mend the file")
        return None


def _article(page: ElementTree.Element, wikitext: ModuleType, reading: ReadContext) -> Document | None:
    site = reading.piece.site
    title = page.findtext("title", "").strip()
    revisions = page.findall("revision")
    text = revisions[-1].findtext("text", "") if revisions else ""
    # Dumps of before 2012 (version 0.5) do not say the namespace.
    space = page.findtext("ns", "").strip() or str(wikitext.namespaces_of(site).number(title))
    reason = ""
    cleaned: str | None = None
    if space != "0":
        reason = "other_namespaces"
    elif page.find("redirect") is not None or wikitext.is_redirect(text):
        reason = "redirects"
    elif revisions and revisions[-1].findtext("model", "wikitext").strip() != "wikitext":
        reason = "other_content"
    elif (cleaned := wikitext.clean_page(text, title, site, reading.counts, reading.templates)) is None:
        reason = "disambiguations"
    if reason or cleaned is None:
        reading.counts[reason] += 1
        return None
    return Document(id=page.findtext("id", "").strip(), title=title, text=cleaned)


# --- Rows of JSON, one a line -----------------------------------------------------------------------------------------


def read_jsonl(reading: ReadContext) -> Iterator[Document]:
    """An object a line, its text under the name that --text-field says. A line with nothing in it is passed over."""
    window = reading.window()
    for line in cut_lines(window, first=not reading.piece.begin, largest=reading.largest):
        if not line.owned:
            return
        if line.data is None:
            if line.begun:
                reading.report(window.place(line.start), f"the line that begins here {line.reason}", line.remedy)
            continue
        if is_blank(line.data):
            continue
        place = window.place(line.start)
        row = _parse_row(line.data, place, reading)
        if row is not None and _is_wikiextractor(row):
            title = decode_entities(str(row.get("title", "")), reading.counts)
            row |= {"title": title, "text": _wikiextractor_text(row["text"], title.strip(), reading.counts)}
        document = row_document(row, place, reading) if row is not None else None
        if document is not None:
            yield document


def _is_wikiextractor(row: dict[str, Any]) -> bool:
    """Whether WikiExtractor has written it, under --json: with entities and a paragraph a line, as its other form."""
    return "id" in row and "curid=" in str(row.get("url")) and isinstance(row.get("text"), str)


def _wikiextractor_text(text: str, title: str, counts: Counter[str]) -> str:
    """Paragraphs, without the title that stands before them."""
    lines = [decode_entities(line, counts).strip() for line in text.split("\n")]
    return "\n\n".join(filter(None, lines[1:] if lines[0] == title else lines))


def _parse_row(data: bytes, place: Place, reading: ReadContext) -> dict[str, Any] | None:
    text = reading.decode(data, place)
    if text is None:
        return None
    try:
        row = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        reading.report(place, f"the line that begins here is no JSON ({error})", "Mend the line")
        return None
    if not isinstance(row, dict):
        reading.report(place, "the line that begins here is no JSON object", "Write {...} with the text in a field")
        return None
    return row


# --- Files of text ----------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"<doc ([^\n]*)>\s*")
_ATTRIBUTE = re.compile(r'(\w+)="(.*?)"(?=\s+\w+="|\s*$)')


def read_text(reading: ReadContext) -> Iterator[Document]:
    """Documents that end at a blank line, or with their file."""
    for data, place in _between_blank_lines(reading):
        text = reading.decode(data, place)
        if text is not None:
            text = tidy(text)
            # Of one line there are several where lines end with CR alone, as of old Macs.
            for part in [text] if b"\n" in data else text.split("\n\n"):
                reading.counts["read"] += 1
                yield Document(id="", title="", text=part)


def read_books(reading: ReadContext) -> Iterator[Document]:
    """The whole file as one document, known by its name; blank lines separate its paragraphs."""
    data = bytearray()
    place: Place | None = None
    for chunk in reading.chunks():
        if chunk.data is None:
            return  # a book with a hole is no book; the hole has been reported
        place = place or chunk.place
        data += chunk.data
        if len(data) > reading.largest:
            reading.report(place, f"the book has more than {reading.largest} bytes", "Raise --largest-document")
            return
    text = reading.decode(bytes(data), place or Place(0))
    if text is not None:
        reading.counts["read"] += 1
        yield Document(id=reading.piece.name, title="", text=tidy(text))


def read_wikiextractor(reading: ReadContext) -> Iterator[Document]:
    """What stands between <doc ...> and </doc>: the title in the first line, then a paragraph a line.

    WikiExtractor (version 3) writes "<", ">" and "&" as entities.
    """
    elements = cut_elements(reading.window(), b"<doc ", b"</doc>", reading.largest, reading.report, name="document")
    for data, place in elements:
        text = reading.decode(data, place)
        if text is None:
            continue
        header = _HEADER.match(text)
        names = dict(_ATTRIBUTE.findall(header[1])) if header else {}
        if header is None or "id" not in names:
            reading.report(place, "this is no line of WikiExtractor: <doc id=... title=...>", "Mend the file")
            continue
        reading.counts["read"] += 1
        title = decode_entities(names.get("title", ""), reading.counts).strip()
        body = _wikiextractor_text(text[header.end() : -len("</doc>")], title, reading.counts)
        yield Document(id=names["id"], title=title, text=body)


def _between_blank_lines(reading: ReadContext) -> Iterator[Record]:
    """A document belongs to the piece that owns the blank line before it."""
    lines: list[bytes] = []
    begun, size = Place(0), 0
    # "lost": in a document that belongs to the piece before, or cannot be read whole.
    state: Literal["between", "inside", "lost"] = "lost" if reading.piece.begin else "between"
    window = reading.window()
    for line in cut_lines(window, first=not reading.piece.begin, largest=reading.largest):
        blank = line.data is not None and is_blank(line.data)
        if not line.owned and state == "lost":
            return
        if line.data is None:
            if state == "inside" or (state == "between" and line.begun):
                place = begun if state == "inside" else window.place(line.start)
                reading.report(place, f"the document that begins here {line.reason}", line.remedy)
            lines, state = [], "lost"
        elif blank:
            if state == "inside":
                yield Record(b"\n".join(lines), begun)
            lines, state = [], "between"
            if not line.owned:
                return
        elif state != "lost":
            if state == "between":
                begun, size = window.place(line.start), 0
            lines.append(line.data)
            size += len(line.data) + 1
            state = "inside"
            if size > reading.largest + 1:
                reading.report(begun, f"the document that begins here {too_long(reading.largest)}", RAISE)
                lines, state = [], "lost"
    if state == "inside":
        yield Record(b"\n".join(lines), begun)

"""Files of text: plain, a book each, or as WikiExtractor writes them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Literal

from tools.corpus.extract.chunks import Place
from tools.corpus.extract.reading import Document, Reading, tidy
from tools.corpus.extract.records import RAISE, Record, cut_elements, cut_lines, too_long

_HEADER = re.compile(r"<doc ([^\n]*)>\s*")
_ATTRIBUTE = re.compile(r'(\w+)="(.*?)"(?=\s+\w+="|\s*$)')


def read_text(reading: Reading) -> Iterator[Document]:
    """Documents that end at a blank line, or with their file."""
    for data, place in _between_blank_lines(reading):
        text = reading.decode(data, place)
        if text is not None:
            reading.counts["read"] += 1
            yield Document(id="", title="", text=tidy(text))


def read_books(reading: Reading) -> Iterator[Document]:
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


def read_wikiextractor(reading: Reading) -> Iterator[Document]:
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
        title = html.unescape(names.get("title", "")).strip()
        lines = [html.unescape(line).strip() for line in text[header.end() : -len("</doc>")].split("\n")]
        body = lines[1:] if lines[0] == title else lines
        yield Document(id=names["id"], title=title, text="\n\n".join(filter(None, body)))


def _between_blank_lines(reading: Reading) -> Iterator[Record]:
    """A document belongs to the piece that owns the blank line before it."""
    lines: list[bytes] = []
    begun, size = Place(0), 0
    # "lost": in a document that belongs to the piece before, or cannot be read whole.
    state: Literal["between", "inside", "lost"] = "lost" if reading.piece.begin else "between"
    window = reading.window()
    for line in cut_lines(window, first=not reading.piece.begin, largest=reading.largest):
        blank = line.data is not None and not line.data.strip()
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

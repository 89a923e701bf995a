"""What every reader of a format has to hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.corpus.extract.bzip2 import bzip2_chunks
from tools.corpus.extract.chunks import Chunk, Place, gzip_chunks, plain_chunks
from tools.corpus.extract.formats import printable
from tools.corpus.extract.piece import Piece
from tools.corpus.extract.records import RAISE, Window, too_long
from tools.corpus.work import BadInput, Context

_UTF8 = "Convert the file to UTF-8 first"


@dataclass(frozen=True)
class Document:
    id: str
    title: str
    text: str
    """Paragraphs, separated by blank lines."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The names by which rows hold a document."""

    text: str
    title: str
    id: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A piece that is being read."""

    piece: Piece
    fields: Fields
    largest: int
    """Bytes of a document."""
    context: Context
    counts: Counter[str]
    """Of what was read, and of what was left out for which reason."""

    def report(self, place: Place | str, reason: str, remedy: str) -> None:
        """Bad input: an error, or under --skip-bad a note."""
        self.context.bad(BadInput(printable(self.piece.path), str(place), reason, remedy))

    def chunks(self) -> Iterator[Chunk]:
        """The bytes of the piece and those after it."""
        path, begin, end = self.piece.path, self.piece.begin, self.piece.end
        if self.piece.packing == "bz2":
            return bzip2_chunks(path, begin, end, self.report, self.context.progress)
        if self.piece.packing == "gz":
            return gzip_chunks(path, self.report, self.context.progress)
        return plain_chunks(path, begin, end, self.context.progress)

    def window(self) -> Window:
        return Window(self.chunks())

    def decode(self, data: bytes, place: Place) -> str | None:
        """The text of UTF-8; None where it is none, which is reported."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.report(place.after(error.start), f"this is not UTF-8 ({error.reason})", _UTF8)
            return None


def read_damaged(reading: Reading) -> Iterator[Document]:
    """A packed file whose beginning is damaged, and nothing else tells its format: no document."""
    reason = f"the {reading.piece.packing} data that begins here is damaged, and so the format cannot be told"
    reading.report(Place(0), reason, "Fetch or pack the file again")
    yield from ()


def tidy(text: str) -> str:
    """Text with single blank lines between its paragraphs, and no spaces at the ends of lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    text = "\n".join(map(str.rstrip, text.split("\n")))
    return (re.sub(r"\n{3,}", "\n\n", text) if "\n\n\n" in text else text).strip()


def row_document(row: dict[str, Any], place: Place | str, reading: Reading) -> Document | None:
    """The document in a row; None where there is none, which is reported. A text that is null is an empty one."""
    fields = reading.fields
    if fields.text not in row:
        found = ", ".join(map(repr, list(row)[:10])) or "none"
        reading.report(place, f"the row has no field {fields.text!r} but {found}", "Name the field by --text-field")
        return None
    text = "" if row[fields.text] is None else row[fields.text]
    if not isinstance(text, str):
        kind = type(text).__name__
        reading.report(place, f"the field {fields.text!r} is no text ({kind})", "Name a field of text by --text-field")
        return None
    document = Document(id=_said(row.get(fields.id)), title=_said(row.get(fields.title)), text=tidy(text))
    try:
        size = len(f"{document.id}{document.title}{document.text}".encode())
    except UnicodeEncodeError:
        reading.report(place, "the row has half of a surrogate pair, which is no character", "Mend the row")
        return None
    if size > reading.largest:
        reading.report(place, f"the row {too_long(reading.largest)}", RAISE)
        return None
    reading.counts["read"] += 1
    return document


def _said(value: Any) -> str:
    return "" if value is None else str(value)

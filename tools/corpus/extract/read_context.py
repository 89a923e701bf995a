"""What every reader of a format has to hand."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from xml.etree import ElementTree

from tools.corpus.extract.bzip2 import bzip2_chunks
from tools.corpus.extract.record_splitter import RAISE, Chunk, Place, ReadBuffer, gzip_chunks, plain_chunks, too_long
from tools.corpus.pipeline import BadInput, Context
from tools.corpus.sentences import encoding_of_file, likely_encoding

# --- What kind of file an input is ------------------------------------------------------------------------------------

Format = Literal["mediawiki", "wikiextractor", "text", "jsonl", "parquet", "books", "damaged", "encoded"]
Packing = Literal["", "bz2", "gz"]
FORMATS = "mediawiki, wikiextractor, text, jsonl, parquet or books"

_HEAD = 1 << 16
_SEARCHED = 1 << 20
_PACKED_HEAD = 1 << 23
"""Bytes of a .bz2 in which a sound block is looked for."""
_READ: dict[bytes, Packing] = {b"BZh": "bz2", b"\x1f\x8b": "gz"}
_REFUSED = {
    b"\xfd7zXZ\0": ("xz", "xz -d"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"),
    b"PK\x03\x04": ("zip", "unzip"),
}
_NAMES: tuple[tuple[str, Format], ...] = (
    (r"\.xml(\W|$)", "mediawiki"),
    (r"\.(jsonl|ndjson|json)(\W|$)", "jsonl"),
    (r"\.txt(\W|$)", "text"),
)
_BEGINNINGS = tuple(map(re.compile, (rb"\A<doc [^>\n]*id=", rb"\A(<page>|[\s\S]{0,1000}<mediawiki)", rb"\A\{")))
"""What a file of WikiExtractor, MediaWiki or JSON lines begins with."""
_INSIDE = tuple(map(re.compile, (rb"(?m)^<doc [^>\n]*id=", rb"(?m)^[ \t]*</?page>[ \t\r]*$", rb'(?m)^\{[ \t]*"')))
"""What lines of them hold further on."""


def printable(path: Path) -> str:
    """The name of a file; bytes of it that are no UTF-8 as \\xNN, for names of files may be any bytes."""
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def detect_compression(path: Path) -> Packing:
    """How a file is packed: by its suffix, and without one by its first bytes.

    Raises:
        ValueError: packed in a way that is not read here.
    """
    if path.suffix in (".bz2", ".gz"):
        return cast(Packing, path.suffix[1:])
    with path.open("rb") as file:
        head = file.read(8)
    for magic, (kind, command) in _REFUSED.items():
        if head.startswith(magic):
            raise ValueError(
                f"{printable(path)} is a {kind} file, which is not read here. Unpack it first (`{command} FILE`)."
            )
    return next((packing for magic, packing in _READ.items() if head.startswith(magic)), "")


def detect_encoding(path: Path, packing: Packing) -> str:
    """Why a file is not to be read as UTF-8, where its beginning tells: tags and lines are looked for in bytes."""
    head, sound = _head(path, packing)
    return "" if path.suffix == ".parquet" or head.startswith(b"PAR1") or not sound else encoding_of_file(head)


def detect_format(path: Path, packing: Packing) -> Format:
    """The format of a file: by what it begins with, and where that does not tell, by its name.

    Where the beginning of a packed file is damaged, what comes after the damage is looked at.

    Returns:
        The format; "damaged" where damage is the reason that it cannot be told.

    Raises:
        ValueError: neither tells.
    """
    head, sound = _head(path, packing)
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip() if sound else head
    name = path.name.lower()
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return "parquet"
    wikiextractor, page, row = _BEGINNINGS if sound else _INSIDE
    if wikiextractor.search(head):
        return "wikiextractor"
    if not name.endswith((".txt", ".txt.gz", ".txt.bz2")):
        if page.search(head):
            return "mediawiki"
        if row.search(head):
            return "jsonl"
    for pattern, format_ in _NAMES:
        if re.search(pattern, name):
            return format_
    if not path.stat().st_size:
        return "text"  # nothing to read, in any format
    if not sound:
        return "damaged"
    raise ValueError(f"the format of {printable(path)} cannot be told. Say it by --format: {FORMATS}.")


def _head(path: Path, packing: Packing) -> tuple[bytes, bool]:
    """The first bytes of what is packed that can be unpacked, and whether nothing before them is damaged."""
    if not packing:
        with path.open("rb") as file:
            return file.read(_HEAD), True
    sound = True
    for chunk in _chunks(path, packing):
        if chunk.data and chunk.owned:
            return chunk.data[: _HEAD if sound else _SEARCHED], sound
        sound &= chunk.data is not None
        if not chunk.owned:
            break
    return b"", sound


def _chunks(path: Path, packing: Packing) -> Iterator[Chunk]:
    """Of a file; whoever reads it reports the damage."""
    if not packing:
        return plain_chunks(path, 0, path.stat().st_size, lambda size: None)
    if packing == "gz":
        return gzip_chunks(path, lambda place, reason, remedy: None, lambda size: None)
    return bzip2_chunks(path, 0, _PACKED_HEAD, lambda place, reason, remedy: None, lambda size: None)


# --- What a dump says of its wiki -------------------------------------------------------------------------------------

_LANGUAGE = re.compile(r"<mediawiki\b[^>]*\sxml:lang=[\"']([A-Za-z0-9-]{1,35})[\"']")
_SITEINFO = re.compile(r"<siteinfo>.*?</siteinfo>", re.DOTALL)
_HOST = re.compile(r"(?:https?:)?//([^/:]+)")
_DATABASE = re.compile(r"([a-z_]{2,}?)(wiki|wiktionary|wikiquote|wikibooks|wikisource|wikinews|wikiversity|wikivoyage)")
_SHARED = frozenset({"commons", "meta", "species", "wikidata", "mediawiki", "incubator", "foundation", "sources"})
"""Wikis in no language of their own."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is known of the wiki that a dump is of. By default nothing is."""

    language: str = ""
    """Code of its language, or of a variant of that ("zh-tw"); "" where nobody says it."""
    namespaces: tuple[tuple[int, str], ...] = ()
    """Numbers and names, several of one number where there are aliases. Empty where the dump has no list of them."""
    wikipedia: bool = True
    """False where the dump says that it is of another kind of wiki, whose templates have other meanings."""


def read_site(path: Path, packing: Packing) -> Site:
    """What a dump says of its wiki before its first page, in whatever pieces it is read later."""
    head = bytearray()
    for chunk in _chunks(path, packing):
        if chunk.data is None:
            break  # what is damaged is reported by whoever reads the piece
        head += chunk.data
        if b"</siteinfo>" in head or b"<page>" in head or len(head) > _SEARCHED:
            break
    return parse_site(head.partition(b"<page>")[0].decode(errors="replace"))


def parse_site(head: str) -> Site:
    """The same of the text before the first page."""
    language = found[1] if (found := _LANGUAGE.search(head)) else ""
    try:
        info = ElementTree.fromstring(found[0] if (found := _SITEINFO.search(head)) else "<siteinfo/>")
    except ElementTree.ParseError:
        info = ElementTree.Element("siteinfo")
    host = found[1].lower() if (found := _HOST.match(info.findtext("base", "").strip())) else ""
    database = _DATABASE.fullmatch(info.findtext("dbname", "").strip())
    if not language and host.endswith((".wikipedia.org", ".wiktionary.org")):
        language = host.partition(".")[0]
    if not language and database is not None and database[1] not in _SHARED:
        language = database[1].replace("_", "-")
    wikipedia = database is None or (database[2] == "wiki" and database[1] not in _SHARED)
    names = [(node.get("key", node.get("id", "")), node.text or "") for node in info.iter()]
    return Site(
        language="en" if language == "simple" else language.lower(),
        namespaces=tuple(
            (int(number), name.strip()) for number, name in names if re.fullmatch(r"-?\d{1,6}", number) and name.strip()
        ),
        wikipedia=wikipedia and (not host or host.endswith("wikipedia.org")),
    )


# --- What one worker reads of one file --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """What one worker reads of one file."""

    path: Path
    name: str
    """Of the file, below the input that it was found in."""
    format: Format
    packing: Packing
    begin: int
    end: int
    """Bytes of the file; row groups of a Parquet file. The piece owns what begins between them."""
    size: int
    """Bytes of the file that it takes."""
    site: Site = Site()
    """What the file says of its wiki, also where the piece begins far behind that."""
    encoding: str = ""
    """Of an encoded file: why it is not UTF-8."""


# --- What every reader of a format has to hand ------------------------------------------------------------------------

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
class ReadContext:
    """A piece that is being read."""

    piece: FileRange
    fields: Fields
    largest: int
    """Bytes of a document."""
    context: Context
    counts: Counter[str]
    """Of what was read, and of what was left out for which reason."""
    templates: Counter[str] = field(default_factory=Counter)
    """Of the templates that were left out, by name. `keep_commonest` bounds it."""

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

    def window(self) -> ReadBuffer:
        return ReadBuffer(self.chunks())

    def decode(self, data: bytes, place: Place) -> str | None:
        """The text of UTF-8; None where it is none, which is reported."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            # Of a corpus that is all so, the guesses would take longer than the rest.
            likely = "" if self.context.skip_bad else likely_encoding(data)
            seems = f" but, as it seems, {likely}" if likely else ""
            self.report(place.after(error.start), f"this is not UTF-8 ({error.reason}){seems}", _UTF8)
            return None
        if "\0" in text:
            reason = f"there are NUL characters, as of {likely_encoding(data)}"
            self.report(place.after(data.index(0)), reason, _UTF8)
            return None
        return text


MOST_NAMES = 1 << 14
"""Names of templates that are counted apart, at least; as many again before the rarest are forgotten."""


def keep_commonest(names: Counter[str]) -> None:
    """Forgets the rarest names where there are too many: memory does not grow with the corpus."""
    if len(names) > 2 * MOST_NAMES:
        kept = sorted(names.items(), key=lambda item: (-item[1], item[0]))[:MOST_NAMES]
        names.clear()
        names.update(dict(kept))


def skip_damaged(reading: ReadContext) -> Iterator[Document]:
    """A packed file whose beginning is damaged, and nothing else tells its format: no document."""
    reason = f"the {reading.piece.packing} data that begins here is damaged, and so the format cannot be told"
    reading.report(Place(0), reason, "Fetch or pack the file again")
    yield from ()


def skip_encoded(reading: ReadContext) -> Iterator[Document]:
    """A file of another encoding than UTF-8: no document."""
    reading.report(Place(0), reading.piece.encoding, f"{_UTF8} (iconv -f ENCODING -t UTF-8 FILE)")
    yield from ()


def tidy(text: str) -> str:
    """Text with single blank lines between its paragraphs, and no spaces at the ends of lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    text = "\n".join(map(str.rstrip, text.split("\n")))
    return (re.sub(r"\n{3,}", "\n\n", text) if "\n\n\n" in text else text).strip()


def row_document(row: dict[str, Any], place: Place | str, reading: ReadContext) -> Document | None:
    """The document in a row; None where there is none, which is reported. A text that is null is an empty one."""
    fields = reading.fields
    if (found_text := reach(row, fields.text)) is MISSING:
        found = ", ".join(itertools.islice(_paths(row), 10)) or "none"
        reading.report(place, f"the row has no field {fields.text!r} but {found}", "Name the field by --text-field")
        return None
    text = "" if found_text is None else found_text
    if not isinstance(text, str):
        kind = type(text).__name__
        reading.report(place, f"the field {fields.text!r} is no text ({kind})", "Name a field of text by --text-field")
        return None
    if "\0" in text:
        reading.report(place, "the row has a NUL character, which is no text", "Mend the row")
        return None
    number, title = (reach(row, name) for name in (fields.id, fields.title))
    document = Document(id=_said(number), title=_said(title), text=tidy(text))
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
    return "" if value is None or value is MISSING else str(value)


MISSING = object()


def reach(row: dict[str, Any], name: str) -> Any:
    """The value of a field, or of one inside of others whose names are joined by dots; None where one of those is null;
    MISSING where there is none."""
    if name in row:
        return row[name]
    for dot in (place for place, character in enumerate(name) if character == "."):
        inner = row.get(name[:dot], MISSING)  # names may have dots of their own
        if inner is None:
            return None
        if isinstance(inner, dict) and (found := reach(inner, name[dot + 1 :])) is not MISSING:
            return found
    return MISSING


def _paths(row: dict[str, Any], above: str = "") -> Iterator[str]:
    """What could be named: the fields of a row, and those inside of others; what holds no text with its type."""
    for name, value in row.items():
        if isinstance(value, dict) and above.count(".") < 3:
            yield from _paths(value, f"{above}{name}.")
        else:
            yield repr(f"{above}{name}") + (" (a list)" if isinstance(value, list) else "")

"""What kind of file an input is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

from tools.corpus.extract.bzip2 import bzip2_chunks
from tools.corpus.extract.chunks import Chunk, gzip_chunks

Format = Literal["mediawiki", "wikiextractor", "text", "jsonl", "parquet", "books", "damaged"]
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


def tell_packing(path: Path) -> Packing:
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


def tell_format(path: Path, packing: Packing) -> Format:
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
    """Of a packed file; whoever reads it reports the damage."""
    if packing == "gz":
        return gzip_chunks(path, lambda place, reason, remedy: None, lambda size: None)
    return bzip2_chunks(path, 0, _PACKED_HEAD, lambda place, reason, remedy: None, lambda size: None)

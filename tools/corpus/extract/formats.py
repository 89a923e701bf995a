"""What kind of file an input is."""

from __future__ import annotations

import bz2
import re
import zlib
from pathlib import Path
from typing import Literal, cast

Format = Literal["mediawiki", "wikiextractor", "text", "jsonl", "parquet", "books"]
Packing = Literal["", "bz2", "gz"]
FORMATS = "mediawiki, wikiextractor, text, jsonl, parquet or books"

_HEAD = 1 << 16
_PACKED_HEAD = 1 << 21
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
_WIKIEXTRACTOR = re.compile(rb"<doc [^>\n]*id=")


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
            raise ValueError(f"{path} is a {kind} file, which is not read here. Unpack it first (`{command} FILE`).")
    return next((packing for magic, packing in _READ.items() if head.startswith(magic)), "")


def tell_format(path: Path, packing: Packing) -> Format:
    """The format of a file: by what it begins with, and where that does not tell, by its name.

    Raises:
        ValueError: neither tells.
    """
    head = _head(path, packing).removeprefix(b"\xef\xbb\xbf").lstrip()
    name = path.name.lower()
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return "parquet"
    if _WIKIEXTRACTOR.match(head):
        return "wikiextractor"
    if not name.endswith((".txt", ".txt.gz", ".txt.bz2")):
        if head.startswith(b"<page>") or b"<mediawiki" in head[:1024]:
            return "mediawiki"
        if head.startswith(b"{"):
            return "jsonl"
    for pattern, format_ in _NAMES:
        if re.search(pattern, name):
            return format_
    if not path.stat().st_size:
        return "text"  # nothing to read, in any format
    raise ValueError(f"the format of {path} cannot be told. Say it by --format: {FORMATS}.")


def _head(path: Path, packing: Packing) -> bytes:
    """The first bytes of what is packed; less or nothing where they are damaged."""
    with path.open("rb") as file:
        if not packing:
            return file.read(_HEAD)
        packed = file.read(_PACKED_HEAD)
    try:
        if packing == "bz2":
            return bz2.BZ2Decompressor().decompress(packed, _HEAD)
        return zlib.decompressobj(wbits=31).decompress(packed, _HEAD)
    except (OSError, zlib.error):
        return b""

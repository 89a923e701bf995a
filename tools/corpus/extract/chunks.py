"""The bytes of one piece of an input file, unpacked, a chunk at a time.

A piece owns a stretch of the file. What is read past its end is there to finish the last record and is not owned.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
_AFTER = 1 << 16
_GZIP = 31
_REMEDY = "Fetch or pack the file again"


@dataclass(frozen=True)
class Place:
    """Where a byte lies: `byte` of the file, or `unpacked` bytes into what is unpacked from there on."""

    byte: int
    unpacked: int | None = None

    def after(self, count: int) -> Place:
        """The place `count` bytes further on."""
        if self.unpacked is None:
            return Place(self.byte + count)
        return Place(self.byte, self.unpacked + count)

    def __str__(self) -> str:
        if self.unpacked is None:
            return f"byte {self.byte}"
        return f"byte {self.byte}, {self.unpacked} bytes into what is unpacked from there"


@dataclass(frozen=True)
class Chunk:
    """Some bytes of the stream. `data` is None for a hole: what was there is damaged and has been reported."""

    data: bytes | None
    place: Place
    owned: bool


Report = Callable[[Place, str, str], None]
"""Takes a place, what is wrong there and what to do. It raises, or notes what is left out."""


def plain_chunks(path: Path, begin: int, end: int, progress: Callable[[int], None]) -> Iterator[Chunk]:
    """The bytes of a file from `begin` on; those before `end` are owned."""
    with path.open("rb") as file:
        file.seek(begin)
        at = begin
        while data := file.read(min(CHUNK, end - at) if at < end else _AFTER):
            owned = at < end
            if owned:
                progress(len(data))
            yield Chunk(data, Place(at), owned)
            at += len(data)


def gzip_chunks(path: Path, report: Report, progress: Callable[[int], None]) -> Iterator[Chunk]:
    """A whole .gz file of one member or several, all of it owned. After damage nothing more can be read of it."""
    with path.open("rb") as file:
        at = 0
        packed = b""
        while packed or (packed := _read(file, progress)):
            # Zeros may fill the last block of a tape.
            member = packed.lstrip(b"\0") if at else packed
            at += len(packed) - len(member)
            packed = member
            unpacker = zlib.decompressobj(wbits=_GZIP)
            while packed and not unpacker.eof:
                try:
                    data = unpacker.decompress(packed, CHUNK)
                except zlib.error as error:
                    report(Place(at), f"the gzip data is damaged: {error}", _REMEDY)
                    yield Chunk(None, Place(at), True)
                    return
                if data:
                    yield Chunk(data, Place(at, 0), True)
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
                at += len(packed) - len(rest)
                packed = rest
                if not unpacker.eof and not packed and not (packed := _read(file, progress)):
                    report(Place(at), "the gzip data is cut off: the file ends too early", _REMEDY)
                    yield Chunk(None, Place(at), True)
                    return
        if not at:
            report(Place(0), "no gzip data is here: the file is empty", _REMEDY)


def _read(file: BinaryIO, progress: Callable[[int], None]) -> bytes:
    data = file.read(CHUNK)
    progress(len(data))
    return data

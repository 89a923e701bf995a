"""The blocks of a .bz2 file, each unpacked alone, so that a file of one stream can be read from anywhere.

A block begins with 48 bits that say so, at any bit, then comes the CRC of its text (32 bits). Put between the head of a
stream and the end of one, whose CRC is that of its only block, it is a file that `bz2` unpacks and checks. (The format
has no document of its own; these figures are in bzip2's compress.c.)
"""

from __future__ import annotations

import bz2
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tools.corpus.extract.record_splitter import Chunk, Place, Report

BLOCK = 0x314159265359
END = 0x177245385090
MAGIC_BITS = 48
CRC_BITS = 32
LONGEST = 8 * 1_000_000
"""Bits: more than a block of 900,000 bytes can take, which is a hundredth and 600 bytes above its size."""
TRIES = 3
"""Marks after a block that may be its end. The nearest one is, unless the same 48 bits occur by chance (1 in 2**48)."""
WINDOW = 1 << 20
_REMEDY = "Fetch or pack the file again"


class Mark(NamedTuple):
    """Where 48 bits say that a block begins or a stream ends."""

    bit: int
    begins: bool


class Needle(NamedTuple):
    """What to look for where a magic is shifted by some bits: the whole bytes that it fills."""

    data: bytes
    shift: int
    """Bits of a first byte before the magic. It takes the rest of it, five whole bytes and `shift` bits of a last."""
    magic: int
    begins: bool


def _needles() -> Iterator[Needle]:
    for magic, begins in ((BLOCK, True), (END, False)):
        yield Needle(magic.to_bytes(6, "big"), 0, magic, begins)
        for shift in range(1, 8):
            yield Needle(((magic >> shift) & ((1 << 40) - 1)).to_bytes(5, "big"), shift, magic, begins)


_NEEDLES = tuple(_needles())


def find_marks(data: bytes, first_byte: int = 0) -> list[Mark]:
    """The marks that lie whole in `data`, in order; bits are counted from `first_byte` bytes before it."""
    found = []
    for needle, shift, magic, begins in _NEEDLES:
        at = data.find(needle)
        while at >= 0:
            start = at - 1 if shift else at
            if not shift:
                found.append(Mark(8 * (first_byte + start), begins))
            elif start >= 0 and start + 7 <= len(data):
                bits = int.from_bytes(data[start : start + 7], "big")
                if (bits >> (8 - shift)) & ((1 << MAGIC_BITS) - 1) == magic:
                    found.append(Mark(8 * (first_byte + start) + shift, begins))
            at = data.find(needle, at + 1)
    return sorted(found)


def unpack_block(file: BinaryIO, start: int, stop: int) -> bytes | None:
    """The text of the block between two bits of the file; None where that is no whole, sound block."""
    first, last = start // 8, -(-stop // 8)
    file.seek(first)
    packed = file.read(last - first)
    bits = stop - start
    if len(packed) < last - first or bits <= MAGIC_BITS + CRC_BITS:
        return None
    block = (int.from_bytes(packed, "big") >> (8 * last - stop)) & ((1 << bits) - 1)
    crc = (block >> (bits - MAGIC_BITS - CRC_BITS)) & ((1 << CRC_BITS) - 1)
    stream = ((block << MAGIC_BITS) | END) << CRC_BITS | crc
    length = bits + MAGIC_BITS + CRC_BITS
    stream <<= -length % 8
    unpacker = bz2.BZ2Decompressor()
    try:
        text = unpacker.decompress(b"BZh9" + stream.to_bytes(-(-length // 8), "big"))
    except OSError:
        return None
    return text if unpacker.eof and not unpacker.unused_data else None


def bzip2_chunks(
    path: Path, begin: int, end: int, report: Report, progress: Callable[[int], None], window: int = WINDOW
) -> Iterator[Chunk]:
    """The blocks that begin at byte `begin` or after it; those that begin before `end` are owned.

    Args:
        window: bytes that are searched for blocks at a time.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if begin == 0 and not (size and _streams_begin(file, 0, size)):
            report(Place(0), "no bzip2 stream begins here", _REMEDY)
            yield Chunk(None, Place(0), True)
        marks = _Marks(file, begin, size, window)
        seen = begin
        while (mark := marks.next_block()) is not None:
            place, owned = Place(mark.bit // 8, 0), mark.bit < 8 * end
            text, stop = marks.unpack(mark)
            if text is None and marks.is_chance(mark):
                continue
            if text is None and owned:
                report(Place(place.byte), "the bzip2 block that begins here is damaged or cut off", _REMEDY)
            yield Chunk(text, place, owned)
            if stop is not None and not stop.begins and not _streams_begin(file, _after_stream(stop), size):
                after = Place(min(_after_stream(stop), size))
                if owned:
                    report(after, "the bzip2 stream ends here, and no other begins", _REMEDY)
                yield Chunk(None, after, owned)
            if owned:
                progress(place.byte - seen)
                seen = place.byte


class _Marks:
    """The marks of a file from a byte on, found as they are needed."""

    def __init__(self, file: BinaryIO, begin: int, size: int, window: int) -> None:
        self._file, self._size, self._window = file, size, window
        self._next = begin
        self._found: list[Mark] = []

    def next_block(self) -> Mark | None:
        """Takes the next mark of a block; None at the end of the file."""
        while self._found or self._search():
            # A stretch may hold none.
            if self._found and (mark := self._found.pop(0)).begins:
                return mark
        return None

    def unpack(self, mark: Mark) -> tuple[bytes | None, Mark | None]:
        """The text of the block that begins at a mark, and the mark that ends it. Marks inside it are dropped."""
        for number, stop in enumerate(self._after(mark.bit)):
            text = unpack_block(self._file, mark.bit, stop.bit)
            if text is not None:
                del self._found[:number]
                return text, stop
        return None, None

    def is_chance(self, mark: Mark) -> bool:
        """Whether the mark lies inside a sound block that begins before it."""
        first = max(0, mark.bit - LONGEST) // 8
        self._file.seek(first)
        before = find_marks(self._file.read(mark.bit // 8 + 7 - first), first)
        before = [other for other in before[: bisect_left(before, mark)] if other.begins]
        return any(
            unpack_block(self._file, other.bit, stop.bit) is not None
            for other in before[-TRIES:]
            for stop in self._after(mark.bit)
        )

    def _after(self, bit: int) -> Iterator[Mark]:
        """Up to TRIES marks that come next and are no further from `bit` than a block is long."""
        for number in range(TRIES):
            while len(self._found) <= number and 8 * self._next <= bit + LONGEST and self._search():
                pass
            if len(self._found) <= number or self._found[number].bit > bit + LONGEST:
                return
            yield self._found[number]

    def _search(self) -> bool:
        """Looks through the next stretch of the file; False at its end."""
        if self._next >= self._size:
            return False
        self._file.seek(self._next)
        data = self._file.read(self._window + 6)  # a mark that begins in the last byte of the window takes six more
        stop = 8 * (self._next + self._window)
        self._found += [mark for mark in find_marks(data, self._next) if mark.bit < stop]
        self._next += self._window
        return True


def _after_stream(end: Mark) -> int:
    """The byte after a stream whose end begins at a mark: the CRC of the stream follows, and bits up to a byte."""
    return -(-(end.bit + MAGIC_BITS + CRC_BITS) // 8)


def _streams_begin(file: BinaryIO, byte: int, size: int) -> bool:
    """Whether the file ends at this byte, or goes on with a stream; streams of nothing may come first."""
    while byte < size:
        file.seek(byte)
        head = file.read(10)
        if head[:3] != b"BZh" or head[3:4] not in (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9"):
            return False
        magic = int.from_bytes(head[4:], "big")
        if magic == BLOCK:
            return True
        if magic != END:
            return False
        byte += 14
    return byte == size

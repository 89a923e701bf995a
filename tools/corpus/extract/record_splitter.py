"""Records out of a stream of chunks, by whoever owns their beginning.

Every record belongs to one piece of its file: that which owns the first byte of the mark before it, though the mark
itself may reach into the next piece. So pieces are read with no word to one another, and no record is lost or doubled.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

# --- The bytes of one piece of an input file, unpacked, a chunk at a time ---------------------------------------------
#
# A piece owns a stretch of the file. What is read past its end is there to finish the last record and is not owned.

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


# --- Records out of a stream of chunks --------------------------------------------------------------------------------

RAISE = "Raise --largest-document, or mend the file"
AGAIN = "Fetch or make the file again"


def too_long(largest: int) -> str:
    return f"has more than {largest} bytes"


class Record(NamedTuple):
    data: bytes
    place: Place


class Line(NamedTuple):
    """A line without its end. `data` is None where one is lost: it is too long, or a hole has cut it."""

    data: bytes | None
    start: int
    """In the window; good for `ReadBuffer.place` until the next line is taken."""
    owned: bool
    begun: bool = True
    """Of a lost one: whether something of it was there before the hole."""
    reason: str = ""
    """Of a lost one: what ails it, with no subject; `remedy` says what to do."""
    remedy: str = ""


class ReadBuffer:
    """The stretch of a stream that is in memory."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self.data = bytearray()
        self.owned = 0
        """So many of its first bytes are owned. Negative: the owned bytes ended before the window."""
        self.hole: Place | None = None
        """Where the hole is that follows the window. Nothing more comes before it is passed."""
        self.past = False
        """Whether a chunk has come that is not owned."""
        self._chunks = chunks
        self._starts: list[int] = []
        self._places: list[Place] = []

    def more(self) -> bool:
        """Takes in the next chunk. False at a hole and at the end of the stream, which `hole` tells apart."""
        if self.hole is not None:
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self.past |= not chunk.owned
        if chunk.data is None:
            self.hole = chunk.place
            return False
        self._starts.append(len(self.data))
        self._places.append(chunk.place)
        self.data += chunk.data
        if chunk.owned:
            self.owned = len(self.data)
        return True

    def drop(self, count: int) -> None:
        """Forgets the first bytes."""
        if not count:
            return
        del self.data[:count]
        self.owned -= count
        self._starts = [start - count for start in self._starts]
        unneeded = max(0, bisect_right(self._starts, 0) - 1)
        del self._starts[:unneeded], self._places[:unneeded]

    def pass_hole(self) -> None:
        """Forgets the window, so that what lies before a hole is never joined to what lies after it."""
        self.drop(len(self.data))
        self.hole = None

    def place(self, index: int) -> Place:
        """Where a byte of the window lies in the file."""
        number = bisect_right(self._starts, index) - 1
        return self._places[number].after(index - self._starts[number])


def cut_elements(
    window: ReadBuffer, begin: bytes, end: bytes, largest: int, report: Report, *, name: str
) -> Iterator[Record]:
    """What stands from a `begin` to the next `end`, both included.

    Args:
        begin, end: tags that occur nowhere else.
        largest: bytes; a longer one is reported and left out.
        report: hears of those that are too long, have no end or are cut by a hole.
        name: what to call one.
    """
    at = 0
    while (start := _find(window, begin, at)) is not None:
        place = window.place(start)
        start, length, ended = _measure(window, start, begin, end, largest)
        at = start + length
        if ended and length <= largest:
            yield Record(bytes(window.data[start:at]), place)
            continue
        reason, remedy = f"has no {end.decode()}", "Mend the file"
        if length > largest:
            reason, remedy = f"{too_long(largest)}, or no {end.decode()}", RAISE
            # The next one's first bytes may have come already.
            at = at if ended else max(start + len(begin), at - len(begin) + 1)
        elif at == len(window.data):
            reason, remedy = f"is cut by the damage at {window.hole}" if window.hole else reason, AGAIN
        report(place, f"the {name} that begins here {reason}", remedy)


def _find(window: ReadBuffer, begin: bytes, at: int) -> int | None:
    """Where the next owned `begin` starts; what lies before it may be dropped. None: there is no other."""
    while True:
        start = window.data.find(begin, at)
        if start >= 0:
            return start if start < window.owned else None
        window.drop(max(at, len(window.data) - len(begin) + 1))
        at = 0
        if window.past and window.owned <= 0:
            return None
        if not window.more():
            if window.hole is None:
                return None
            window.pass_hole()


def _measure(window: ReadBuffer, start: int, begin: bytes, end: bytes, largest: int) -> tuple[int, int, bool]:
    """The start of the element, which moves when chunks come in; its length up to what stops it; whether that is `end`.

    What stops it otherwise: another `begin`, the end of what is there up to a hole or the end of the file, or more
    bytes than `largest`. `end` is never looked for behind the next `begin`, or a file without ends would take for ever.
    """
    overlap = max(len(begin), len(end)) - 1
    searched = start + len(begin)
    while True:
        inner = window.data.find(begin, searched)
        stop = window.data.find(end, searched, inner if inner >= 0 else len(window.data))
        if stop >= 0:
            return start, stop + len(end) - start, True
        if inner >= 0 or len(window.data) - start > largest:
            return start, (inner if inner >= 0 else len(window.data)) - start, False
        window.drop(start)
        start, searched = 0, max(len(begin), len(window.data) - overlap)
        if not window.more():
            return start, len(window.data), False


def cut_lines(window: ReadBuffer, *, first: bool, largest: int) -> Iterator[Line]:
    """Lines, those after the owned ones too, for as long as somebody asks.

    Args:
        first: whether the stream begins with a line. Otherwise that line belongs to the piece before.
        largest: bytes; a longer one is lost.
    """
    start = 0 if first else _after_newline(window, 0)
    searched = start
    while start is not None:
        stop = window.data.find(b"\n", searched)
        length = (stop if stop >= 0 else len(window.data)) - start
        owned = start <= window.owned
        if length > largest:
            yield Line(None, start, owned, reason=too_long(largest), remedy=RAISE)
            start = searched = _after_newline(window, start)
        elif stop >= 0:
            yield Line(bytes(window.data[start:stop]), start, owned)
            start = searched = stop + 1
        else:
            window.drop(start)
            start, searched = 0, len(window.data)
            if window.more():
                continue
            if window.hole is None:
                if window.data:
                    yield Line(bytes(window.data), 0, owned)
                return
            reason = f"is cut by the damage at {window.hole}"
            yield Line(None, 0, owned, begun=bool(window.data), reason=reason, remedy=AGAIN)
            window.pass_hole()
            start = searched = _after_newline(window, 0)


def _after_newline(window: ReadBuffer, at: int) -> int | None:
    """The start of the next line; None at the end of the stream."""
    while (newline := window.data.find(b"\n", at)) < 0:
        window.drop(len(window.data))
        at = 0
        while not window.more():
            if window.hole is None:
                return None
            window.pass_hole()
    return newline + 1

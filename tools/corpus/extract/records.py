"""Records out of a stream of chunks, by whoever owns their beginning.

Every record belongs to one piece of its file: that which owns the first byte of the mark before it, though the mark
itself may reach into the next piece. So pieces are read with no word to one another, and no record is lost or doubled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from tools.corpus.extract.chunks import Chunk, Place, Report

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
    """In the window; good for `Window.place` until the next line is taken."""
    owned: bool
    begun: bool = True
    """Of a lost one: whether something of it was there before the hole."""
    reason: str = ""
    """Of a lost one: what ails it, with no subject; `remedy` says what to do."""
    remedy: str = ""


class Window:
    """The stretch of a stream that is in memory."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self.data = bytearray()
        self.owned = 0
        """So many of its first bytes are owned. Negative: the owned bytes ended before the window."""
        self.hole: Place | None = None
        """Where the hole is that `more` has just come upon."""
        self.past = False
        """Whether a chunk has come that is not owned."""
        self._chunks = chunks
        self._starts: list[int] = []
        self._places: list[Place] = []

    def more(self) -> bool:
        """Takes in the next chunk. False at a hole and at the end of the stream, which `hole` tells apart."""
        self.hole = None
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

    def place(self, index: int) -> Place:
        """Where a byte of the window lies in the file."""
        number = bisect_right(self._starts, index) - 1
        return self._places[number].after(index - self._starts[number])


def cut_elements(
    window: Window, begin: bytes, end: bytes, largest: int, report: Report, *, name: str
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
        start, length = _measure(window, start, end, largest)
        inner = window.data.find(begin, start + len(begin), start + (length or len(window.data)))
        if inner >= 0:
            report(place, f"the {name} that begins here has no {end.decode()}", "Mend the file")
            at = inner
        elif length is None:
            reason = f"is cut by the damage at {window.hole}" if window.hole else f"has no {end.decode()}"
            report(place, f"the {name} that begins here {reason}", AGAIN)
            window.drop(len(window.data))
            at = 0
        elif length > largest:
            report(place, f"the {name} that begins here {too_long(largest)}, or no {end.decode()}", RAISE)
            at = start + length
        else:
            yield Record(bytes(window.data[start : start + length]), place)
            at = start + length


def _find(window: Window, begin: bytes, at: int) -> int | None:
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
            window.drop(len(window.data))


def _measure(window: Window, start: int, end: bytes, largest: int) -> tuple[int, int | None]:
    """The start of the element, which moves when chunks come in, and its length; or, where that is above `largest`, how
    much of it has come. None: a hole or the end of the file comes first."""
    searched = start
    while (stop := window.data.find(end, searched)) < 0:
        if len(window.data) - start > largest:
            return start, len(window.data) - start
        window.drop(start)
        start, searched = 0, max(0, len(window.data) - len(end) + 1)
        if not window.more():
            return start, None
    return start, stop + len(end) - start


def cut_lines(window: Window, *, first: bool, largest: int) -> Iterator[Line]:
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
            window.drop(len(window.data))
            start = searched = _after_newline(window, 0)


def _after_newline(window: Window, at: int) -> int | None:
    """The start of the next line; None at the end of the stream."""
    while (newline := window.data.find(b"\n", at)) < 0:
        window.drop(len(window.data))
        at = 0
        while not window.more():
            if window.hole is None:
                return None
    return newline + 1

"""Counts what the collectives move: bytes received by this rank, by axis and kind, in the ring model.

The ring model on `n` members, for a result of the stated size on each member:

| kind           | bytes received by one member                                      |
| -------------- | ----------------------------------------------------------------- |
| all-gather     | (n - 1) * bytes of one shard                                      |
| reduce-scatter | (n - 1) * bytes of one shard                                      |
| all-reduce     | 2 * (n - 1) * ceil(elements / n) * bytes of one element           |
| of up to 16    | 2 * (n - 1) * ceil(elements / 2) * bytes of one element           |
| all-to-all     | bytes received from the other members (exact, sizes may differ)   |

Of up to 16 numbers, such as losses, each member sends its own to all others, in pairs: one step in place of two.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Key = tuple[str, Kind]
Place = tuple[int, str, Kind]
"""Number, axis and kind of a collective."""
# Of a bucket of gradients: large enough to fill a link, small enough to travel while others are filled.
_LEAST_BYTES, _MOST_BYTES, _BUCKETS = 12 * 2**20, 25 * 2**20, 8
_AHEAD = 256  # collectives by which the host is ahead of the device, of those that are remembered


FEW = 16
"""Numbers whose sum takes one step."""


def summed_elements(members: int, elements: int) -> int:
    """Elements that one of the members receives for a sum of so many."""
    return 2 * (members - 1) * -(-elements // (2 if elements <= FEW else members))


def bucket_elements(members: int, size: int, elements: int) -> int:
    """How many of `elements` of `size` bytes travel together where gradients are summed over `members` ranks.

    An eighth, but at least 12 MiB and at most the 25 MiB of DistributedDataParallel: no backward pass hides the last
    bucket. A multiple of the members: however many buckets there are, only the last one is rounded up in
    the ring model.
    """
    held = min(_MOST_BYTES, max(_LEAST_BYTES, elements * size // _BUCKETS))
    return max(1, held // size // members) * members


@dataclass(kw_only=True)
class CommStats:
    """What was counted between entering and leaving `CommCounter.counting`."""

    received: Counter[Key] = field(default_factory=Counter)
    """Bytes received by this rank, by (axis, kind)."""
    calls: Counter[Key] = field(default_factory=Counter)
    """Collectives issued by this rank, by (axis, kind)."""
    order: list[tuple[str, Kind, int]] = field(default_factory=list)
    """Every collective as (axis, kind, bytes), in the order of issue: it must be the same on all ranks."""

    @property
    def total_bytes(self) -> int:
        return sum(self.received.values())

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())


class DeviceEvent(Protocol):
    """A point in the work of a device; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether it has been passed."""


class CommObserver(Protocol):
    """Is told of every collective, where the host stands: for whoever measures them, or makes them slower."""

    def issued(self, place: Place) -> None:
        """It travels from now on."""

    def waits(self, place: Place) -> None:
        """The host needs its result. A second time, of the same, where it comes in two exchanges (gloo.py)."""

    def has(self, place: Place) -> None:
        """The host has it; on a GPU, the device will."""


def _has_passed(moment: DeviceEvent) -> bool:
    try:
        return moment.query()
    except RuntimeError:  # a device that has failed goes no further; its error is for the thread that works on it
        return False


class CommCounter:
    """The counters that are counting now, and where this rank is, for whoever looks for a hang from another thread."""

    def __init__(self) -> None:
        self._active: list[CommStats] = []
        self.issued = 0
        """Collectives of the cube that this rank has issued so far; the next one's number."""
        self._note: Callable[[str, Kind, int], None] | None = None
        self.watched = False
        """Whether somebody wants to know where a device is; noting it costs an event a collective."""
        self.observer: CommObserver | None = None
        self._waiting: Place | None = None
        self._ahead: deque[tuple[Place, DeviceEvent]] = deque(maxlen=_AHEAD)

    @contextmanager
    def counting(self) -> Iterator[CommStats]:
        """Counts every collective of the cube until the block is left. Blocks may be nested."""
        count = CommStats()
        self._active.append(count)
        try:
            yield count
        finally:
            # By identity: two counts with the same content compare equal.
            self._active = [other for other in self._active if other is not count]

    @contextmanager
    def dry(self, note: Callable[[str, Kind, int], None]) -> Iterator[None]:
        """Inside, collectives send nothing: this rank alone finds out what a block of code would send.

        Each is told to `note` as (axis, kind, bytes), in the order of issue. Its result has the right shape and type
        and no meaning: an all-gather gives copies of the own shard, a sum the own part, an all-to-all zeros. Counts
        that were active before do not see it, and it gets no number: the other ranks may do nothing of the kind.
        """
        before = self._active, self._note
        self._active, self._note = [], note
        try:
            yield
        finally:
            self._active, self._note = before

    @property
    def is_dry(self) -> bool:
        """Whether collectives send nothing now."""
        return self._note is not None

    @property
    def waiting(self) -> Place | None:
        """The collective whose result this rank waits for right now, the host or, if it is watched, the device. May be
        asked for from any thread."""
        if self._waiting is not None:
            return self._waiting
        return next((place for place, passed in tuple(self._ahead) if not _has_passed(passed)), None)

    def begin_waiting(self, place: Place) -> None:
        """From here on the host waits."""
        self._waiting = place
        if self.observer is not None:
            self.observer.waits(place)

    def end_waiting(self, place: Place, passed: DeviceEvent | None = None) -> None:
        """The host waits no more; the device does until it has passed that point."""
        self._waiting = None
        if passed is not None:
            self._ahead.append((place, passed))
        if self.observer is not None:
            self.observer.has(place)

    def add(self, axis: str, kind: Kind, received: int) -> Place:
        """Notes one collective in every active count. Returns its number, axis and kind."""
        if self._note is None:
            self.issued += 1
        else:
            self._note(axis, kind, received)
        for count in self._active:
            count.received[axis, kind] += received
            count.calls[axis, kind] += 1
            count.order.append((axis, kind, received))
        place = self.issued, axis, kind
        if self.observer is not None and self._note is None:
            self.observer.issued(place)
        return place

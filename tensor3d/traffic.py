"""Counts what the collectives move: bytes received by this rank, by axis and kind, in the ring model.

The ring model on `n` members, for a result of the stated size on each member:

| kind           | bytes received by one member                                      |
| -------------- | ----------------------------------------------------------------- |
| all-gather     | (n - 1) * bytes of one shard                                      |
| reduce-scatter | (n - 1) * bytes of one shard                                      |
| all-reduce     | 2 * (n - 1) * ceil(elements / n) * bytes of one element           |
| all-to-all     | bytes received from the other members (exact, sizes may differ)   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Key = tuple[str, Kind]


@dataclass(kw_only=True)
class TrafficCount:
    """What was counted between entering and leaving `Traffic.counting`."""

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


class Traffic:
    """The counters that are counting now, and where this rank is, for whoever looks for a hang from another thread."""

    def __init__(self) -> None:
        self._active: list[TrafficCount] = []
        self.issued = 0
        """Collectives of the cube that this rank has issued so far; the next one's number."""
        self.waiting: tuple[int, str, Kind] | None = None
        """Number, axis and kind of the collective whose result this rank waits for right now."""

    @contextmanager
    def counting(self) -> Iterator[TrafficCount]:
        """Counts every collective of the cube until the block is left. Blocks may be nested."""
        count = TrafficCount()
        self._active.append(count)
        try:
            yield count
        finally:
            # By identity: two counts with the same content compare equal.
            self._active = [other for other in self._active if other is not count]

    def add(self, axis: str, kind: Kind, received: int) -> tuple[int, str, Kind]:
        """Notes one collective in every active count. Returns its number, axis and kind."""
        self.issued += 1
        for count in self._active:
            count.received[axis, kind] += received
            count.calls[axis, kind] += 1
            count.order.append((axis, kind, received))
        return self.issued, axis, kind

"""What one step of a rank was, collective by collective, and how long it would take on a slower wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.autograd.profiler import record_function

from tensor3d.traffic import Place

WAITING = "tensor3d: waits"
"""What the profiler shows where the host waits for a collective."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A moment of the host."""

    kind: Literal["issued", "waits", "has"]
    number: int
    """Of the collective."""
    at: float
    """Seconds."""


class Trace:
    """An observer of a cube's traffic that writes everything down, and can make each collective take longer.

    Args:
        latency: seconds that pass at least between the issue of a collective and its result. The host sleeps that long
            where it comes to wait earlier; what it does before that is time in which the collective travels unseen.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.events: list[Event] = []
        self._issued: dict[int, float] = {}
        self._waiting: record_function | None = None

    def issued(self, place: Place) -> None:
        self._issued[place[0]] = self._note("issued", place)

    def waits(self, place: Place) -> None:
        begin = self._note("waits", place)
        self._waiting = record_function(WAITING)
        self._waiting.__enter__()
        rest = self._issued.pop(place[0], begin) + self.latency - begin
        if self.latency and rest > 0:
            time.sleep(rest)

    def has(self, place: Place) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None
        self._note("has", place)

    def _note(self, kind: Literal["issued", "waits", "has"], place: Place) -> float:
        now = time.perf_counter()
        self.events.append(Event(kind=kind, number=place[0], at=now))
        return now


def replayed(events: Sequence[Event], latency: float) -> float:
    """Seconds from the first to the last event if no collective took less than `latency` seconds.

    The host's own work between two events takes as long as it did. A collective that it had to wait for takes what it
    took, or the latency if that is longer; one that was there when it was asked for takes the latency.
    """
    began: dict[int, float] = {}
    issued: dict[int, float] = {}
    asked = 0.0
    now, before = 0.0, events[0].at if events else 0.0
    for event in events:
        if event.kind == "issued":
            now += event.at - before
            began[event.number], issued[event.number] = now, event.at
        elif event.kind == "waits":
            now += event.at - before
            asked = event.at
        elif event.number in began:
            took = event.at - issued[event.number] if event.at - asked > _AT_ONCE else 0.0
            now = max(now, began.pop(event.number) + max(took, latency))
        before = event.at
    return now


_AT_ONCE = 20e-6  # seconds in which a wait ends that had nothing to wait for

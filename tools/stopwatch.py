"""Where a step's time goes, measured without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

Phase = Literal["data", "forward", "backward", "gradient_sum", "optimizer", "checkpoint", "other"]


class Moment(Protocol):
    """A point of time on the device; torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Waits until it has passed."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to `end`, of the same kind; both have passed."""


class _HostMoment:
    """A point of time on the host."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostMoment) -> float:
        return (end._at - self._at) * 1e3


class Lap:
    """One step's phases. Read it a step later: by then the device has done it, and reading waits for nothing."""

    def __init__(self, phases: Sequence[Phase], moments: Sequence[Moment]) -> None:
        assert len(moments) == len(phases) + 1, f"{len(phases)} phases lie between {len(moments)} moments"
        self._phases, self._moments = phases, moments

    def seconds(self) -> dict[Phase, float]:
        """Seconds by phase; what came several times is added up, what did not come is left out."""
        self._moments[-1].synchronize()  # the last: the others are behind it
        sums: dict[Phase, float] = {}
        for phase, start, end in zip(self._phases, self._moments[:-1], self._moments[1:], strict=True):
            sums[phase] = sums.get(phase, 0.0) + start.elapsed_time(end) / 1e3
        return sums


class Stopwatch:
    """Notes when each phase of a step begins.

        watch.begin()                       # a lap
        watch.mark("data")                  # from here on, until the next mark or the end
        ...
        watch.mark("forward")
        lap = watch.end()
        ...                                 # the next step
        lap.seconds()                       # {"data": ..., "forward": ...}

    On CUDA the marks are events in the current stream: a phase's time is what the device spent between them. Data that
    is late while the device still works costs nothing and is not counted; data that leaves it idle is.
    """

    def __init__(self, device: torch.device, *, now: Callable[[], Moment] | None = None) -> None:
        self._now = now or (_cuda_moment if device.type == "cuda" else _HostMoment)
        self._phases: list[Phase] = []
        self._moments: list[Moment] = []
        self._interrupted: Phase = "other"

    def begin(self) -> None:
        """A lap begins; until the first mark it is in phase "other". One that was given up is dropped."""
        self._phases, self._moments = ["other"], [self._now()]

    def mark(self, phase: Phase) -> None:
        """Here `phase` begins, and the one before ends. Outside of a lap nothing is noted: evaluation runs the model
        too."""
        if not self._phases:
            return
        if phase != self._phases[-1]:
            self._phases.append(phase)
            self._moments.append(self._now())

    def end(self) -> Lap:
        """The lap ends."""
        assert self._phases, "end() without begin()"
        lap = Lap(self._phases, [*self._moments, self._now()])
        self._phases, self._moments = [], []
        return lap

    def observe(self, moment: Literal["sum", "summed"]) -> None:
        """For `cube.ledger.observer`: the sum of gradients over ranks is no part of the pass that it ends."""
        if moment == "sum":
            self._interrupted = self._phases[-1] if self._phases else "other"
            self.mark("gradient_sum")
        else:
            self.mark(self._interrupted)


def _cuda_moment() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

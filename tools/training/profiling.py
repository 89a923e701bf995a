"""Traces of chosen steps, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import gzip
import logging
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from tensor3d.files import beside, draft

_log = logging.getLogger(__name__)

# --- Where a step's time goes, measured without making the host wait for the device -----------------------------------

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


class StepTimes:
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


class PhaseTimer:
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

    def end(self) -> StepTimes:
        """The lap ends."""
        assert self._phases, "end() without begin()"
        lap = StepTimes(self._phases, [*self._moments, self._now()])
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


# --- Traces of chosen steps, for Perfetto -----------------------------------------------------------------------------

_RANGE = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class ProfileSchedule:
    """Which steps to trace. Steps are counted from 1, as in metrics.jsonl."""

    windows: tuple[tuple[int, int], ...]
    """First and last step of each trace, ascending."""

    @classmethod
    def parse(cls, text: str) -> ProfileSchedule:
        """Reads "10-12", "10,11" or "3,10-12,50". Steps that follow one another make one trace.

        Raises:
            ValueError: anything else.
        """
        windows: list[tuple[int, int]] = []
        matches = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
        for first, last in sorted((int(m[1]), int(m[2] or m[1])) if m else (0, -1) for m in matches):
            if last < first:
                raise ValueError(
                    f'steps to trace are written "10-12" or "3,10-12", whole numbers from 1 on. Got {text!r}.'
                )
            if windows and first <= windows[-1][1] + 1:
                first, last = windows[-1][0], max(last, windows.pop()[1])
            windows.append((first, last))
        return cls(windows=tuple(windows))


class StepProfiler:
    """Traces the steps of a profile on chosen ranks. Elsewhere, and at other steps, it does nothing at all.

        with Tracer(profile, folder, rank=cube.rank) as tracer:
            for step in ...:
                tracer.begin(step)
                ...
                tracer.end(step)

    Each window is written to trace-rankR-stepsA-B.json.gz in `folder`, beside and renamed. A window that the run leaves
    early is written as far as it came.

    Args:
        profile: None: nothing is traced.
        ranks: those that trace. The profiler slows them, and the others wait for them.
    """

    def __init__(
        self, profile: ProfileSchedule | None, folder: Path, *, rank: int, ranks: Collection[int] = (0,)
    ) -> None:
        self._windows = profile.windows if profile is not None and rank in ranks else ()
        self._folder, self._rank = folder, rank
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = self._done = 0
        self._range: torch.profiler.record_function | None = None
        self.written: list[Path] = []

    def begin(self, step: int) -> None:
        """Before a step."""
        if self._profiler is None:
            # Not at the first step alone: a run may resume in the midst of a window.
            last = next((last for first, last in self._windows if first <= step <= last), None)
            if last is None:
                return
            self._start(step, last)
        self._range = torch.profiler.record_function(f"step {step}")
        self._range.__enter__()

    def end(self, step: int) -> None:
        """After it."""
        if self._profiler is not None:
            self._leave_range()
            self._done = step
            if step >= self._last:
                self._finish()

    def close(self) -> None:
        """Writes what a window has so far."""
        if self._profiler is not None:
            self._leave_range()
            self._finish()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, first: int, last: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._first, self._last, self._done = first, last, first - 1
        # There is one cycle, of which torch 2.11 would warn otherwise.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()

    def _leave_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None, "no window is open"
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the last step has launched belongs to it
        profiler.stop()
        done = max(self._first, self._done)  # the first may be cut short
        steps = f"step{self._first}" if done == self._first else f"steps{self._first}-{done}"
        path = self._folder / f"trace-rank{self._rank}-{steps}.json.gz"
        try:
            _export(profiler, path)
        except OSError as problem:  # a trace is not worth a run
            _log.warning("no trace of %s: %s", path.name, problem)
            return
        self.written.append(path)


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    """Written beside `path` and renamed; a trace of a large model is hundreds of megabytes, a tenth when compressed."""
    plain = beside(path)
    try:
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, draft(path) as file, gzip.open(file, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target)
    finally:
        plain.unlink(missing_ok=True)

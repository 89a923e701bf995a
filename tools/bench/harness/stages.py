"""Commands as stages: each ends within its own limit, none stops the next one, and whatever happens, a page tells how
all of them have ended, with the end of what they printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from tools.common.files import parsed_json, read_file, write_file
from tools.common.machine import write_json

_TAIL, _TAIL_OF_FAILED = 40, 150  # lines of a stage's output that stand on the page
_READ = 1 << 18  # bytes of the end of a log, in which they are looked for
_NO_MEMORY = re.compile("out of memory|OutOfMemoryError|ALLOC_FAILED")
_LOOK = 0.05  # seconds between two looks at a stage
_GRACE = {"limit": 10.0, "signal": 5.0}
"""Seconds from asking a stage to end to ending it. A signal is followed by SIGKILL soon, where machines are lent."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEAD = """
import ctypes, os, resource, signal, sys
os.setpgrp()
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
os.execv(sys.executable, [sys.executable, "-u", "-X", "faulthandler", *sys.argv[1:]])
"""
"""What a stage is before it becomes itself: it leads a group, of this session, ends with the process that runs it, and
leaves no image of its memory where it aborts. Python tells where a process is that aborts or dies in a library, and
`run_main` where it was interrupted. (Python's `preexec_fn` would do it, and warns of threads.)"""
_TOLD = 2.0  # seconds for what aborts


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command, and how long it may take."""

    name: str
    why: str
    command: tuple[str, ...]
    """Of Python: what follows the interpreter."""
    seconds: int
    smaller: Stage | None = None
    """What runs after it where it ran out of memory, unless that is to run anyway."""

    def __str__(self) -> str:
        return shlex.join(["python", *self.command])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    name: str
    why: str
    command: str
    begun: str
    """Date and time."""
    seconds: float
    status: int
    """Exit status, negative for a signal."""
    ended: Literal["itself", "limit", "signal"] = "itself"
    """By whom: by this command at its limit, or because a signal asked this command to end."""

    @property
    def passed(self) -> bool:
        return self.status == 0 and self.ended == "itself"

    def __str__(self) -> str:
        if self.ended == "limit":
            return f"stopped at its limit after {self.seconds:.0f} s"
        if self.ended == "signal":
            return f"broken off by a signal after {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by signal {-self.status}"
        return "passed" if self.passed else f"failed (exit status {self.status})"


def run_stages(stages: Sequence[Stage], folder: Path, seconds: float, order: Sequence[str]) -> int:
    """Runs stages in their order, and writes the page before and after each. What `folder` has of earlier runs stays on
    it, but for stages that run again.

    Args:
        folder: for the page, report.md, its outcomes.json, and a log of each stage.
        seconds: for all together: what would begin later is left out, and what runs then is stopped.
        order: names of all stages that there may be, as they stand on the page; a smaller one stands behind them.

    Returns:
        0: all have passed; 1: not all; 128 + n: signal n came.
    """
    page, end, waiting = Page(folder, stages, order), time.monotonic() + seconds, deque(stages)
    with _noting_signals() as caught:
        while waiting:
            stage = waiting.popleft()
            left = end - time.monotonic()
            if caught or left < 1:
                break
            page.write(running=stage)
            outcome = run_stage(stage, folder, left, caught)
            page.add(outcome)
            _say(f"{stage.name}: {outcome}, {outcome.seconds:.0f} s")
            smaller = None if outcome.passed else stage.smaller
            if smaller is not None and _lacked_memory(folder / f"{stage.name}.log") and page.expect(smaller):
                _say(f"{stage.name} ran out of memory: {smaller.name} is next")
                waiting.appendleft(smaller)
            page.write(told=outcome)
        if page.write():
            _say(f"written: {page.path}")
    if caught:
        return 128 + caught[0]
    return 0 if page.all_passed else 1


def run_stage(stage: Stage, folder: Path, left: float, caught: Sequence[int] = ()) -> Outcome:
    """Runs a stage with its output at the end of its log, and ends all its processes at the limit.

    Args:
        left: seconds that it may take, if that is less than its own limit.
        caught: signals, the first of which ends it.
    """
    date, begun = datetime.now().astimezone().isoformat(" ", "seconds"), time.monotonic()
    ended: Literal["itself", "limit", "signal"] = "itself"
    with _log(folder / f"{stage.name}.log", f"$ {stage}   # {date}") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _LEAD, *stage.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            while process.poll() is None and ended == "itself":
                if caught:
                    ended = "signal"
                elif time.monotonic() - begun >= min(stage.seconds, left):
                    ended = "limit"
                else:
                    time.sleep(_LOOK)
        finally:
            _end(process, _GRACE.get(ended, 0.0))
    return Outcome(
        name=stage.name,
        why=stage.why,
        command=str(stage),
        begun=date,
        seconds=time.monotonic() - begun,
        status=process.returncode,
        ended=ended,
    )


class Page:
    """What is told of all stages, those of earlier runs in the same folder too.

    Args:
        stages: of this run.
        order: names of all that there may be.
    """

    def __init__(self, folder: Path, stages: Sequence[Stage], order: Sequence[str]) -> None:
        self.path = folder / "report.md"
        self._folder, self._stages, self._order = folder, list(stages), order
        self._kept = folder / "outcomes.json"
        self._outcomes: dict[str, Outcome] = _outcomes_in(self._kept)
        self._own: set[str] = set()

    def expect(self, stage: Stage) -> bool:
        """Takes one more stage into this run. False: it is one of this run already."""
        is_new = all(each.name != stage.name for each in self._stages)
        if is_new:
            self._stages.append(stage)
        return is_new

    def add(self, outcome: Outcome) -> None:
        self._outcomes[outcome.name] = outcome
        self._own.add(outcome.name)

    @property
    def all_passed(self) -> bool:
        """Whether every stage of this run has been begun and has passed."""
        return all(stage.name in self._own and self._outcomes[stage.name].passed for stage in self._stages)

    def write(self, *, running: Stage | None = None, told: Outcome | None = None) -> bool:
        """Whether it was written. Where it cannot be, as on a full disk, that is said, and `told` is printed."""
        try:
            write_json(self._kept, {name: asdict(self._outcomes[name]) for name in self._names(self._outcomes)})
            write_file(self.path, "\n".join(self._lines(running)) + "\n")
        except OSError as problem:
            _say(f"{self.path} cannot be written: {problem}")
            if told is not None:
                _say("\n".join(self._section(told)))
            return False
        return True

    def _names(self, names: Iterable[str]) -> list[str]:
        names = dict.fromkeys(names)
        return [*(name for name in self._order if name in names), *(name for name in names if name not in self._order)]

    def _lines(self, running: Stage | None) -> list[str]:
        lines = ["# What a GPU showed", "", "| stage | outcome | seconds | begun |", "| --- | --- | ---: | --- |"]
        for name in self._names([*self._outcomes, *(stage.name for stage in self._stages)]):
            outcome = self._outcomes.get(name)
            if running is not None and name == running.name:
                lines.append(f"| {name} | **running** when this was written | - | - |")
            elif outcome is None:
                lines.append(f"| {name} | not begun | - | - |")
            else:
                lines.append(f"| {name} | {outcome} | {outcome.seconds:.0f} | {outcome.begun} |")
        for name in self._names(self._outcomes):
            lines += self._section(self._outcomes[name])
        return lines

    def _section(self, outcome: Outcome) -> list[str]:
        lines = ["", f"## {outcome.name}: {outcome.why}", "", f"    {outcome.command}", ""]
        end = _end_of(self._folder / f"{outcome.name}.log", _TAIL if outcome.passed else _TAIL_OF_FAILED)
        return [*lines, "```text", *end, "```"]


def _outcomes_in(path: Path) -> dict[str, Outcome]:
    """Of earlier runs."""
    try:
        return {name: Outcome(**each) for name, each in parsed_json(read_file(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        _say(f"{path} is of no use ({problem}), so that earlier stages are missing from the page; logs stay")
        return {}


def _lacked_memory(log: Path) -> bool:
    """Whether the last run of a stage tells so, in PyTorch's words or those of NVIDIA's libraries."""
    return any(_NO_MEMORY.search(line) for line in _end_of(log, _READ))


def _end_of(log: Path, most: int) -> list[str]:
    """Its last lines, of the last run of the stage alone."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _READ))
            lines = file.read(_READ).decode("utf-8", errors="replace").splitlines()
    except OSError as problem:
        return [f"{log} cannot be read: {problem}"]
    begun = max((number for number, line in enumerate(lines) if line.startswith("$ python ")), default=-1)
    return lines[begun + 1 :][-most:]


@contextmanager
def _log(path: Path, heading: str) -> Iterator[IO[bytes] | None]:
    """Its file, behind what earlier runs have left there; None, for this command's own output, where none can be."""
    with ExitStack() as held:
        log = None
        try:
            file = held.enter_context(path.open("ab", buffering=0))
            file.write(f"{heading}\n".encode())
            log = file
        except OSError as problem:
            _say(f"{path} cannot be written: {problem}. What the stage prints follows.")
        yield log


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ends it, and whatever it has started. It is asked first: pytest then tells what has failed, others where they
    were. What does not listen, in a kernel's wait say, aborts, and tells where all of its threads are."""
    for number, seconds in ((signal.SIGINT, grace), (signal.SIGABRT, _TOLD)):
        if process.poll() is None and grace > 0:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(seconds)
    with suppress(ProcessLookupError):  # none: all are gone, or it leads no group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Inside, signals that would end this process are noted in the list alone; handled ones are not ignored by the
    stages, as an ignored SIGINT would be."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    with suppress(OSError):  # whoever has read it may be gone
        print(text, flush=True)

"""What a rank tells of itself in its heartbeat, and who is to blame when ranks wait for each other in vain."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

_NAMES_AT_MOST = 8
_ALL_THERE = "no rank is missing or behind. Look for errors of the network or of a device"


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process, in a way that another one on the same machine can look it up."""

    machine: str = ""
    """The boot of the machine and the name spaces of its process numbers and of its network, for who lives but is cut
    off does not count as alive; empty where there is no /proc."""
    number: int = 0
    started: int = 0
    """Clock ticks since the boot: a process that got the number later has another value."""

    @classmethod
    def own(cls) -> ProcessId:
        """This process, or one that nobody can look up."""
        try:
            return cls.of(os.getpid())
        except OSError:
            return cls()

    @classmethod
    def of(cls, number: int) -> ProcessId:
        """A process of this machine. Raises OSError where there is none, or no /proc."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
        return cls(machine=machine, number=number, started=_state(number)[1])

    def look(self, machine: str) -> Literal["alive", "gone", "stopped", "unknown"]:
        """What this process is, seen from `machine`; unknown from another one."""
        if not machine or machine != self.machine:
            return "unknown"
        try:
            state, started = _state(self.number)
        except OSError:
            return "gone"
        if started != self.started or state in "ZX":
            return "gone"
        if state == "t":
            return "unknown"  # a debugger or a profiler holds it, perhaps for a moment
        return "stopped" if state == "T" else "alive"


def _state(number: int) -> tuple[str, int]:
    # The name in parentheses may hold anything; the fields that follow it are counted from 3 (proc(5)).
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One heartbeat of a rank."""

    number: int = 0
    """Of this heartbeat; it grows for as long as the process lives."""
    step: int = 0
    doing: str = "starting"
    issued: int = 0
    """Collectives that the rank has issued."""
    waiting: tuple[int, str, str] | None = None
    """Number, axis and kind of the collective that its main thread waits for."""
    idle: float = 0.0
    """Seconds since anything of the above has changed."""
    line: str = ""
    """Where its main thread is in the source."""
    left: Literal["", "closed", "failed", "cut off"] = ""
    """How it left the job, if it did: in good order, with an error of its own, or because a collective failed."""
    reason: str = ""
    """The error."""
    late: bool = False
    """Whether nothing broke and time ran out."""
    process: ProcessId = field(default_factory=ProcessId)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> RankStatus | None:
        """None for what is no heartbeat."""
        try:
            values = json.loads(text)
            waiting = values.pop("waiting")
            beat = cls(
                **{**values, "process": ProcessId(**values["process"])},
                waiting=None if waiting is None else tuple(waiting),
            )
            number, axis, kind = beat.waiting or (0, "", "")
            numbers = (beat.number, beat.step, beat.issued, number, beat.process.number, beat.process.started)
            texts = (beat.doing, beat.line, beat.reason, beat.left, axis, kind, beat.process.machine)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        sound = all(isinstance(each, int) for each in numbers) and all(isinstance(each, str) for each in texts)
        return beat if sound and isinstance(beat.idle, int | float) else None

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.doing}" + (f", at {self.line}" if self.line else "")

    @property
    def collective(self) -> str:
        """The one that its main thread waits for."""
        number, axis, kind = self.waiting or (0, "none", "none")
        return f"collective {number} ({kind} over {axis})"


def source_line(thread: int) -> str:
    """File, line and function where a thread is, without what it calls in Python's and other people's libraries."""
    frame, foreign = sys._current_frames().get(thread), _foreign()
    while frame and frame.f_back and frame.f_code.co_filename.startswith(foreign):
        frame = frame.f_back
    return _line(frame, frame.f_lineno) if frame else ""


def raised_line(error: BaseException | None) -> str:
    """Where an error came up, likewise; empty for none."""
    foreign = _foreign()
    frames = list(traceback.walk_tb(error.__traceback__)) if error else []
    own = [place for place in frames if not place[0].f_code.co_filename.startswith(foreign)]
    return _line(*own[-1]) if own else ""


def _foreign() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return paths["stdlib"], paths["purelib"], paths["platlib"], "<"


def _line(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number} in {frame.f_code.co_name}"


def blame(names: Sequence[str], beats: Sequence[RankStatus], silent: Mapping[int, str]) -> str:
    """Names the ranks at fault: the silent; else those that failed; else those that ended, are in no collective, or
    behind. Who was cut off in a collective is the last to be blamed.

    Args:
        names: of all ranks.
        beats: the last heartbeat of each.
        silent: why a rank counts as dead, of those that do.
    """

    def sentence(ranks: Sequence[int], what: Callable[[RankStatus], str]) -> str:
        shown = "; ".join(f"{names[rank]} {what(beats[rank])}" for rank in ranks[:_NAMES_AT_MOST])
        more = f"; and {len(ranks) - _NAMES_AT_MOST} more" if len(ranks) > _NAMES_AT_MOST else ""
        return shown + more + _witness(names, beats, ranks)

    everyone = range(len(beats))
    # Who was cut off by another's end is a victim, also if its process has ended since.
    if dead := [rank for rank in everyone if rank in silent and not beats[rank].left]:
        reasons = {id(beats[rank]): silent[rank] for rank in dead}
        return sentence(dead, lambda beat: f"does not answer ({reasons[id(beat)]}), last seen in {beat.place}")
    if failed := [rank for rank in everyone if beats[rank].left == "failed"]:
        return sentence(failed, lambda beat: f"failed in {beat.place}: {beat.reason}")
    if cut := [rank for rank in everyone if beats[rank].left == "cut off"]:
        lost = sentence(cut, lambda beat: f"lost a collective in {beat.place}: {beat.reason}")
        # Those that all must be in, or past, by now.
        needed = min(beats[rank].issued for rank in cut)
        alive = [rank for rank in everyone if not beats[rank].left]
        late = _least([rank for rank in alive if not beats[rank].waiting or beats[rank].issued < needed], beats)
        if ended := [rank for rank in everyone if beats[rank].left == "closed"]:
            return f"{sentence(ended, _ended)}; {lost}"
        return f"{sentence(late, _alive)}; {lost}" if late else f"{lost}; {_ALL_THERE}"
    if len(beats) == 1:
        return f"{names[0]} {_alive(beats[0])}"
    waiting = [rank for rank in everyone if beats[rank].waiting]
    if waiting and (ended := [rank for rank in everyone if beats[rank].left]):
        return sentence(ended, _ended)
    # Where some wait, those at fault are elsewhere, or wait for something that the others are past.
    suspects = [rank for rank in everyone if waiting and not beats[rank].waiting] or list(everyone)
    if 0 < len(waiting) < len(beats) or len({beat.issued for beat in beats}) > 1:
        return sentence(_least(suspects, beats), _alive)
    if len({beat.waiting for beat in beats}) > 1:
        return f"ranks wait in different collectives: {sentence(list(everyone), _alive)}"
    return f"{_ALL_THERE}; {names[0]}, like all others, {_alive(beats[0])}"


def _least(ranks: Sequence[int], beats: Sequence[RankStatus]) -> list[int]:
    """Those of the ranks that have issued the fewest collectives."""
    least = min((beats[rank].issued for rank in ranks), default=0)
    return [rank for rank in ranks if beats[rank].issued == least]


def _ended(beat: RankStatus) -> str:
    return f"has ended in {beat.place}"


def _alive(beat: RankStatus) -> str:
    where = beat.collective if beat.waiting else "no collective"
    return f"is alive in {where} for {beat.idle:.0f} s, {beat.issued} issued, {beat.place}"


def _witness(names: Sequence[str], beats: Sequence[RankStatus], blamed: Sequence[int]) -> str:
    """The rank that waits in the earliest collective: the others wait for that one, or for a later one."""
    waiting = [(beat.waiting[0], rank) for rank, beat in enumerate(beats) if beat.waiting and rank not in blamed]
    if not waiting:
        return ""
    first = beats[min(waiting)[1]]
    return f"; {len(waiting)} wait, first {names[min(waiting)[1]]} in {first.collective}, {first.place}"

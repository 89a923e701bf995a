"""Watches over a running job: hangs end with a name, signals are heeded while a collective blocks, orphans leave.

| exit code | constant    | what it says                                                                              |
| --------- | ----------- | ----------------------------------------------------------------------------------------- |
| 75        | `PREEMPTED` | a signal came, the ranks agreed on a step and saved: start again to go on (EX_TEMPFAIL)   |
| 79        | `HANG`      | no progress for too long; one line on standard error names who is to blame                |
| 80        | `ORPHANED`  | the job's store is gone, or does not answer: nobody would end this process any more       |
| 128 + n   |             | signal n came and nothing could be saved: a rank was dead, or time ran out                |
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import AXES
from tensor3d.distributed.failure_detector import FailureDetector
from tensor3d.distributed.job_store import KeyedStore
from tensor3d.distributed.process_group import job_secret
from tensor3d.distributed.rank_status import RankStatus, raised_line, source_line
from tensor3d.distributed.signals import Clock, SignalPipe
from tensor3d.torch_private import default_store

PREEMPTED, HANG, ORPHANED = 75, 79, 80
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT = 2.0
"""Seconds within which a signal that comes again is the same one: a scheduler sends it to torchrun and to the ranks,
and torchrun passes it on."""
PATIENCE = 25.0
"""Seconds from a signal to an agreement: torchrun kills after 30."""
CHECKPOINT = "checkpoint"
"""What a rank does, for `at`, that writes one or waits for it, with the bytes so far behind: it may take long."""
_START = (0, "starting")
_NO_ANSWER = "the job's store does not answer, its host is stopped or out of reach"


def tell(line: str) -> None:
    """Writes a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class Watchdog:
    """Watches this rank and its job, from a thread that runs while the main thread is blocked.

    Every rank makes one at the same time, in its main thread, and closes it when its work is done:

        with Watchdog(cube) as watch:
            for step in ...:
                watch.at(step, "forward")
                ...
                # summed with the gradient's norm: every rank sees the same number
                if sum_over_ranks(watch.stop_flag):
                    watch.agreed()
                    save()
                    sys.exit(PREEMPTED)

    What it ends a process for, and with which exit code, stands at the head of this file. A process that another one
    has to end (a stopped one) is left to torchrun, which kills it when the others have left. While a whole job is
    stopped and continued, no time passes for it.

    Args:
        cube: arranges the ranks.
        hang_after: seconds without progress (`at`, or a collective issued) that count as a hang, from the first `at`
            on: what comes before it, a corpus to prepare, may take any time. Less than the process group's timeout,
            whose error is late; more than the longest time between two calls of `at`.
        grace: seconds in which a living rank is heard of. Where there are so many ranks that they beat more slowly than
            every second, three beats.
        patience: seconds from a signal to `agreed`, or from the end of a checkpoint that is under way (`at` with what
            begins with "checkpoint"; each call with more bytes behind is progress).
        say: gets the one line that tells why this process ends.
        abort: ends it with an exit code, without return.
        store: instead of the process group's, over a connection that nobody else uses.

    Raises:
        ValueError: times that are not positive, or another thread than the main one.
    """

    def __init__(
        self,
        cube: Cube,
        *,
        hang_after: float = 600.0,
        grace: float = 3.0,
        patience: float = PATIENCE,
        say: Callable[[str], None] = tell,
        abort: Callable[[int], None] = os._exit,
        store: dist.Store | None = None,
    ) -> None:
        for name, value in (("hang_after", hang_after), ("grace", grace), ("patience", patience)):
            if not value > 0:
                raise ValueError(f"{name} must be more than 0 seconds. Got {value}.")
        self._hang_after, self._grace, self._patience = hang_after, grace, patience
        self._traffic = cube.traffic
        self._traffic.watched = True
        self._name = _name(cube, cube.rank)
        self._say, self._abort = say, abort
        self._main = threading.get_ident()
        self._at = _START
        self._progress = (self._at, self._traffic.issued)
        self._pace = min(1.0, grace / 3, hang_after / 10)
        self._clock = Clock(longest=1.5 * self._pace)
        self._since = self._saved = self._clock()
        self._stop: int | None = None
        self._caught: dict[int, float] = {}
        self._failed_at = ""
        self._failed = self._insisted = self._agreed = self._closed = False
        self._signals = SignalPipe(SIGNALS, self._request)
        self._heartbeat: FailureDetector | None = None
        if store is None and cube.mesh is not None:
            store = _store(cube.rank)
        self._no_answer = _NO_ANSWER
        if store is not None:
            self._no_answer += _address(store)
            names = [_name(cube, rank) for rank in range(cube.shape.ranks)]
            self._heartbeat = FailureDetector(
                store, names, cube.rank, grace=grace, clock=self._clock, note=self._beat, woken=self._signals.wake
            )
            self._heartbeat.start()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        # Also when nobody closes: at exit a thread in the middle of a call to the store could not end in good order.
        atexit.register(self.close)

    # --- the main thread ------------------------------------------------------------------------------------------

    def at(self, step: int, doing: str) -> None:
        """Notes what this rank begins to do, such as "forward". Costs next to nothing."""
        self._at = (step, doing)

    @property
    def stop_signal(self) -> int | None:
        """The signal that asks this rank to stop, if one has come."""
        return self._stop

    @property
    def stop_requested(self) -> bool:
        return self._stop is not None

    @property
    def stop_flag(self) -> float:
        """1.0 where a signal asks this rank to stop, else 0.0: where its sum over the ranks is not 0, all of them stop
        after the same step."""
        return float(self.stop_requested)

    def agreed(self) -> None:
        """The ranks have agreed to stop and save now. From here on time does not run out, but for torchrun's 30 s; they
        still leave at once if one of them dies."""
        self._agreed = True

    def failed(self, reason: str) -> str:
        """To be called in the `except` of a collective's error. Returns who is to blame, in a sentence that is the same
        on all ranks that call; `reason` where nobody can tell. From here on a signal ends this process at once.

        Args:
            reason: the error of the collective, its first line.
        """
        self._failed_at, self._failed = raised_line(sys.exc_info()[1]), True
        self._signals.wake()
        reason = reason.strip().splitlines()[0] if reason.strip() else "unknown error"
        return (self._heartbeat.explain(reason) if self._heartbeat else "") or f"{self._name}: {reason}"

    def close(self, error: str = "") -> None:
        """Ends the watch and restores the handlers of signals; a second call does nothing.

        Args:
            error: of this rank alone, for which it leaves the others; they name it as the reason.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._signals.restore()
        if self._agreed and threading.get_ident() == self._main:
            for number in SIGNALS:  # all is saved: what comes now must not change the exit code
                signal.signal(number, signal.SIG_IGN)
        self._signals.wake()
        if self._heartbeat:
            self._heartbeat.close(error)
        self._thread.join(2.0)
        if not self._thread.is_alive() and not (self._heartbeat and self._heartbeat.alive):
            self._signals.close()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended = isinstance(error, SystemExit | KeyboardInterrupt)
        self.close("" if error is None or ended else f"{type(error).__name__}: {error}".splitlines()[0])

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            for number in self._signals.wait(min(0.05, self._pace) if self._caught else self._pace):
                if number in SIGNALS:
                    self._count(number)
            if not self._closed and (reason := self._reason_to_leave()):
                code, why = reason
                try:
                    self._say(f"{self._name}: {why}")
                finally:
                    self._abort(code)
                return

    def _request(self, number: int) -> None:
        self._stop = self._stop or number

    def _count(self, number: int) -> None:
        now = self._clock()
        self._request(number)
        first = self._caught.setdefault(number, now)
        self._insisted |= number == signal.SIGTERM and now - first > REPEAT

    def _reason_to_leave(self) -> tuple[int, str] | None:
        """The exit code, and why."""
        now, heartbeat = self._clock(), self._heartbeat
        progress = (self._at, self._traffic.issued)
        if progress != self._progress or self._at is _START:
            if any(at[1].startswith(CHECKPOINT) for at in (self._at, self._progress[0])):  # it begins, goes on, or ends
                self._saved = now
            self._progress, self._since = progress, now
        idle = now - self._since
        if heartbeat and heartbeat.verdict:
            return HANG, f"no progress for {idle:.0f} s: {heartbeat.verdict}"
        if self._caught and (why := self._why_not_wait(now)):
            number = signal.SIGTERM if signal.SIGTERM in self._caught else signal.SIGUSR1
            return 128 + number, f"{signal.Signals(number).name}, leaving without a checkpoint: {why}"
        if heartbeat:
            heartbeat.look(judge=idle > self._hang_after, anyway=bool(self._caught))
            if now - heartbeat.answered > (self._grace if heartbeat.lost else heartbeat.deaf):
                return ORPHANED, f"leaving, for nobody would end this process: {heartbeat.lost or self._no_answer}"
        elif idle > self._hang_after:
            return HANG, f"no progress for {idle:.0f} s in {self._beat().place}"
        return None

    def _why_not_wait(self, now: float) -> str:
        """Why, after a signal, this rank does not wait for the end of the step; empty where it does."""
        heartbeat = self._heartbeat
        if self._failed:
            return "a collective has failed"
        if self._insisted:
            return "it came a second time"
        if heartbeat and heartbeat.broken:
            return heartbeat.broken
        if heartbeat and now - heartbeat.answered > heartbeat.grace:
            return heartbeat.lost or self._no_answer
        if not self._agreed and now - max(self._saved, min(self._caught.values())) > self._patience:
            return f"the ranks have not agreed on a step within {self._patience:g} s; {self._beat().place}"
        return ""

    def _beat(self) -> RankStatus:
        (step, doing), idle, waiting = self._at, self._clock() - self._since, self._traffic.waiting
        clear = waiting or idle < min(5.0, self._hang_after / 2)  # which needs no line
        return RankStatus(
            step=step,
            doing=doing,
            issued=self._traffic.issued,
            waiting=waiting,
            idle=idle,
            line=self._failed_at if self._failed else "" if clear else source_line(self._main),
        )


def _name(cube: Cube, rank: int) -> str:
    coordinate = cube.shape.coordinate(rank)
    parts = [f"{axis} {coordinate[axis]}" for axis in AXES if cube.shape.size(axis) > 1]
    per_node = cube.ranks_per_node
    if per_node is not None and per_node < cube.shape.ranks:
        parts.append(f"on node {rank // per_node}")
    place = ", ".join(parts)
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def _address(store: dist.Store) -> str:
    """Where it is, in brackets; empty for one that does not say."""
    while isinstance(store, dist.PrefixStore | KeyedStore):
        store = store.underlying_store
    return f" ({store.host}:{store.port})" if isinstance(store, dist.TCPStore) else ""


def _store(rank: int) -> dist.Store:
    """The watch's own part of the job's store. Ranks count, each for itself and hence all alike, how many watches they
    have made, so that none reads what an earlier one has left."""
    default: Any = default_store()
    number = default.add(f"tensor3d/watches of {rank}", 1)
    # A connection of its own: what blocks in the main thread's does not block this one.
    return KeyedStore(default.clone(), f"tensor3d/watch {number}", job_secret(), strict=False)

"""Signals that a thread can read while the main thread is blocked inside C, where no Python handler runs, and a clock
that stands still while SIGSTOP holds the process."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType


class SignalPipe:
    """Catches signals for as long as it is open. Made and closed in the main thread.

    Python runs handlers between two instructions of the main thread, so not while that waits for a collective. But the
    C half of a handler writes the number into `signal.set_wakeup_fd` at once, and any thread may read it there.

    Args:
        numbers: the signals to catch.
        handler: also called with the number by the main thread, as soon as that runs Python.

    Raises:
        ValueError: made in another thread than the main one.
    """

    def __init__(self, numbers: Sequence[int], handler: Callable[[int], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise ValueError(f"signals can be caught by the main thread only. Got {name!r}; make the watch there.")

        def caught(number: int, frame: FrameType | None) -> None:
            handler(number)

        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, caught) for number in numbers}
        # A forked child shares the pipe: a signal that ends it must not look like one to this process.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _restore_of(reference))

    def wait(self, seconds: float) -> list[int]:
        """The signals since the last call, as soon as there are any, or nothing after `seconds` or a `wake`."""
        poll = select.poll()  # unlike select, it takes descriptors above 1,023
        poll.register(self._read, select.POLLIN)
        return [number for number in os.read(self._read, 4096) if number] if poll.poll(seconds * 1000) else []

    def wake(self) -> None:
        """Ends a `wait` now."""
        with suppress(BlockingIOError):  # full: nobody waits
            os.write(self._write, b"\0")

    def restore(self) -> None:
        """Puts the former handlers back; a second call does nothing. The pipe stays, since a thread may still wait."""
        if self._closed:
            return
        self._closed = True
        for number, previous in self._previous.items():
            # None: a handler that was not installed from Python, and cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(self._previous_fd)

    def close(self) -> None:
        """Puts the former handlers back and gives up the pipe. For when no thread waits any more."""
        self.restore()
        os.close(self._read)
        os.close(self._write)


class Clock:
    """Seconds that this process has lived: the time in which it was stopped (SIGSTOP, a job that its scheduler has
    suspended), or in which the main thread let no other thread run Python, does not count.

    The clock of the system runs on. So a gap between two readings is not believed where it is longer than `longest`,
    and somebody must read it more often than that.

    Args:
        longest: seconds that a gap counts at most.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._lock = threading.Lock()
        self._lived = self._last = time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._lived += min(now - self._last, self._longest)
            self._last = now
            return self._lived


def _restore_of(reference: weakref.ref[SignalPipe]) -> None:
    if pipe := reference():
        pipe.restore()

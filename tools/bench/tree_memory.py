"""The memory of a process and all that it has started, read while they run (Linux)."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")


class TreeMemory:
    """Watches a process and its descendants from another thread, in a `with` block.

    A page that several processes share counts once in all (the proportional set size), so what they have in common,
    such as libraries, is not counted for each. Files that are mapped and read count while they are in memory.
    """

    def __init__(self, pid: int, every: float = 0.1) -> None:
        """
        Args:
            pid: the process.
            every: seconds between two readings; a peak between them is missed.
        """
        self.peak = 0
        """Bytes, at the highest reading."""
        self._pid, self._every = pid, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self.peak = max(self.peak, sum(proportional_set(pid) for pid in descendants(self._pid)))


def proportional_set(pid: int) -> int:
    """Bytes; 0 for a process that is gone or not ours."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def descendants(pid: int) -> list[int]:
    """The process, its children, theirs, and so on."""
    found = [pid]
    for parent in found:
        for tasks in (_PROC / str(parent) / "task").glob("*/children"):
            with suppress(OSError):
                found += [int(child) for child in tasks.read_text().split()]
    return found

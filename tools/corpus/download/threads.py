"""Workers that wait for servers rather than compute: threads, so that one progress bar sees every byte."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from tools.corpus.download.source import FileUnit
from tools.corpus.work.mpi import MpiTeam
from tools.corpus.work.team import do_unit
from tools.corpus.work.units import Outcome, Task, Unit

T = TypeVar("T")
OF_ONE_SERVER = 2
"""Files of one server that are fetched at once: what Wikimedia allows an address."""


class _StoppedError(Exception):
    """Another unit has failed."""


class ThreadTeam:
    """Threads of this process. Units of a server begin in their order; when one fails, the others stop within a second
    or so. But where a server cannot be reached, the others are fetched first: the next run has that much less to do."""

    rank = 0

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1. Got {workers}.")
        self.workers = workers

    def do(self, task: Task, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        unreached: list[ConnectionError] = []
        queue, turn = _Queue(units), threading.Lock()

        def tell(size: int) -> None:
            if queue.stopped:
                raise _StoppedError
            with turn:
                seen(size)

        def work() -> None:
            while (unit := queue.take()) is not None:
                try:
                    outcomes[unit.name] = do_unit(task, unit, tell)
                except ConnectionError as error:
                    unreached.append(error)
                finally:
                    queue.give_back(unit)

        with ThreadPoolExecutor(self.workers) as pool:
            try:
                futures = [pool.submit(work) for _ in range(min(self.workers, len(units)))]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                queue.stop()  # after an interruption too: leaving the pool waits for its threads
        for future in done:
            future.result()
        if unreached:
            raise unreached[0]
        return outcomes

    def on_first(self, do: Callable[[], T]) -> T:
        return do()


class FirstRankTeam(MpiTeam):
    """Ranks of an MPI job of which the first fetches, by its threads: a server is asked by no more than these."""

    def __init__(self, ranks: MpiTeam, threads: ThreadTeam) -> None:
        super().__init__(ranks._world)
        self._threads = threads

    def do(self, task: Task, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        return self.on_first(lambda: self._threads.do(task, units, seen))


class _Queue:
    """Units that wait for a thread and for their server."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.stopped = False
        self._waiting: dict[str, deque[Unit]] = {}
        for unit in units:
            self._waiting.setdefault(_server(unit), deque()).append(unit)
        self._busy: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self) -> Unit | None:
        """The next unit of a server that is free, once there is one; None: there are no more units."""
        with self._changed:
            while self._waiting and not self.stopped:
                server = next((server for server in self._waiting if self._busy[server] < OF_ONE_SERVER), None)
                if server is None:
                    self._changed.wait()
                    continue
                self._busy[server] += 1
                unit = self._waiting[server].popleft()
                if not self._waiting[server]:
                    del self._waiting[server]
                return unit
            return None

    def give_back(self, unit: Unit) -> None:
        """The unit is done, or has failed."""
        with self._changed:
            self._busy[_server(unit)] -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Gives out no more units."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


def _server(unit: Unit) -> str:
    return unit.source.server if isinstance(unit, FileUnit) else ""

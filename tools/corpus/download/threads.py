"""Workers that wait for servers rather than compute: threads, so that one progress bar sees every byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from tools.corpus.work.team import do_unit
from tools.corpus.work.units import Outcome, Task, Unit

T = TypeVar("T")


class _StoppedError(Exception):
    """Another unit has failed."""


class ThreadTeam:
    """Threads of this process. Units begin in their order; when one fails, the others stop within a second or so."""

    rank = 0

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1. Got {workers}.")
        self.workers = workers

    def do(self, task: Task, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        stopped, turn = threading.Event(), threading.Lock()

        def tell(size: int) -> None:
            if stopped.is_set():
                raise _StoppedError
            with turn:
                seen(size)

        def work(unit: Unit) -> None:
            if not stopped.is_set():
                outcomes[unit.name] = do_unit(task, unit, tell)

        with ThreadPoolExecutor(self.workers) as pool:
            try:
                futures = [pool.submit(work, unit) for unit in units]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stopped.set()  # after an interruption too: leaving the pool waits for its threads
        for future in done:
            future.result()
        return outcomes

    def on_first(self, do: Callable[[], T]) -> T:
        return do()

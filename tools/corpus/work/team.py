"""Who does the units: processes of this machine, or the ranks of an MPI job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import connection
from typing import Any, Protocol, TypeVar

from tools.cores import usable_cores
from tools.corpus.work.units import Outcome, Task, Unit

T = TypeVar("T")


class Team(Protocol):
    """Every rank calls every method, in the same order."""

    @property
    def rank(self) -> int:
        """0 to ranks - 1; rank 0 speaks to the user."""

    @property
    def workers(self) -> int:
        """Units that are worked on at a time."""

    def do(self, task: Task, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        """Does the units; what has become of each, by name. `seen` hears the bytes that are done. What fails in one is
        raised on every rank."""

    def on_first(self, do: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; or what it raises."""


class LocalTeam:
    """Processes of this machine; with one worker, this process."""

    rank = 0

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1. Got {workers}.")
        self.workers = workers

    def do(self, task: Task, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        if self.workers == 1 or len(units) < 2:
            return {unit.name: do_unit(task, unit, seen) for unit in units}
        outcomes: dict[str, Outcome] = {}
        # A fork of this process would copy its threads' locks; a server forks from a clean one.
        context = multiprocessing.get_context("forkserver")
        # The server imports what the work needs once, and all workers have it.
        context.set_forkserver_preload([_module_of(task.work)])
        pool = ProcessPoolExecutor(min(self.workers, len(units)), mp_context=context, initializer=_begin_worker)
        try:
            for unit, outcome in _done(pool, 2 * self.workers, task, units):
                outcomes[unit.name] = outcome
                seen(unit.size)
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process was killed, perhaps for want of memory. Units that are done are kept: run the same "
                "command again, with fewer --workers if memory is short."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return outcomes

    def on_first(self, do: Callable[[], T]) -> T:
        return do()


def do_unit(task: Task, unit: Unit, seen: Callable[[int], None]) -> Outcome:
    """Does a unit in this process; what it has not reported as progress is reported at its end."""
    told = 0

    def progress(size: int) -> None:
        nonlocal told
        told += size
        seen(size)

    outcome = task(unit, progress)
    seen(unit.size - told)
    return outcome


def local_team(workers: int | None = None) -> LocalTeam:
    """Processes of this machine, by default as many as this one may use cores."""
    return LocalTeam(usable_cores() if workers is None else workers)


def _module_of(work: Callable[..., Any]) -> str:
    """Where a function is defined, the function of a `partial`, or the class of a callable object."""
    function = work.func if isinstance(work, partial) else work
    return str(getattr(function, "__module__", type(function).__module__))


def _done(pool: ProcessPoolExecutor, at_once: int, task: Task, units: Sequence[Unit]) -> Iterator[tuple[Unit, Outcome]]:
    """The units as they are done, the largest begun first; raises what fails first and begins no other."""
    doing: dict[Future[Outcome], Unit] = {}
    left = iter(sorted(units, key=lambda unit: (-unit.size, unit.name)))
    while True:
        # Few at a time: nothing waits in a queue that would still be done after a failure.
        while len(doing) < at_once and (unit := next(left, None)) is not None:
            doing[pool.submit(task, unit)] = unit
        if not doing:
            return
        finished, _ = wait(doing, return_when=FIRST_COMPLETED)
        for future in finished:
            unit = doing.pop(future)
            yield unit, future.result()


def _begin_worker() -> None:
    """A worker goes when it is interrupted or when the process that it works for is gone, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def _leave_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)

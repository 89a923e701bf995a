"""Who does the units: processes of this machine, or the ranks of an MPI job."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tools.common.workers import begin_worker, deal, starting_workers, usable_cores
from tools.corpus.pipeline.units import Outcome, Unit, WorkItem

T = TypeVar("T")


class Team(Protocol):
    """Every rank calls every method, in the same order."""

    @property
    def rank(self) -> int:
        """0 to ranks - 1; rank 0 speaks to the user."""

    @property
    def workers(self) -> int:
        """Units that are worked on at a time."""

    def do(self, task: WorkItem, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
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

    def do(self, task: WorkItem, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        if self.workers == 1 or len(units) < 2:
            return {unit.name: do_unit(task, unit, seen) for unit in units}
        outcomes: dict[str, Outcome] = {}
        # A fork of this process would copy its threads' locks; a server forks from a clean one.
        context = multiprocessing.get_context("forkserver")
        # The server imports what the work needs once, and all workers have it.
        context.set_forkserver_preload([_module_of(task.work)])
        pool = ProcessPoolExecutor(min(self.workers, len(units)), mp_context=context, initializer=begin_worker)
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


def do_unit(task: WorkItem, unit: Unit, seen: Callable[[int], None]) -> Outcome:
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


def _done(
    pool: ProcessPoolExecutor, at_once: int, task: WorkItem, units: Sequence[Unit]
) -> Iterator[tuple[Unit, Outcome]]:
    """The units as they are done, the largest begun first; raises what fails first and begins no other."""
    doing: dict[Future[Outcome], Unit] = {}
    left = iter(sorted(units, key=lambda unit: (-unit.size, unit.name)))
    while True:
        # Few at a time: nothing waits in a queue that would still be done after a failure.
        while len(doing) < at_once and (unit := next(left, None)) is not None:
            with starting_workers():
                doing[pool.submit(task, unit)] = unit
        if not doing:
            return
        finished, _ = wait(doing, return_when=FIRST_COMPLETED)
        for future in finished:
            unit = doing.pop(future)
            yield unit, future.result()


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of an MPI job as a team: each does its share of the units by itself, on a file system that all see.

_STOP = 1


def connect() -> MpiTeam | None:
    """The team of the job that this process is a rank of; None where it is alone, or mpi4py is not there."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # the second: mpi4py without an MPI library
        return None
    if MPI.COMM_WORLD.Get_size() == 1:
        return None
    return MpiTeam(MPI.COMM_WORLD)


class MpiTeam:
    """Ranks of a communicator. A rank that fails tells the others, which stop before their next unit."""

    def __init__(self, communicator: Any) -> None:
        self._world = communicator
        self.rank: int = communicator.Get_rank()
        self.workers: int = communicator.Get_size()

    def do(self, task: WorkItem, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        own: dict[str, Outcome] = {}
        error: Exception | None = None
        try:
            for unit in deal_units(units, self.workers)[self.rank]:
                if self._is_stopped():
                    break
                own[unit.name] = do_unit(task, unit, lambda size: seen(size * self.workers))
        except Exception as failure:
            error = failure
            self._stop_others()
        self._agree(error)
        # Not read from the marks: another machine may see a new file late.
        return {name: outcome for rank in self._world.allgather(own) for name, outcome in rank.items()}

    def on_first(self, do: Callable[[], T]) -> T:
        result: T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = do()
            except Exception as failure:
                error = failure
        self._agree(error)
        return self._world.bcast(result, root=0)

    def abort(self) -> None:
        """Ends the job, for what no rank can answer for."""
        traceback.print_exc()
        self._world.Abort(1)

    def _stop_others(self) -> None:
        for rank in range(self.workers):
            if rank != self.rank:
                self._world.isend(None, dest=rank, tag=_STOP)

    def _is_stopped(self) -> bool:
        return bool(self._world.iprobe(tag=_STOP))

    def _agree(self, error: Exception | None) -> None:
        """Raises the error of the first rank that has one, on every rank. All ranks have come here."""
        errors = self._world.allgather(None if error is None else _portable(error))
        while self._is_stopped():
            self._world.recv(tag=_STOP)
        first = next((failure for failure in errors if failure is not None), None)
        if first is not None:
            raise first from error


def deal_units(units: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """Units of each rank, the largest first."""
    ordered = sorted(units, key=lambda unit: (-unit.size, unit.name))
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    for unit, rank in zip(ordered, deal([unit.size for unit in ordered], ranks), strict=True):
        dealt[rank].append(unit)
    return dealt


def _portable(error: Exception) -> Exception:
    """The error as it can be raised on another rank."""
    if isinstance(error, ValueError):
        return error
    if isinstance(error, OSError) and error.errno is None:
        return OSError(str(error))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    return RuntimeError("".join(traceback.format_exception(error)))


# --- What every step can be told --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every step."""

    output: Path
    """Folder to write. It appears when it is complete; what a killed run has done is kept beside it, and the same
    command goes on from there."""
    skip_bad: bool = False
    """Leave out what is damaged, count it and list it in left-out.jsonl, instead of stopping there."""
    workers: int | None = None
    """Processes of this machine. Default: as many as there are cores, or under mpirun the ranks of the job."""

    def team(self) -> Team:
        """Who does the work: processes of this machine, or under mpirun the ranks. ValueError for less than one."""
        # With --workers MPI is not even looked for: on some machines it cannot be where no job is.
        return local_team(self.workers) if self.workers is not None else connect() or local_team()

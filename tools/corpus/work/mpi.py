"""The ranks of an MPI job as a team: each does its share of the units by itself, on a file system that all see."""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tools.corpus.work.team import do_unit
from tools.corpus.work.units import Outcome, Task, Unit

T = TypeVar("T")
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

    def do(self, task: Task, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        own: dict[str, Outcome] = {}
        error: Exception | None = None
        try:
            for unit in deal(units, self.workers)[self.rank]:
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


def deal(units: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """Units of each rank: the largest first, each to the rank with the least so far (Graham, 1969)."""
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    filled = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit.size, unit.name)):
        size, rank = filled[0]
        dealt[rank].append(unit)
        heapq.heapreplace(filled, (size + unit.size, rank))
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

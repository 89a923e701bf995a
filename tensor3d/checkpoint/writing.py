"""Writes one checkpoint from host memory, by all ranks: beside the others, and renamed when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor3d.checkpoint import folders
from tensor3d.checkpoint.crew import Crew
from tensor3d.checkpoint.files import (
    TENSORS,
    FileSum,
    file_name,
    write_checksums,
    write_file,
    write_json,
)
from tensor3d.checkpoint.folders import PROGRESS
from tensor3d.checkpoint.plan import HostBuffer, Plan


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What one rank could not do; an OSError where the system refused it."""

    rank: int
    error: Exception

    def __str__(self) -> str:
        if isinstance(self.error, OSError):
            where = f": {self.error.filename}" if self.error.filename else ""
            return f"rank {self.rank}: {self.error.strerror or self.error}{where}"
        return f"rank {self.rank}: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Written:
    """How a save ended; the same on every rank."""

    path: Path | None
    """The checkpoint. None: there is none, and the older ones are as they were."""
    bytes: int
    problem: Problem | None
    """With a path: the checkpoint is good, but older ones could not be deleted."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One checkpoint to be written."""

    directory: Path
    step: int
    plan: Plan
    buffer: HostBuffer
    facts: dict[str, Any]
    """For progress.json, without the serial."""
    committed: Callable[[Path], None]
    """What rank 0 does next: marks, rotation."""


def write(job: Job, crew: Crew) -> Written:
    """Writes it, together with the other ranks. What any of them cannot do ends it on all."""
    partial = folders.folder_of(job.directory, job.step).with_suffix(".partial")
    refused = crew.broadcast(_attempt(crew, lambda: _begin(job)) if crew.rank == 0 else None)
    if refused is not None:
        return Written(path=None, bytes=0, problem=refused)
    mine = _attempt(crew, lambda: _write_own(job, partial, crew.rank))
    outcomes = crew.gather(mine)
    written = _finish(job, crew, partial, outcomes) if crew.rank == 0 else None
    result: Written = crew.broadcast(written)
    return result


def _begin(job: Job) -> None:
    folders.begin(job.directory, job.step)


def _write_own(job: Job, partial: Path, rank: int) -> FileSum:
    data = memoryview(job.buffer.data.numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12
    return write_file(partial / file_name(rank), [memoryview(job.plan.header), data[: job.plan.bytes]])


def _finish(job: Job, crew: Crew, partial: Path, outcomes: list[FileSum | Problem]) -> Written:
    """On rank 0: commits what all ranks have written, or takes it away."""
    problem = next((outcome for outcome in outcomes if isinstance(outcome, Problem)), None)
    if problem is None:
        sums = {file_name(rank): each for rank, each in enumerate(outcomes) if isinstance(each, FileSum)}
        committed = _attempt(crew, lambda: _commit(job, partial, sums))
        if not isinstance(committed, Problem):
            path, size = committed
            return Written(path=path, bytes=size, problem=_attempt(crew, lambda: job.committed(path)))
        problem = committed
    shutil.rmtree(partial, ignore_errors=True)  # what cannot be deleted now is cleaned up by the next run
    return Written(path=None, bytes=0, problem=problem)


def _commit(job: Job, partial: Path, sums: dict[str, FileSum]) -> tuple[Path, int]:
    sums[TENSORS] = write_file(partial / TENSORS, [memoryview(job.plan.index)])
    facts = {**job.facts, "serial": folders.next_serial(job.directory)}
    sums[PROGRESS] = write_json(partial / PROGRESS, facts)
    size = sum(each.bytes for each in sums.values()) + write_checksums(partial, sums).bytes
    return folders.commit(partial), size


def _attempt(crew: Crew, action: Callable[[], Any]) -> Any:
    """The result of an action, or the problem with it: the other ranks wait to hear of either."""
    try:
        return action()
    except Exception as error:
        return Problem(rank=crew.rank, error=error)

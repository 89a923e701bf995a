"""Writes one checkpoint from host memory, by all ranks: beside the others, and renamed when it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tensor3d.checkpoint import directory as folders
from tensor3d.checkpoint.directory import PROGRESS, SOME_SECONDS, look_again
from tensor3d.checkpoint.format import PIECE, TENSORS, FileSum, file_name, write_checksums, write_file, write_json
from tensor3d.checkpoint.save_plan import HostBuffer, LocalSavePlan
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.object_collectives import ObjectGroup
from tensor3d.files import remove

_OWN_FACTS = ("version", "step", "ranks", "cube", "optimizer", "serial")


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What one rank could not do."""

    rank: int
    error: OSError | RuntimeError
    """An OSError where the system refused it. Without traceback, which would keep the memory of the save alive."""

    def __str__(self) -> str:
        if isinstance(self.error, OSError):
            where = f": {self.error.filename}" if self.error.filename else ""
            return f"rank {self.rank}: {self.error.strerror or self.error}{where}"
        return f"rank {self.rank}: {self.error}"

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """An error of any kind: only some can be sent to other ranks."""
        if isinstance(error, OSError):
            return cls(rank=rank, error=error.with_traceback(None))
        first, *_ = [*str(error).splitlines(), ""]
        return cls(rank=rank, error=RuntimeError(f"{type(error).__name__}: {first}".removesuffix(": ")))


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """How a save ended; the same on every rank."""

    path: Path | None
    """The checkpoint. None: there is none, and the older ones are as they were."""
    bytes: int
    problems: Sequence[RankFailure] = ()
    """With a path: the checkpoint has its name, and what followed went wrong."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The same as a rank tells it: `SaveResult` with its own time, and problems in words."""

    step: int
    path: Path | None
    """The checkpoint. None: there is none, and the older ones are as they were."""
    seconds: float
    """From the call of `save` until it was on disk, on this rank."""
    bytes: int
    """Of all its files."""
    error: str | None
    """What went wrong, and on which rank. With a path: the checkpoint has its name and is good, and what followed went
    wrong: the sync of the directory, the mark of the best, or the deletion of older ones."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One checkpoint to be written."""

    directory: Path
    step: int
    plan: LocalSavePlan
    buffer: HostBuffer
    facts: dict[str, Any]
    """Of `facts_of`."""
    run: str
    """Token of the run, a part of the folder's name until it is complete."""
    wrote: Callable[[int], None]
    """Gets the size of each piece of this rank's file that is written."""
    afterwards: Sequence[Callable[[Path], None]]
    """What rank 0 does with the folder when it has its name, each also where one before it fails: marks, rotation."""

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return folders.partial_of(self.directory, self.step, self.run)

    @property
    def final(self) -> Path:
        return folders.folder_of(self.directory, self.step)


def facts_of(cube: Cube, step: int, optimizer: torch.optim.Optimizer, progress: Mapping[str, Any]) -> dict[str, Any]:
    """For progress.json, without the serial; a copy. Raises ValueError for what cannot be told there."""
    if taken := sorted(set(progress) & set(_OWN_FACTS)):
        raise ValueError(f"progress must not name {', '.join(taken)}: a checkpoint states them itself.")
    facts = {
        "version": folders.VERSION,
        "step": step,
        "ranks": cube.shape.ranks,
        "cube": str(cube.shape),
        "optimizer": type(optimizer).__name__,
        **progress,
    }
    try:
        copy: dict[str, Any] = json.loads(json.dumps(facts))
    except TypeError as problem:
        raise ValueError(f"progress must be JSON: {problem}.") from None
    return copy


def write(job: SaveRequest, crew: ObjectGroup) -> SaveResult:
    """Writes it, together with the other ranks. What any of them cannot do ends it on all."""
    refused = crew.broadcast(_attempt(crew, lambda: folders.begin(job.partial)) if crew.rank == 0 else None)
    if refused is not None:
        return SaveResult(path=None, bytes=0, problems=[refused])
    mine = _attempt(crew, lambda: _write_own(job, crew.rank))
    outcomes = crew.gather(mine)
    written = _finish(job, crew, outcomes) if crew.rank == 0 else None
    result: SaveResult = crew.broadcast(written)
    return result


def _write_own(job: SaveRequest, rank: int) -> FileSum:
    path, end = job.partial / file_name(rank), monotonic() + SOME_SECONDS
    while True:
        try:
            return write_file(path, _pieces(job))
        except FileNotFoundError:  # the folder is there: rank 0 has said so, and this machine may see it later
            if rank == 0 or monotonic() > end:
                raise
            look_again(path)


def _pieces(job: SaveRequest) -> Iterator[memoryview]:
    """This rank's file, counted as it is written."""
    data = memoryview(job.buffer.data.numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12
    yield memoryview(job.plan.header)
    for first in range(0, job.plan.bytes, PIECE):
        piece = data[first : min(first + PIECE, job.plan.bytes)]
        yield piece
        job.wrote(len(piece))


def _finish(job: SaveRequest, crew: ObjectGroup, outcomes: list[FileSum | RankFailure]) -> SaveResult:
    """On rank 0: commits what all ranks have written, or takes it away."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
    if not problems:
        sums = {file_name(rank): each for rank, each in enumerate(outcomes) if isinstance(each, FileSum)}
        size = _attempt(crew, lambda: _commit(job, sums))
        if not isinstance(size, RankFailure):
            ends = [_attempt(crew, lambda: folders.settle(job.final))]
            ends += [_attempt(crew, lambda each=each: each(job.final)) for each in job.afterwards]  # type: ignore[misc]
            return SaveResult(path=job.final, bytes=size, problems=[end for end in ends if end is not None])
        problems = [size]
    remove(job.partial)  # what cannot be deleted now is swept up by a later save
    return SaveResult(path=None, bytes=0, problems=problems[:1])


def _commit(job: SaveRequest, sums: dict[str, FileSum]) -> int:
    """Bytes of the files, which have their final name now."""
    partial = job.partial
    sums[TENSORS] = write_file(partial / TENSORS, [memoryview(job.plan.index)])
    facts = {**job.facts, "serial": folders.next_serial(job.directory)}
    sums[PROGRESS] = write_json(partial / PROGRESS, facts)
    size = sum(each.bytes for each in sums.values()) + write_checksums(partial, sums).bytes
    folders.commit(partial, job.final)
    return size


def _attempt(crew: ObjectGroup, action: Callable[[], Any]) -> Any:
    """The result of an action, or the problem with it: the other ranks wait to hear of either."""
    try:
        return action()
    except Exception as error:
        return RankFailure.of(crew.rank, error)

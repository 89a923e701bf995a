"""`Checkpoints`: saves a training while it goes on, and keeps the directory in order."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.checkpoint import folders
from tensor3d.checkpoint.crew import Crew
from tensor3d.checkpoint.plan import HostBuffer, Plan, make_plan, signature_of
from tensor3d.checkpoint.state import extra_tensors, model_tensors, optimizer_tensors, stream_tensors
from tensor3d.checkpoint.writing import Job, Problem, Written, write
from tensor3d.cube import Cube

_OWN_FACTS = ("version", "step", "ranks", "cube", "optimizer", "serial")
_PATIENCE = 30.0  # seconds for the last save when the run ends by an error: its peers may be gone


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a save ended; the same on every rank."""

    step: int
    path: Path | None
    """The checkpoint. None: there is none, and the older ones are as they were."""
    seconds: float
    """From the call of `save` until it was on disk, on this rank."""
    bytes: int
    """Of all its files."""
    error: str | None
    """What went wrong, and on which rank. With a path: the checkpoint is good, but older ones could not be deleted."""


class Checkpoints:
    """The checkpoints of one run in one directory. A context manager.

    Every rank makes one at the same point and makes the same calls in the same order. `save` copies the state to host
    memory, which is kept for the next one, and returns; a thread of low priority writes it, on a process group of its
    own, while training goes on. One save is under way at a time.

    Args:
        directory: seen by all ranks; made by the first save.
        keep_last: newest checkpoints that stay. None: all.
        keep_every: those whose step divides by it stay too.
        asynchronous: False: `save` returns when the checkpoint is on disk.
        timeout: how long a save waits for a rank that neither comes nor fails.

    Raises:
        ValueError: a number below 1.
        OSError: what a killed run has left in the directory cannot be deleted; on every rank.
    """

    def __init__(
        self,
        directory: Path,
        cube: Cube,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None. Got {value}.")
        self.directory, self.asynchronous = Path(directory), asynchronous
        self._keep_last, self._keep_every = keep_last, keep_every
        self._cube = cube
        self._crew = Crew(cube, timeout)
        self._plan: Plan | None = None
        self._buffer: HostBuffer | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of what follows, which the thread uses too
        self._outcomes: list[Outcome] = []
        self._protected: set[str] = set()
        self._best: int | None = None  # a step that is the best, once it is there
        self._problem: Problem | None = None  # of the last save
        self._broken = ""
        self._closed = False
        problem = self._crew.broadcast(self._clean() if cube.rank == 0 else None)
        if problem is not None:
            raise problem

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        extra: Mapping[str, Tensor] | None = None,
        *,
        wait: bool = False,
    ) -> float:
        """Begins a checkpoint, and returns for how many seconds the caller was blocked. How it ends, `finished` tells:
        a full disk ends no training. When it returns, parameters and optimiser may change.

        Where the save before is still being written, this waits for it first.

        Args:
            step: names the checkpoint; one of the same step is replaced.
            progress: JSON-able facts of the run, the same on every rank.
            extra: small tensors, the same on every rank.
            wait: return when it is on disk.

        Raises:
            ValueError: facts or a state that cannot be stored.
            RuntimeError: another rank was lost during a former save.
        """
        begin = perf_counter()
        self.wait()
        if self._closed:
            raise ValueError("these checkpoints are closed. Make others, on every rank.")
        if self._broken:
            raise RuntimeError(f"no checkpoint can be written any more: {self._broken}")
        facts = self._facts(step, optimizer, progress)
        state = model_tensors(model) | optimizer_tensors(model, optimizer) | extra_tensors(extra)
        state |= stream_tensors(self._cube)
        job = self._stage(step, state, facts)
        if wait or not self.asynchronous:
            self._run(job, begin)
        else:
            # A daemon: it must not keep a process that ends by an error.
            self._thread = threading.Thread(
                target=self._run_aside, args=(job, begin), name="tensor3d-checkpoint", daemon=True
            )
            self._thread.start()
        return perf_counter() - begin

    def finished(self) -> list[Outcome]:
        """The saves that have ended since the last call, oldest first. Another rank may hear of one a step later."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- what stays -----------------------------------------------------------------------------------------------

    def protect(self, path: Path) -> None:
        """Keeps a checkpoint from being rotated away by this object."""
        with self._lock:
            self._protected.add(Path(path).name)

    def mark_best(self, step: int) -> None:
        """Notes in the directory that the checkpoint of this step is the best so far, for `best`; it is not rotated
        away until another one is. One that is still being written is marked when it is there, if it ever is."""
        if self._cube.rank == 0:
            with self._lock, suppress(OSError):  # which the next save meets again, and tells
                self._best = step
                if self._thread is None or not self._thread.is_alive():
                    self._mark()

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the last save; a second call does nothing."""
        self.wait()
        self._closed = True
        self._crew.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _stage(self, step: int, state: Mapping[str, Tensor], facts: dict[str, Any]) -> Job:
        """Copies the state to host memory, by a plan that is made anew on all ranks if it no longer fits on one."""
        plan, buffer = self._plan, self._buffer
        if self._crew.any(plan is None or plan.signature != signature_of(state)) or plan is None or buffer is None:
            plan = self._plan = make_plan(state, self._crew)
            if buffer is None or buffer.data.numel() != plan.bytes:
                self._buffer = None  # before another one is made
                buffer = self._buffer = HostBuffer(plan.bytes, self._cube.device)
        buffer.fill(plan, state)
        return Job(directory=self.directory, step=step, plan=plan, buffer=buffer, facts=facts, committed=self._tidy)

    def _facts(self, step: int, optimizer: torch.optim.Optimizer, progress: Mapping[str, Any]) -> dict[str, Any]:
        if taken := sorted(set(progress) & set(_OWN_FACTS)):
            raise ValueError(f"progress must not name {', '.join(taken)}: a checkpoint states them itself.")
        facts = {
            "version": folders.VERSION,
            "step": step,
            "ranks": self._cube.shape.ranks,
            "cube": str(self._cube.shape),
            "optimizer": type(optimizer).__name__,
            **progress,
        }
        try:
            copy: dict[str, Any] = json.loads(json.dumps(facts))
        except TypeError as problem:
            raise ValueError(f"progress must be JSON: {problem}.") from None
        return copy

    def _run_aside(self, job: Job, begin: float) -> None:
        _lower_priority()
        self._run(job, begin)

    def _run(self, job: Job, begin: float) -> None:
        try:
            written = write(job, self._crew)
        except RuntimeError as error:  # of the process group: a peer is gone, and with it the group
            self._broken = f"a rank was lost while step {job.step} was saved ({str(error).splitlines()[0]})"
            written = Written(path=None, bytes=0, problem=Problem(rank=self._cube.rank, error=error))
        self._problem = written.problem
        with self._lock:
            self._outcomes.append(
                Outcome(
                    step=job.step,
                    path=written.path,
                    seconds=perf_counter() - begin,
                    bytes=written.bytes,
                    error=None if written.problem is None else str(written.problem),
                )
            )

    def _tidy(self, path: Path) -> None:
        """On rank 0, after a checkpoint has got its name."""
        with self._lock:
            self._mark()
            protected = {path.name, *self._protected}
        folders.rotate(self.directory, keep_last=self._keep_last, keep_every=self._keep_every, protected=protected)

    def _mark(self) -> None:
        if self._best is not None:
            path = folders.folder_of(self.directory, self._best)
            if path.is_dir():
                folders.mark_best(path)
                self._best = None

    def _clean(self) -> OSError | None:
        try:
            folders.clean(self.directory)
        except OSError as problem:
            return problem
        return None


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cube: Cube,
    progress: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes one checkpoint from all ranks and returns its folder, with nothing kept in memory and nothing deleted.

    Every rank calls it at the same step. Arguments are those of `Checkpoints.save`.

    Raises:
        OSError: the folder cannot be written; on every rank.
    """
    with Checkpoints(directory, cube, keep_last=None, asynchronous=False) as checkpoints:
        checkpoints.save(step, model, optimizer, progress, extra)
    if checkpoints._problem is not None:
        raise checkpoints._problem.error
    return folders.folder_of(Path(directory), step)


def _lower_priority() -> None:
    """Lets the threads that train go first. On Linux priority belongs to a thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

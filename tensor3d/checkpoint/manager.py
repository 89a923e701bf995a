"""`Checkpoints`: saves a training while it goes on, and keeps the directory in order."""

from __future__ import annotations

import math
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tensor3d.checkpoint import directory as folders
from tensor3d.checkpoint.directory import check_shared
from tensor3d.checkpoint.save_plan import HostBuffer, LocalSavePlan, make_plan, signature_of
from tensor3d.checkpoint.state import extra_tensors, fp8_tensors, model_tensors, optimizer_tensors, stream_tensors
from tensor3d.checkpoint.writer import RankFailure, RankResult, SaveRequest, SaveResult, facts_of, write
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.host_all_to_all import PeerError
from tensor3d.distributed.object_collectives import ObjectGroup, check_copies

# --- Work in a thread of its own, for which another thread waits without falling silent -------------------------------

T = TypeVar("T")
_POLL = 0.1  # seconds


class BackgroundTask(Generic[T]):
    """Begins at once.

    Args:
        action: what is done. It is forgotten afterwards, with all that it holds.
        low_priority: let the threads that train go first. On Linux priority belongs to a thread.
    """

    def __init__(self, action: Callable[[], T], *, low_priority: bool = False) -> None:
        self._action: Callable[[], T] | None = action
        self._low_priority = low_priority
        self._result: T | None = None
        self._error: Exception | None = None
        # A daemon: it must not keep a process that ends by an error.
        self._thread = threading.Thread(target=self._run, name="tensor3d-checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, waiting: Callable[[], None], limit: float = math.inf) -> None:
        """Until it is done, or `limit` seconds have passed; `waiting` is called about every 0.1 s of it."""
        end = monotonic() + limit
        self._thread.join(min(_POLL, limit))
        while self.running and monotonic() < end:
            waiting()
            self._thread.join(_POLL)

    def result(self) -> T:
        """What the action has returned; raises what it has raised. After `wait`."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # no error, so there is a result

    def _run(self) -> None:
        action, self._action = self._action, None
        assert action is not None
        if self._low_priority and sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            self._result = action()
        except Exception as error:
            self._error = error


def on_this_stream(action: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """The action for another thread, whose device and stream are the first GPU and its default stream, unless told: on
    another stream it would read what this one has still to write."""
    if device.type != "cuda":
        return action
    stream = torch.cuda.current_stream(device)

    def act() -> T:
        with torch.cuda.stream(stream):
            return action()

    return act


# --- `Checkpoints` ----------------------------------------------------------------------------------------------------

_PATIENCE = 30.0  # seconds for the last save when the run ends by an error: its peers may be gone


class Checkpoints:
    """The checkpoints of one run in one directory. A context manager.

    Every rank makes one at the same point and makes the same calls in the same order. `save` copies the state to host
    memory, which is kept for the next one, and returns; a thread of low priority writes it, on a process group of its
    own, while training goes on. One save is under way at a time.

    Args:
        directory: seen by all ranks, which is tried; made if it is not there.
        keep_last: newest checkpoints that stay. None: all.
        keep_every: those whose step divides by it stay too.
        asynchronous: False: `save` returns when the checkpoint is on disk.
        timeout: how long a save waits for a rank that neither comes nor fails.
        waiting: called about every 0.1 s from the thread of the caller, while a call of this object blocks it, with the
            bytes that this rank has written of the save under way: a sign of life for a watch over hangs.

    Raises:
        ValueError: a number below 1, or a rank does not see the directory of rank 0, or there can be none of that name;
            on every rank.
        OSError: the directory cannot be made; on every rank.
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
        waiting: Callable[[int], None] | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None. Got {value}.")
        self.directory, self.asynchronous = Path(directory), asynchronous
        self._keep_last, self._keep_every = keep_last, keep_every
        self._cube = cube
        self._crew = ObjectGroup(cube, timeout)
        self._plan: LocalSavePlan | None = None
        self._buffer: HostBuffer | None = None
        self._waiting = waiting
        self._task: BackgroundTask[Any] | None = None  # one at a time
        self._written = 0  # bytes of the save under way
        self._lock = threading.Lock()  # of what follows, which the thread uses too
        self._outcomes: list[RankResult] = []
        self._protected: set[str] = set()
        self._best: int | None = None  # a step that is the best, once it is there
        self._problem: RankFailure | None = None  # the first one of the last save
        self._broken = ""
        self._closed = False
        self._run = self._apart(self._open)

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
            ValueError: facts or a state that cannot be stored; copies of a parameter that differ.
            PeerError: another rank was lost during a former save.
        """
        begin = perf_counter()
        self.wait()
        if self._closed:
            raise ValueError("these checkpoints are closed. Make others, on every rank.")
        if self._broken:
            raise PeerError(f"no checkpoint can be written any more: {self._broken}")
        facts = facts_of(self._cube, step, optimizer, progress)
        state = model_tensors(model) | optimizer_tensors(model, optimizer) | extra_tensors(extra)
        # Whatever the precision of this object's cube is: the model may be one of `Cube.with_policy`.
        state |= fp8_tensors(model)
        self._apart(on_this_stream(lambda: check_copies(state, self._cube), self._cube.device))
        state |= stream_tensors(self._cube)
        job = self._stage(step, state, facts)
        waits = wait or not self.asynchronous
        self._task = BackgroundTask(lambda: self._write(job, begin), low_priority=not waits)
        if waits:
            self.wait()
        return perf_counter() - begin

    def finished(self) -> list[RankResult]:
        """The saves that have ended since the last call, oldest first. Another rank may hear of one a step later."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._task is not None:
            self._task.wait(self._alive)
            self._task = None

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
                if self._task is None or not self._task.running:
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
        if error is None or isinstance(error, FloatingPointError):  # which all ranks raise alike
            self.close()
            return
        self._closed = True
        if self._task is not None:
            self._task.wait(self._alive, _PATIENCE)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _apart(self, action: Callable[[], T]) -> T:
        """What an action returns or raises that waits for other ranks; meanwhile this thread gives signs of life."""
        self._written = 0
        task = self._task = BackgroundTask(action)
        self.wait()
        return task.result()

    def _alive(self) -> None:
        if self._waiting is not None:
            self._waiting(self._written)

    def _open(self) -> str:
        """Makes the directory ready, with all ranks. The token of this run."""
        check_shared(self.directory, self._crew)
        if self._cube.rank == 0:
            folders.clean(self.directory)
        return str(self._crew.broadcast(secrets.token_hex(4) if self._cube.rank == 0 else None))

    def _stage(self, step: int, state: Mapping[str, Tensor], facts: dict[str, Any]) -> SaveRequest:
        """Copies the state to host memory, by a plan that is made anew on all ranks if it no longer fits on one."""
        plan = self._plan = self._apart(lambda: self._plan_for(state))
        if self._buffer is None or self._buffer.data.numel() != plan.bytes:
            self._buffer = None  # first: two would be twice the memory
            self._buffer = HostBuffer(plan.bytes, self._cube.device)
        self._buffer.fill(plan, state)
        return SaveRequest(
            directory=self.directory,
            step=step,
            plan=plan,
            buffer=self._buffer,
            facts=facts,
            run=self._run,
            wrote=self._count,
            afterwards=(self._mark_waiting, self._rotate, lambda path: folders.sweep(path.parent)),
        )

    def _plan_for(self, state: Mapping[str, Tensor]) -> LocalSavePlan:
        plan = self._plan
        if self._crew.any(plan is None or plan.signature != signature_of(state)) or plan is None:
            return make_plan(state, self._crew)
        return plan

    def _count(self, size: int) -> None:
        self._written += size

    def _write(self, job: SaveRequest, begin: float) -> None:
        try:
            written = write(job, self._crew)
        except Exception as error:  # a RuntimeError of the process group: a peer is gone, and with it the group
            problem = RankFailure.of(self._cube.rank, error)
            what = "a rank was lost" if isinstance(error, RuntimeError) else "something went wrong"
            self._broken = f"{what} while step {job.step} was saved ({problem})"
            written = SaveResult(path=None, bytes=0, problems=[problem])
        self._problem = next(iter(written.problems), None)
        with self._lock:
            self._outcomes.append(
                RankResult(
                    step=job.step,
                    path=written.path,
                    seconds=perf_counter() - begin,
                    bytes=written.bytes,
                    error="; ".join(map(str, written.problems)) or None,
                )
            )

    def _mark_waiting(self, _: Path) -> None:
        """On rank 0, after a checkpoint has got its name."""
        with self._lock:
            self._mark()

    def _rotate(self, path: Path) -> None:
        """On rank 0, after a checkpoint has got its name."""
        with self._lock:
            protected = {path.name, *self._protected}
            if self._best is not None:  # it could not be marked
                protected.add(folders.folder_of(self.directory, self._best).name)
        folders.rotate(self.directory, keep_last=self._keep_last, keep_every=self._keep_every, protected=protected)

    def _mark(self) -> None:
        if self._best is not None:
            path = folders.folder_of(self.directory, self._best)
            if path.is_dir():
                folders.mark_best(path)
                self._best = None


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
        OSError: the folder cannot be written, or what belongs to it not be done afterwards; on every rank.
    """
    with Checkpoints(directory, cube, keep_last=None, asynchronous=False) as checkpoints:
        checkpoints.save(step, model, optimizer, progress, extra)
    if checkpoints._problem is not None:
        raise checkpoints._problem.error
    return folders.folder_of(Path(directory), step)

"""Groups of processes that each hold one cube and stay alive, so that cubes can be measured in turn.

`LocalGroup` starts processes on this machine, as many as its cube needs. `TorchrunGroup` uses those that torchrun
started. Both do the same: `make` builds a session on every rank, `call` runs a function on it and returns the results
by rank.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.distributed import process_group
from tools.common.log import progress
from tools.common.workers import usable_cores

# What costs a second or more to import. The server imports it once, and processes are forked from it.
_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "tools.bench.harness.step_trial",
    "tools.bench.scaling",
    "tools.bench.padding",
    "tools.bench.shard_exchange",
]
_TIMEOUT = timedelta(minutes=10)


class RankFailedError(RuntimeError):
    """A process of a group failed; the message holds its traceback."""


class Worker(Protocol):
    """What lives on a rank between two calls."""

    def close(self) -> None: ...


S = TypeVar("S", bound=Worker)
S_co = TypeVar("S_co", bound=Worker, covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class Trial:
    """Something that is measured in turns with others, on one rank; halted between calls. `facts` do not change."""

    facts: Any

    def sample(self, *case: Any) -> Any:
        """What one step took."""
        raise NotImplementedError

    def turn(self, steps: int, *case: Any) -> list[Any]:
        """`steps` samples. One more goes first and counts for nothing: others had the caches in between."""
        return [self.sample(*case) for _ in range(1 + steps)][1:]

    def get_facts(self) -> Any:
        return self.facts

    def close(self) -> None:
        """Nothing is open."""


class Group(Protocol[S_co]):
    """The ranks of one cube."""

    shape: CubeShape

    def call(self, action: Callable[Concatenate[S_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Runs `action(session, ...)` on every rank; the results, by rank."""

    def close(self) -> None:
        """Ends what the group has started."""


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """What a process must know to join its group."""

    shape: CubeShape
    rank: int
    meeting: str
    """The file in which the group's store is."""
    cuda: bool
    """A GPU for each rank, with NCCL; else the CPU, with gloo."""
    threads: int
    """Threads of PyTorch in this process."""


class LocalGroup(Generic[S]):
    """Processes of this machine that hold one cube, from construction to `close`.

    Args:
        make: builds the session on each rank. Picklable, as is everything that goes through `call`.
        cuda: give every rank a GPU of its own.
        cores: shared out among the ranks as threads, at least one each.

    Raises:
        RankFailedError: also by `call`. All processes of the group are gone then.
    """

    def __init__(self, shape: CubeShape, make: Callable[[Cube], S], *, cuda: bool, cores: int) -> None:
        self.shape = shape
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        # Not a TCPStore: it looks up the name of each caller, for 5 s where the name server is deaf.
        folder = tempfile.mkdtemp(prefix="tensor3d-group-")
        self._forget = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            for rank in range(shape.ranks):
                place = WorkerProcess(
                    shape=shape,
                    rank=rank,
                    meeting=os.path.join(folder, "store"),
                    cuda=cuda,
                    threads=max(1, cores // shape.ranks),
                )
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(target=_rank_main, args=(theirs, place, make), daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()
            self._collect()
        except BaseException:
            self.close()
            raise

    def call(self, action: Callable[Concatenate[S, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send((action, args, kwargs))
                except OSError:  # died while it had nothing to do
                    self._raise_dead(rank)
            return cast(list[R], self._collect())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills what still runs: nothing is in flight, or nobody wants it any more."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._forget()

    def _collect(self) -> list[Any]:
        """One answer of every rank. The first failure is raised at once: its peers may wait for it for ever."""
        answers: dict[int, Any] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = wait(list(waiting.values()))
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                try:
                    well, answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._raise_dead(rank)
                if not well:
                    self._raise_if_one_died()
                    raise RankFailedError(f"rank {rank} of {self.shape} failed:\n{answers[rank]}")
                del waiting[rank]
        return [answers[rank] for rank in range(len(self._pipes))]

    def _raise_if_one_died(self) -> None:
        """A rank that died is the cause of what its peers complain about, whoever is heard first."""
        dead = wait([process.sentinel for process in self._processes], timeout=0.5)
        for rank, process in enumerate(self._processes):
            if process.sentinel in dead:
                self._raise_dead(rank)

    def _raise_dead(self, rank: int) -> NoReturn:
        process = self._processes[rank]
        process.join(5)
        raise RankFailedError(f"rank {rank} of {self.shape} died with exit code {process.exitcode}") from None


class TorchrunGroup(Generic[S]):
    """The same on the processes that torchrun started: all of them hold one cube. Every rank makes the same calls.

    Raises:
        ValueError: the cube does not have as many ranks as there are processes; before connecting.
    """

    def __init__(self, shape: CubeShape, make: Callable[[Cube], S]) -> None:
        self.shape = shape
        self.cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data)
        self._session = make(self.cube)

    def call(self, action: Callable[Concatenate[S, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        answers: list[Any] = [None] * self.shape.ranks
        dist.barrier()  # all ranks have ended what came before
        dist.all_gather_object(answers, action(self._session, *args, **kwargs))
        return answers

    def close(self) -> None:
        self._session.close()


def _rank_main(pipe: Connection, place: WorkerProcess, make: Callable[[Cube], Any]) -> None:
    # Ctrl-C reaches every process of the terminal; the parent hears it too and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        torch.set_num_threads(place.threads)
        session = make(_join(place))
        pipe.send((True, None))
        while True:
            action, args, kwargs = pipe.recv()
            pipe.send((True, action(session, *args, **kwargs)))
    except BaseException:
        try:
            pipe.send((False, traceback.format_exc()))
            # To be killed: peers that saw this process vanish would fail too, and might be heard first.
            pipe.recv()
        except (EOFError, OSError):
            pass  # the parent is gone, which is also how an idle process learns that it is
    finally:
        os._exit(0)  # without a farewell round, for which peers would have to be alive


def _join(place: WorkerProcess) -> Cube:
    shape = place.shape
    device = torch.device("cuda", place.rank) if place.cuda else torch.device("cpu")
    if place.cuda:
        torch.cuda.set_device(device)
    if shape.ranks > 1:  # one rank on its own has no process group, as in training
        store = dist.FileStore(place.meeting, shape.ranks)
        store.set_timeout(_TIMEOUT)
        dist.init_process_group(
            "nccl" if place.cuda else "gloo", store=store, rank=place.rank, world_size=shape.ranks, timeout=_TIMEOUT
        )
    return Cube(shape.x, shape.y, shape.z, shape.data, device=device)


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# --- Several cubes of one size on the same processes: ten boxes of 8 ranks need 8 processes and not 80 ----------------


class CubePool(Generic[S]):
    """What lives on a rank: a session for each cube, with its axes dealt to nodes as those of the first one.

    Args:
        cube: the first of them.
        make: builds the session of a cube.
    """

    def __init__(self, cube: Cube, make: Callable[[Cube], S]) -> None:
        self._first, self._make = cube, make
        self._sessions: list[S] = []

    def join(self, shape: CubeShape) -> int:
        """Adds a cube of that shape; returns its number. Every rank does it at the same time."""
        self._sessions.append(self._make(self._cube(shape)))
        return len(self._sessions) - 1

    def _cube(self, shape: CubeShape) -> Cube:
        first = self._first
        placed = shape if first.ranks_per_node is None else shape.placed(first.ranks_per_node)
        if placed == first.shape:
            return first
        return Cube(shape.x, shape.y, shape.z, shape.data, device=first.device, wire=placed.wire)

    def act(self, number: int, action: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return action(self._sessions[number], *args, **kwargs)

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class CubeHandle(Generic[S]):
    """One cube of a group of processes that hold several. The processes end with their group."""

    def __init__(self, group: Group[CubePool[S]], shape: CubeShape) -> None:
        self.shape = shape
        self._group = group
        self._number = group.call(CubePool.join, shape)[0]

    def call(self, action: Callable[Concatenate[S, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._group.call(CubePool.act, self._number, action, args, kwargs)

    def close(self) -> None:
        pass


def check_world(shapes: Sequence[CubeShape]) -> None:
    """Raises ValueError where cubes of different sizes are to share the processes that torchrun started."""
    if process_group.is_launched() and len({shape.ranks for shape in shapes}) > 1:
        needs = ", ".join(f"{shape} {shape.ranks}" for shape in shapes)
        raise ValueError(
            f"under torchrun all cubes share the same processes, and these need different numbers: {needs}. Name cubes "
            "of one size, or call python -m tools.bench itself, which starts what each cube needs on this machine."
        )


def start(
    shapes: Sequence[CubeShape],
    make: Callable[[Cube], S],
    stack: ExitStack,
    *,
    shared: bool = True,
    cuda: bool | None = None,
    cores: int | None = None,
) -> list[CubeHandle[S]]:
    """Every cube with its sessions, on processes of this machine or on those of torchrun; they end with the stack.

    Args:
        make: builds the session of a cube on each rank. Picklable.
        shared: whether cubes of one size live on the same processes of this machine. Those of torchrun they share.
        cuda: a GPU for each rank of this machine. Default: if there are enough for the largest cube.
        cores: shared out among the ranks of each cube as threads. Default: all.

    Raises:
        RankFailedError: a session could not be made.
    """
    if process_group.is_launched():
        stack.callback(disconnect)
    if cuda is None:  # all on GPUs or none: figures of different devices are no comparison
        cuda = torch.cuda.device_count() >= max(shape.ranks for shape in shapes)
    pool = partial(CubePool[S], make=make)
    groups: dict[int, Group[CubePool[S]]] = {}
    parts = []
    for number, shape in enumerate(shapes):
        key = shape.ranks if shared or process_group.is_launched() else number
        if key not in groups:
            groups[key] = (
                TorchrunGroup(shape, pool)
                if process_group.is_launched()
                else LocalGroup(shape, pool, cuda=cuda, cores=cores or usable_cores())
            )
            stack.callback(groups[key].close)
        parts.append(CubeHandle(groups[key], shape))
    return parts


def is_shown() -> bool:
    """Whether this process is the one that tells: under torchrun, rank 0. To be asked while ranks are connected."""
    return not dist.is_initialized() or dist.get_rank() == 0


# --- Measurements in turns: whatever else slows the machine down meets all of them alike ------------------------------


def interleave(
    names: Sequence[str], rounds: int, turn: Callable[[int, int], R], *, shown: bool = True
) -> list[list[R]]:
    """What `turn(i, number)` returned, for each i by round.

    Every second round runs backwards, so that none always follows the same one.

    Args:
        names: of what is measured, for the progress bar; they may repeat.
        turn: measures number i once, in that round.
    """
    results: list[list[R]] = [[] for _ in names]
    with progress(total=rounds * len(names), unit="turn", shown=shown) as bar:
        for number in range(rounds):
            for i in range(len(names)) if number % 2 == 0 else reversed(range(len(names))):
                bar.set_postfix_str(names[i])
                results[i].append(turn(i, number))
                bar.update()
    return results


def take_turns(
    parts: Sequence[Group[Any]], counts: Sequence[int], *, names: Sequence[str] = (), shown: bool = True
) -> list[list[list[list[Any]]]]:
    """The samples of each part's trial, by round, rank and step.

    Args:
        counts: steps of a turn, for each round.
        names: of the parts. Default: their shapes.
    """
    return interleave(
        names or [str(part.shape) for part in parts],
        len(counts),
        lambda i, number: parts[i].call(Trial.turn, counts[number]),
        shown=shown,
    )


def take_case_turns(
    part: Group[Any], cases: Mapping[str, tuple[Any, ...]], counts: Sequence[int], *, shown: bool = True
) -> list[list[list[list[Any]]]]:
    """The samples of each case of one part's trial, by round, rank and step.

    Args:
        cases: what `Trial.sample` is given, by a name for the progress bar.
    """
    given = list(cases.values())
    return interleave(
        list(cases),
        len(counts),
        lambda i, number: part.call(Trial.turn, counts[number], *given[i]),
        shown=shown,
    )


# --- With how many threads torch computes -----------------------------------------------------------------------------


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Inside, torch uses that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

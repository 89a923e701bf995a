"""Runs a function on real gloo ranks of this machine: a forkserver with torch preloaded starts 8 in a moment."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = (
    *("torch", "torch.distributed.tensor", "torch._dynamo", "numpy", "tensor3d.testing"),
    *("tensor3d.batches.padded", "tensor3d.explain", "tensor3d.layers.transformer", "tensor3d.parallelize"),
)
"""What the forkserver imports once, so that no rank has to. The first DTensor of a process imports torch._dynamo."""


class RankError(AssertionError):
    """The first rank that failed, with its traceback."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank that was started."""

    number: int
    process: ForkServerProcess
    pipe: Connection

    def result(self) -> Any:
        """What its body returned. Raises RankError where that raised, or the process ended without a word."""
        try:
            succeeded, value = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(5)
            raise RankError(
                f"rank {self.number} died with exit code {self.process.exitcode} before it reported; what it wrote "
                "last stands above. Where that is an error of importing the script, see to it that the script can be "
                'imported: its work belongs below `if __name__ == "__main__":`.'
            ) from None
        if not succeeded:
            raise RankError(f"rank {self.number} failed:\n{value}")
        return value


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `body(*args)` on `world` processes with an initialised gloo process group; their results by rank.

    Every process is a rank on the CPU with one thread. `body` makes its cube itself: `Cube(2, 2, 2)` for 8 of them. In
    a script, call this below `if __name__ == "__main__":`, for every rank imports the script anew.

    Args:
        world: number of ranks.
        body: a function at the top level of a module, or `functools.partial` of one; with its `args` it is pickled.
        timeout: seconds that a collective may wait, and that may pass without any rank's result.

    Raises:
        ValueError: `body`, `args` or the caller cannot be brought to other processes; before any is started.
        RankError: a rank raised (its traceback stands in the message), died or did not finish. All ranks are ended.
    """
    with started(world, body, *args, timeout=timeout) as ranks:
        return collect(ranks, timeout)


@contextmanager
def started(
    world: int, body: Callable[..., Any], *args: Any, timeout: float, preload: Sequence[str] = PRELOAD
) -> Iterator[list[Rank]]:
    """The ranks of `run_ranks`, whose results are still to come; at the end all are killed, also one that is stopped.

    Raises:
        ValueError: as `run_ranks`.
    """
    if world < 1:
        raise ValueError(f"the number of ranks must be at least 1. Got {world}.")
    check_may_start()
    work = pickled(body, *args)
    ranks: list[Rank] = []
    # Not a TCPStore: it looks up the name of each caller, for 5 s where the name server is deaf.
    folder = tempfile.TemporaryDirectory(prefix="tensor3d-ranks-", ignore_cleanup_errors=True)
    store = os.path.join(folder.name, "store")
    try:
        start(ranks, world, preload, _rank_main, work, store, timeout)
        yield ranks
    finally:
        end(ranks)
        folder.cleanup()


def start(ranks: list[Rank], world: int, preload: Sequence[str], target: Callable[..., None], *args: Any) -> None:
    """Begins `target(pipe, rank, world, *args)` on `world` processes, each of which joins `ranks` before it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    for number in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, number, world, *args), daemon=True)
        ranks.append(Rank(number=number, process=process, pipe=ours))
        process.start()
        theirs.close()


def end(ranks: Sequence[Rank]) -> None:
    """Kills all, those that have begun, and waits until they are gone."""
    begun = [rank for rank in ranks if rank.process.pid is not None]
    for rank in begun:
        rank.process.kill()
    for rank in begun:
        rank.process.join()
    for rank in ranks:
        rank.pipe.close()


def check_may_start() -> None:
    """Raises ValueError in a process that is itself being started, and would start others without end."""
    # What multiprocessing itself looks at: this process is a rank that is still importing the caller's script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            "ranks import the script that starts them, and this one would start ranks while it is imported. Put the "
            'call below `if __name__ == "__main__":`.'
        )


def check_sendable(body: Callable[..., Any]) -> None:
    """Raises ValueError for a function or class that other processes could not find."""
    pickled(body)


def pickled(body: Callable[..., Any], *args: Any) -> bytes:
    """A call as it is sent to other processes. Raises ValueError where they could not find or read it."""
    name = getattr(body, "__qualname__", None) or repr(body)
    name = f"{name} and its arguments" if args else name
    remedy = (
        "Ranks are processes of their own and find functions and classes by name: define them at the top level of a "
        "module, and use functools.partial instead of a lambda."
    )
    try:
        work = pickle.dumps((body, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{name} cannot be sent to other processes: {error}. {remedy}") from error
    main = sys.modules["__main__"]
    if b"__main__" in work and not os.path.isfile(getattr(main, "__file__", "")):
        raise ValueError(f"{name} comes from an interactive session, which other processes cannot import. {remedy}")
    return work


def hang_error(missing: Sequence[int], timeout: float) -> RankError:
    """What is to be raised where ranks do not report."""
    return RankError(
        f"ranks {sorted(missing)} did not finish within {timeout} s. Does every rank come to the same collectives, in "
        "the same order?"
    )


def collect(ranks: Sequence[Rank], timeout: float) -> list[Any]:
    """Their results by rank. Raises RankError as `run_ranks`."""
    results: dict[int, Any] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=timeout)
        if not ready:
            raise hang_error([rank.number for rank in waiting.values()], timeout)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            results[rank.number] = rank.result()
    return [results[rank.number] for rank in ranks]


def _rank_main(pipe: Connection, rank: int, world: int, work: bytes, path: str, timeout: float) -> None:
    torch.set_num_threads(1)
    faulthandler.enable(2)
    try:
        body, args = pickle.loads(work)
        limit = timedelta(seconds=timeout)
        store = dist.FileStore(path, world)
        store.set_timeout(limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        message = pickle.dumps((True, body(*args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    pipe.close()
    # The parent kills all ranks when it has heard from each. Until then stay: a peer may still be connecting to this
    # one. There is no farewell round, for a peer may also be gone already.
    time.sleep(timeout)
    os._exit(0)

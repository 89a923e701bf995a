"""Runs a function on real gloo ranks in plain pytest: a forkserver with torch preloaded starts 8 in a moment."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "numpy",
    "pytest",
    "tests.ranks",
]


class RankError(AssertionError):
    """The first rank that failed, with its traceback."""


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `body(*args)` on `world` ranks with an initialised process group, and returns their results by rank.

    `body` and `args` must be picklable. A failing rank ends all others, and its traceback is raised here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    pipes, processes = [], []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(theirs, body, args, rank, world, store.port, timeout), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def run_survivors(world: int, lost: int, body: Callable[..., Any], *args: Any, timeout: float = 60.0) -> dict[int, Any]:
    """Like `run_ranks`, of ranks of which `lost` does not live to return; results of the others by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = {}, []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(theirs, body, args, rank, world, store.port, timeout))
            process.start()
            theirs.close()
            pipes[rank] = ours
            processes.append(process)
        results = {}
        for rank, pipe in pipes.items():
            if rank != lost:
                assert wait([pipe], timeout), f"rank {rank} hangs"
                ok, results[rank] = pickle.loads(pipe.recv_bytes())
                assert ok, results[rank]
        return results
    finally:
        for process in processes:
            process.kill()  # also one that is stopped
            process.join()


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    rank_of = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    waiting = list(pipes)
    while waiting:
        ready = wait(waiting, timeout=timeout)
        if not ready:
            missing = sorted(rank_of[id(pipe)] for pipe in waiting)
            raise RankError(f"ranks {missing} did not finish within {timeout} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = rank_of[id(pipe)]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                raise RankError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
            waiting.remove(pipe)
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, port: int, timeout: float
) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
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

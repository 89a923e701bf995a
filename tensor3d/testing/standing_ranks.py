"""Ranks that stay: processes with their process group that run one function after another, for whole test suites."""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tensor3d.distributed.group_teardown import destroy, let_go
from tensor3d.live_objects import objects_of
from tensor3d.testing.process_state import ProcessState
from tensor3d.testing.processes import PRELOAD, Rank, check_may_start, collect, end, hang_error, pickled, start
from tensor3d.torch_private import collectives_issued, default_group, forget_shardings, group_table

_MEETING = timedelta(seconds=30)
"""That the ranks are given to meet before a function begins; who does not come is in another collective."""

_ANSWER = 60.0
"""Seconds that a rank may take to meet the others, and to put its process back."""


class StandingRanks:
    """Ranks on the CPU that stay alive between calls: what takes `run_ranks` most of a second takes milliseconds.

    The ranks are those of `run_ranks`: gloo, one thread each. A function finds each of them as a new process would be:
    settings of torch, random generators, environment, signal handlers, warnings, logging, and what modules of
    `packages` hold are put back after each call; process groups that a function made are destroyed. Ranks are ended,
    and new ones started for the next call, where a function raised, hung or killed one, where it left a thread or a
    process running, or where the ranks no longer agree on the collectives that were issued.

    Not put back: imports, what stands in memory at most (the peak of a process is that of all functions before), and
    whatever a function changes outside of the process.

        with StandingRanks() as ranks:
            ranks.run(8, body, 1)
            ranks.run(8, other)

    Args:
        preload: modules that are imported once, so that no rank has to.
        packages: top-level packages whose modules are put back; those under test.
    """

    def __init__(self, *, preload: Sequence[str] = PRELOAD, packages: Sequence[str] = ("tensor3d",)) -> None:
        self._preload, self._packages = tuple(preload), tuple(packages)
        self._worlds: dict[int, _World] = {}
        self.starts: list[str] = []
        """For each start of ranks, why it was needed."""

    def run(self, world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls `body(*args)` on `world` ranks; their results by rank. Arguments and errors as of `run_ranks`."""
        if world < 1:
            raise ValueError(f"the number of ranks must be at least 1. Got {world}.")
        check_may_start()
        work = pickled(body, *args)
        reason = self._end_unusable(world)
        if world not in self._worlds:
            self._start(world, reason or "first use")
        try:
            if not self._worlds[world].meet(timeout):
                self._end(world)
                self._start(world, "the ranks before it did not come together")
                assert self._worlds[world].meet(timeout), "new ranks do not come together"
            return self._worlds[world].call(work, timeout)
        except BaseException:
            self._end(world)
            raise

    def close(self) -> None:
        """Ends all ranks."""
        for world in list(self._worlds):
            self._end(world)

    def __enter__(self) -> StandingRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, world: int, reason: str) -> None:
        self._worlds[world] = _World(world, self._preload, self._packages)
        self.starts.append(f"{world} ranks: {reason}")

    def _end(self, world: int) -> None:
        if world in self._worlds:
            self._worlds.pop(world).end()

    def _end_unusable(self, world: int) -> str:
        """Ends the ranks of this number where a call before spoilt them; says how."""
        if world not in self._worlds:
            return "those before it failed" if any(start.startswith(f"{world} ranks") for start in self.starts) else ""
        left = self._worlds[world].left_over()
        if left:
            self._end(world)
        return left


class _World:
    """The standing ranks of one world size."""

    def __init__(self, world: int, preload: Sequence[str], packages: Sequence[str]) -> None:
        self._ranks: list[Rank] = []
        self._settling = False
        self._generation, self._timeout = 0, 0.0
        try:
            start(self._ranks, world, preload, _serve, packages)
            if not wait([self._ranks[0].pipe], _ANSWER):
                raise hang_error([0], _ANSWER)
            port = self._ranks[0].result()
            self._tell(port)
        except BaseException:
            self.end()
            raise

    def meet(self, timeout: float) -> bool:
        """Whether all ranks came together, in a new process group where the one before is gone or has another limit."""
        self._settle()
        if timeout != self._timeout:
            self._generation, self._timeout = self._generation + 1, timeout
        self._tell((self._generation, timeout, os.getcwd(), list(sys.path)))
        return all(self._answers())

    def call(self, work: bytes, timeout: float) -> list[Any]:
        """Results by rank."""
        for rank in self._ranks:
            rank.pipe.send_bytes(work)
        results = collect(self._ranks, timeout)
        # Only now: what one rank drops, another may still be receiving from.
        self._tell("settle")
        self._settling = True
        return results

    def left_over(self) -> str:
        """What the last function left on the ranks that cannot be put back; empty where they are as new."""
        try:
            return self._settle()
        except AssertionError as error:
            return str(error)

    def end(self) -> None:
        end(self._ranks)

    def _settle(self) -> str:
        if not self._settling:
            return ""
        self._settling = False
        reports = self._answers()
        issued = {count for _, count in reports}
        if len(issued) > 1 or None in issued:
            self._generation += 1
        return "; ".join(f"rank {number} left {', '.join(left)}" for number, (left, _) in enumerate(reports) if left)

    def _answers(self) -> list[Any]:
        """What every rank answers between two functions. Raises RankError where one does not."""
        for rank in self._ranks:
            if not wait([rank.pipe], _ANSWER):
                raise hang_error([rank.number], _ANSWER)
        return [rank.result() for rank in self._ranks]

    def _tell(self, message: Any) -> None:
        for rank in self._ranks:
            rank.pipe.send(message)


def _serve(pipe: Connection, rank: int, world: int, packages: Sequence[str]) -> None:
    """A standing rank: meets the others, runs what it is sent, puts back what that changed; again and again."""
    torch.set_num_threads(1)
    faulthandler.enable(2)  # one that a signal kills says where it was
    try:
        if rank == 0:
            store, port = _open_store()
            pipe.send_bytes(pickle.dumps((True, port)))
            pipe.recv()
        else:
            store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, wait_for_workers=False)
        state = ProcessState(packages)
        caches = dict.fromkeys(_caches_of_torch())
        # So that later collections see only what functions leave behind. None runs before: it would write into every
        # object that this process shares with its forkserver, and the system copies what is written, 0.25 s a rank.
        gc.freeze()
        generation, group, functions = -1, None, 0
        ending: list[threading.Thread] = []
        while True:
            wanted, timeout, folder, paths = pipe.recv()
            for thread in ending:
                thread.join()
            os.chdir(folder)
            sys.path[:] = paths
            if wanted != generation:
                _connect(store, rank, world, wanted, timedelta(seconds=timeout))
                generation, group = wanted, dist.group.WORLD
            functions += 1
            _give_store(dist.PrefixStore(f"function {functions}", store))
            pipe.send_bytes(pickle.dumps((True, _met())))
            pipe.send_bytes(_called(pipe.recv_bytes(), state))
            pipe.recv()
            left, ending = _settle(state, caches)
            pipe.send_bytes(pickle.dumps((True, (left, _issued(group)))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone, or has ended this rank
    os._exit(0)


def _called(work: bytes, state: ProcessState) -> bytes:
    try:
        body, args = pickle.loads(work)
        state.watch_new_modules()
        return pickle.dumps((True, body(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _open_store() -> tuple[dist.TCPStore, int]:
    """A store and its port, which no other machine reaches: left alone, TCPStore listens on all addresses."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    taken = listener.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=taken), port


def _connect(store: dist.Store, rank: int, world: int, generation: int, limit: timedelta) -> None:
    """Leaves the process group that there is, and makes the next one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store.set_timeout(limit)
    own = dist.PrefixStore(f"generation {generation}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=limit)


def _give_store(store: dist.Store) -> None:
    """Lets the group of all ranks use this store from now on: a function must not meet the keys of those before it."""
    known, group = group_table(), default_group()
    backend, _ = known[group]
    known[group] = backend, store


def _met() -> bool:
    try:
        return bool(dist.barrier(async_op=True).wait(_MEETING))
    except RuntimeError:
        return False


def _settle(
    state: ProcessState, caches: dict[functools._lru_cache_wrapper[Any], None]
) -> tuple[list[str], list[threading.Thread]]:
    """Puts the process back: what could not be, and the threads in which groups end, for as long as the next function
    is not there. Adds to `caches` those of modules that were imported since."""
    left = state.put_back()
    groups = [group for group in group_table() if group is not dist.group.WORLD]
    for group in groups:
        destroy(group)  # which a thread of a cube that ended by itself may be at
        del group
    # A mesh equals any other of its shape: one that DTensor has in a cache would be used although its groups are gone.
    forget_shardings()
    for cache in [*caches, *_caches_of_torch()]:
        cache.cache_clear()
    gc.collect()
    # What stood before the function is frozen, so that this sees only what it left behind.
    if objects_of(DeviceMesh):
        left.append("a device mesh in some cache")
    left += state.left_running()  # of cubes that were found only now
    # What modules that were imported since hold would be looked through after each function to come.
    caches.update(dict.fromkeys(_caches_of_torch()))
    gc.freeze()
    return left, let_go(groups)


def _caches_of_torch() -> list[functools._lru_cache_wrapper[Any]]:
    """Those of torch.distributed, wherever they stand, that were made since the last `gc.freeze`."""
    caches = objects_of(functools._lru_cache_wrapper)
    return [cache for cache in caches if cache.__module__.startswith("torch.distributed")]


def _issued(group: dist.ProcessGroup | None) -> int | None:
    """How many collectives the group of all ranks has seen; None where it is no longer the group of this process."""
    if group is None or not dist.is_initialized() or dist.group.WORLD is not group:
        return None
    return collectives_issued(group)

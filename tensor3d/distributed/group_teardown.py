"""How process groups end, and what torch keeps of them.

A group ends when no rank needs it any more: whoever closes a connection earlier cuts off what another rank still
receives. And torch's caches of meshes must not outlive the groups.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from tensor3d.live_objects import objects_of
from tensor3d.torch_private import default_group, default_store, forget_shardings, set_timeout, timeout_of


def disconnect(timeout: timedelta) -> None:
    """Ends the default process group once every rank has called this, or after `timeout`.

    The ranks meet in the store and not by a collective: one that leaves right after a collective closes its connections
    on messages that it has not read, and what others had still to read from it is lost with them.
    """
    store = dist.PrefixStore("tensor3d/leaving", default_store())
    ranks = dist.get_world_size()
    try:
        _arrive(store, "done", ranks)
        store.wait(["done"], timeout)
        # Rank 0 may host the store: it goes when the others have read that all are done.
        _arrive(store, "gone", ranks)
        if dist.get_rank() == 0:
            store.wait(["gone"], timeout)
    except RuntimeError:
        pass  # a rank that never comes, or a store that went with its host: nobody is left to wait for
    dist.destroy_process_group()


class CubeGroups:
    """The process groups that a cube has made, with the time-out of the default one. They end when all ranks have come
    to `end`, or have let go of the cube: whoever closed a connection earlier would cut off what another rank still
    receives."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._store: dist.Store | None = None

    def add(self, *groups: dist.ProcessGroup) -> None:
        if "fake" in dist.get_backend():  # a dry run, in which a group holds nothing
            return
        if self._store is None:
            # Every rank makes the same cubes: the number of this one is the same on all.
            store = default_store()
            number = store.add(f"tensor3d/cubes of {dist.get_rank()}", 1)
            self._store = dist.PrefixStore(f"tensor3d/cube {number}", store)
        added = [group for group in groups if group is not dist.group.WORLD and group not in self._groups]
        # torch gives groups its own default, which under NCCL is ten minutes: a collective that hangs would end the
        # process, by SIGABRT and without a name, before anybody can tell who is to blame.
        if (timeout := timeout_of(default_group())) is not None:
            for group in added:
                set_timeout(group, timeout)
        self._groups += added

    def end(self, timeout: timedelta) -> None:
        """Waits for all ranks, but not longer than `timeout`."""
        if self._living() and self._store is not None:
            try:
                _arrive(self._store, "done", dist.get_world_size())
                self._store.wait(["done"], timeout)
            except RuntimeError:
                pass
        self._free()

    def end_beside(self) -> None:
        """The same in a thread, as long as it takes: for a cube that nobody has any more. Of NCCL's groups, nothing: a
        thread must not end what devices may still work at."""
        if self._living() and "nccl" not in dist.get_backend():
            threading.Thread(target=self._end_with_others, name="end of a cube", daemon=True).start()

    def _end_with_others(self) -> None:
        store, pause = self._store, 1e-3
        assert store is not None, "groups are added with it"
        try:
            _arrive(store, "done", dist.get_world_size())
            main = threading.main_thread()
            while not store.check(["done"]):  # no `wait`: the main thread may need the connection
                main.join(pause)
                if not main.is_alive():  # the process ends, and with it the groups
                    return
                pause = min(2 * pause, 0.5)
        except (RuntimeError, ValueError):  # the job ends
            return
        self._free()

    def _living(self) -> list[dist.ProcessGroup]:
        return [group for group in self._groups if group in dist.distributed_c10d._world.pg_map]

    def _free(self) -> None:
        ended = self._living()
        self._groups.clear()
        for group in ended:
            destroy(group)
            del group
        for thread in let_go(ended):
            thread.join()


def destroy(group: dist.ProcessGroup) -> None:
    """Ends a group that another thread may be ending just now, or has ended: while it is shut down Python goes on, and
    torch's tables lose it once."""
    with suppress(KeyError, ValueError):
        dist.destroy_process_group(group)


def let_go(groups: list[dist.ProcessGroup]) -> list[threading.Thread]:
    """Drops what are the last references to ended groups. Gloo's then wait ten to twenty milliseconds each for a thread
    of their own, which here they do beside one another, in the threads returned."""
    ends = []
    while groups:
        last = [groups.pop()]
        ends.append(threading.Thread(target=last.clear, name="end of a process group"))
        ends[-1].start()
    return ends


class ClosedGroup:
    """Stands where a group was, which would stay open as long as anybody held it."""


# --- Meshes -----------------------------------------------------------------------------------------------------------


def forget_meshes() -> None:
    """Empties DTensor's caches: a mesh equals any other of its shape, and one whose groups are gone would be used in
    the place of its successor."""
    forget_shardings()
    _clear_lru_caches()


def forget_meshes_at_end() -> None:
    """The same, where a cube ends by itself, perhaps in the midst of a collection, which hides caches, and that in the
    midst of an operator. What has to wait is done by a thread, also for plans that hold one another and a mesh."""
    forget_shardings(dispatching=True)
    _clear_lru_caches()
    # No daemon: Python waits for it before it takes the interpreter apart, under which a collection that frees tensors
    # would end the process by SIGABRT.
    threading.Thread(target=_forget_soon, name="end of a cube").start()


def _forget_soon() -> None:
    main, pause = threading.main_thread(), 0.001
    while main.is_alive():  # else the process ends, and all goes with it
        main.join(pause)
        if _between_operators(forget_shardings):
            _clear_lru_caches()
            gc.collect()
            return
        pause = min(2 * pause, 0.008)


def _between_operators(action: Callable[[], None]) -> bool:
    """Has the main thread call it between two steps of its Python code, and waits for that; whether it was done: not
    where an operator of DTensor, or the end of a cube, is under way there, and not where the main thread has ended."""
    ran, done = threading.Event(), []

    def call(_: object) -> int:
        if not _is_dispatching():
            action()
            done.append(True)
        ran.set()
        return 0

    pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
    if ctypes.pythonapi.Py_AddPendingCall(pending, None) != 0:  # too many wait
        return False
    while not ran.wait(0.05):
        if not threading.main_thread().is_alive():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))  # what calls it on the way out must find it
            return False
    return bool(done)


def _is_dispatching() -> bool:
    """Whether Python code that DTensor's dispatcher calls, or a finalizer of this module, is running below."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("torch.distributed.tensor", "torch.distributed.device_mesh")):
            return True
        if frame.f_code is forget_meshes_at_end.__code__:
            return True
        frame = frame.f_back
    return False


def _clear_lru_caches() -> None:
    caches = objects_of(functools._lru_cache_wrapper)
    caches = [cache for cache in caches if cache.__module__.startswith("torch.distributed.tensor")]
    for cache in caches:
        cache.cache_clear()


def _arrive(store: dist.Store, where: str, ranks: int) -> None:
    if store.add(f"{where}/count", 1) == ranks:
        store.set(where, "")

"""Connects processes started by torchrun. The one place of the library that reads the environment."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import hmac
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tensor3d.torch_private import default_group, default_store, forget_shardings, set_timeout, timeout_of


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun (or anything that sets its variables) started this process as one of several."""
    return "WORLD_SIZE" in (os.environ if environment is None else environment)


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """This process among those of its job, as torchrun's variables tell it. Ranks are numbered node by node."""

    rank: int
    world: int
    """Ranks of the job."""
    local_rank: int
    """Number of this rank on its node."""
    per_node: int
    """Ranks of this node."""
    address: str
    """Host name or address at which the job's store is."""
    port: int
    hosted: bool
    """Whether the launcher itself has the job's store; else rank 0 makes it."""

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    def open_store(self, timeout: timedelta, *, wait: bool = True) -> dist.Store:
        """Connects to the job's store, which rank 0 makes where the launcher has not; it listens at one address.

        Args:
            timeout: of this call, and of what is asked of the store later.
            wait: on rank 0, until all ranks have connected.
        """
        if self.rank == 0 and not self.hosted:
            return host_store(
                self.address,
                self.port,
                alone=self.per_node == self.world,
                world_size=self.world,
                timeout=timeout,
                wait_for_workers=wait,
            )
        return dist.TCPStore(
            self.address, self.port, world_size=self.world, is_master=False, timeout=timeout, wait_for_workers=wait
        )


def host_store(
    host: str,
    port: int,
    *,
    alone: bool,
    timeout: timedelta,
    wait_for_workers: bool = False,
    world_size: int | None = None,
) -> dist.TCPStore:
    """A store of this process that listens at the address by which `host` is this machine; torch's own would listen at
    all addresses, as this one does only where none of `host` is one by which others come in.

    Args:
        host: as its clients know it.
        alone: whether all of them are on this machine, so that its loopback will do.

    Raises:
        dist.DistNetworkError: the port is in use.
    """
    try:
        listener = _listener(host, port, alone)
    except OSError as error:
        raise dist.DistNetworkError(f"cannot listen at port {port} of {host}: {error.strerror or error}") from error
    address, port = listener.getsockname()[:2]
    # Its own client goes where it listens; of all addresses, the loopback.
    return dist.TCPStore(
        {"0.0.0.0": "127.0.0.1"}.get(address, address),
        port,
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        master_listen_fd=listener.detach(),
    )


def _listener(host: str, port: int, alone: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []  # a name that is not known here
    for kind, _, _, _, address in sorted(found, key=lambda each: each[0]):  # IPv4 first
        own = str(address[0])
        if ip_address(own.partition("%")[0]).is_unspecified:
            continue
        # What others know by a name may be a loopback here (/etc/hosts), by which they do not come in.
        if not alone and host not in (own, "localhost") and ip_address(own.partition("%")[0]).is_loopback:
            continue
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((own, 0))
            except OSError:
                continue  # not this machine's
        return socket.create_server((own, port), family=kind)
    return socket.create_server(("127.0.0.1" if alone else "", port))


def place(environment: Mapping[str, str] | None = None) -> WorkerInfo | None:
    """Where the launcher has put this process; None where none has.

    Args:
        environment: instead of the process's own.

    Raises:
        ValueError: a variable is missing or malformed.
    """
    variables = os.environ if environment is None else environment
    if not is_launched(variables):
        return None
    world, rank, local, per_node = _numbers(variables)
    if not 0 <= local < per_node:
        raise ValueError(
            f"LOCAL_RANK must be at least 0 and below LOCAL_WORLD_SIZE={per_node}. Got {local}. torchrun sets both."
        )
    if "MASTER_ADDR" not in variables:
        raise ValueError("MASTER_ADDR is not set: the host name of rank 0 is needed. torchrun sets it.")
    return WorkerInfo(
        rank=rank,
        world=world,
        local_rank=local,
        per_node=per_node,
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        # torchrun's agent may host the store itself; its workers are then all clients.
        hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
    )


def job_secret(environment: Mapping[str, str] | None = None) -> bytes:
    """What only the processes of the job know (`TENSOR3D_SECRET`, set by the launchers); empty where none was given."""
    return (os.environ if environment is None else environment).get("TENSOR3D_SECRET", "").encode()


class KeyedStore(dist.Store):
    """A part of a store for messages of the job alone: each value carries an HMAC of part, key and value, and what
    carries none, or a wrong one, counts as not there. A store of PyTorch's takes whatever anybody connects and sets.

    Args:
        store: the whole.
        part: name of the part, in front of all keys.
        secret: of the job; empty: values are as they are set, and all are taken.
        strict: `check` looks at the values too, which costs another question when all are there; else `get` and
            `multi_get` alone do, and give nothing for a stranger's.
    """

    def __init__(self, store: dist.Store, part: str, secret: bytes, *, strict: bool = True) -> None:
        super().__init__()
        self.underlying_store = store
        self._store, self._part, self._secret, self._strict = dist.PrefixStore(part, store), part, secret, strict

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Waits for the key. Empty for what a stranger has set."""
        return self._opened(key, self._store.get(key)) or b""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._opened(key, value) or b"" for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def check(self, keys: list[str]) -> bool:
        if not self._store.check(keys):
            return False
        if not (self._strict and self._secret):
            return True
        return all(
            self._opened(key, value) is not None for key, value in zip(keys, self._store.multi_get(keys), strict=True)
        )

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        """Raises DistStoreError where not all have come in time."""
        deadline, least = time.monotonic() + timeout.total_seconds(), timedelta(milliseconds=1)
        while True:
            self._store.wait(keys, max(least, timedelta(seconds=deadline - time.monotonic())))
            if self.check(keys):
                return
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{keys[0]} holds what no process of this job has set. Look for a stranger.")
            least = timedelta(seconds=1)  # they are there, and a busy host needs more than what may be left to say so
            time.sleep(0.02)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's, where "" expects nothing: sets `desired` where nothing of the job's is there. What is there."""
        wanted, there = self._sealed(key, desired), self._sealed(key, expected).encode() if expected else b""
        for _ in range(100):  # strangers may go on setting and deleting it
            found = self._store.compare_set(key, there, wanted)  # type: ignore[arg-type]
            opened = self._opened(key, found)
            if opened is not None and (opened or not self._secret):
                return opened
            there = found if found != there else b""
        return b""

    def _sealed(self, key: str, value: str) -> str:
        return self._seal(key, value.encode()) + value if self._secret else value

    def _opened(self, key: str, value: bytes) -> bytes | None:
        if not self._secret:
            return value
        seal, text = value[:_SEAL], value[_SEAL:]
        return text if hmac.compare_digest(seal, self._seal(key, text).encode()) else None

    def _seal(self, key: str, value: bytes) -> str:
        message = b"%d %s %d %s %s" % (len(self._part), self._part.encode(), len(key), key.encode(), value)
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


_SEAL = 64
"""Bytes of an HMAC in hexadecimal digits."""


def gloo_interface(environment: Mapping[str, str] | None = None) -> str:
    """The network interface that gloo is told to use; empty where it takes the address of the host name."""
    return (os.environ if environment is None else environment).get("GLOO_SOCKET_IFNAME", "")


def connect(
    ranks: int,
    timeout: timedelta = timedelta(minutes=10),
    environment: Mapping[str, str] | None = None,
    *,
    store: dist.Store | None = None,
) -> torch.device:
    """Initialises the default process group from torchrun's variables and returns this rank's device.

    torchrun's store outlives a restart and still holds the addresses of the dead, at which a new group would wait until
    its time-out. So the ranks first agree on a name of their own for this attempt, and meet under it (`_attempt`).

    Args:
        ranks: how many processes are needed.
        environment: instead of the process's own.
        store: the job's, where this process is connected to it already (`WorkerInfo.open_store`).

    Raises:
        ValueError: a variable is missing or malformed, or `WORLD_SIZE` is not `ranks`; before connecting.
    """
    variables = os.environ if environment is None else environment
    if not is_launched(variables):
        if ranks != 1:
            raise ValueError(
                f"{ranks} processes are needed, and WORLD_SIZE is not set. Start them with torchrun --nproc-per-node "
                f"{ranks}, or with launch/local.sh."
            )
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world, rank, local, on_node = _numbers(variables)
    if world != ranks:
        raise ValueError(
            f"the cube needs {ranks} processes (x*y*z*data). Got WORLD_SIZE={world}. Start {ranks}, or choose a cube "
            f"of {world}."
        )
    # One device for every rank of this node, or none for any: a node of mixed ranks could not agree on a backend.
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= on_node
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store = _store(variables, timeout) if store is None else store
        name = _attempt(KeyedStore(store, "tensor3d/attempt", job_secret(variables)), world, rank, timeout)
        store = dist.PrefixStore(f"tensor3d/{name}", store)
        # Named, the device is known from the start: groups are made by splitting, and no barrier has to guess.
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    return device


def ranks_per_node(
    device: torch.device, *, needed: bool = True, environment: Mapping[str, str] | None = None
) -> int | None:
    """How many ranks each node has; None where the launcher does not say (`LOCAL_WORLD_SIZE`).

    Every rank calls it, after `connect`.

    Args:
        needed: whether the axes are laid on nodes by it; else different numbers are None, too.

    Raises:
        ValueError: nodes have different numbers of ranks, and one is needed; on every rank.
    """
    variables = os.environ if environment is None else environment
    here = _number(variables, "LOCAL_WORLD_SIZE", default=0)
    least_and_most = torch.tensor([here, -here], device=device)
    dist.all_reduce(least_and_most, dist.ReduceOp.MIN)
    least, most = int(least_and_most[0]), -int(least_and_most[1])
    if least != most and not needed:
        return None
    if least != most:
        raise ValueError(
            f"nodes have from {least or 'an unknown number of'} to {most} ranks (LOCAL_WORLD_SIZE), so axes cannot be "
            "laid on nodes. Start as many on each, or name the order of the axes yourself: wire."
        )
    return most or None


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


# --- The groups of one of several cubes -------------------------------------------------------------------------------


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
            dist.destroy_process_group(group)
            del group
        for thread in let_go(ended):
            thread.join()


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


def objects_of(kind: type, *, subclasses: bool = False) -> list[Any]:
    """All objects of a type in this process that the collector knows.

    An object refers to its type, so those are asked for. `gc.get_objects()` would hold every object for a while, also
    what a `tuple(...)` of a generator is filling in another thread, which then fails there ("SystemError: bad argument
    to internal function"). Objects are judged by type(): to ask a foreign one for its `__class__` may run anything.
    """
    kinds = {kind}
    left = [kind] if subclasses else []
    while left:
        fresh: set[type] = set(type.__subclasses__(left.pop())) - kinds
        kinds |= fresh
        left += fresh
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _clear_lru_caches() -> None:
    caches = objects_of(functools._lru_cache_wrapper)
    caches = [cache for cache in caches if cache.__module__.startswith("torch.distributed.tensor")]
    for cache in caches:
        cache.cache_clear()


def _arrive(store: dist.Store, where: str, ranks: int) -> None:
    if store.add(f"{where}/count", 1) == ranks:
        store.set(where, "")


def _store(variables: Mapping[str, str], timeout: timedelta) -> dist.Store:
    own = place(variables)
    assert own is not None, "checked before"
    return own.open_store(timeout)


def _attempt(store: dist.Store, world: int, rank: int, timeout: timedelta) -> str:
    """A name for this attempt, the same on all living ranks and new after every restart.

    torchrun's own count of restarts is not: on several nodes each agent counts the deaths of its own ranks. So every
    process says hello under a word that is its alone, and rank 0 gives its own word as the name to whoever says hello,
    until all those whose hello is the latest of their rank have taken it: a dead one never does.

    | key           | written by | holds                                     |
    | ------------- | ---------- | ----------------------------------------- |
    | hello/RANK    | each rank  | its word                                  |
    | welcome/WORD  | rank 0     | the name of the attempt                   |
    | taken/WORD    | each rank  | the name that it has taken                |
    | begun/NAME    | rank 0     | yes: it is there when all have come       |

    Args:
        store: the ranks' own part for this.
    """
    word = uuid.uuid4().hex
    store.set(f"hello/{rank}", word)
    if rank == 0:
        _welcome(store, world, word, timeout)
        return word
    store.wait([f"welcome/{word}"], timeout)
    name = store.get(f"welcome/{word}").decode()
    store.set(f"taken/{word}", name)
    store.wait([f"begun/{name}"], timeout)
    return name


def _welcome(store: dist.Store, world: int, name: str, timeout: timedelta) -> None:
    """Rank 0's part of `_attempt`."""
    hellos = [f"hello/{rank}" for rank in range(1, world)]
    if hellos:
        store.wait(hellos, timeout)
    deadline, welcomed, missing = time.monotonic() + timeout.total_seconds(), set[str](), hellos
    while missing:
        words = {key: store.get(key).decode() for key in missing}
        for word in set(words.values()) - welcomed:
            store.set(f"welcome/{word}", name)
        welcomed |= set(words.values())
        # A word may be that of a process that died: its key is looked at again until one has come that lives.
        taken = [word for word in words.values() if store.check([f"taken/{word}"])]
        taken = [word for word in taken if store.get(f"taken/{word}").decode() == name]
        missing = [key for key, word in words.items() if word not in taken]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"{len(missing)} of {world} ranks did not come within {timeout.total_seconds():.0f} s, the first of "
                f"them rank {missing[0].removeprefix('hello/')}. Look for it in the log of its node."
            )
        if missing:
            time.sleep(0.02)
    # A rank may have died after it had come, and another one in its place have said hello since: then its agent starts
    # all of them again.
    store.set(f"begun/{name}", "yes")


def _numbers(variables: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Ranks of the job, this rank, its number on its node, ranks of the node."""
    world, rank, local = (_number(variables, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if not 0 <= rank < world:
        raise ValueError(f"RANK must be at least 0 and below WORLD_SIZE={world}. Got {rank}. torchrun sets both.")
    return world, rank, local, _number(variables, "LOCAL_WORLD_SIZE", default=local + 1)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(
            f"{name} must be a whole number, as torchrun sets it. Got {text!r}. Start with torchrun or launch/local.sh."
        ) from None

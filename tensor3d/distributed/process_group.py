"""Connects processes started by torchrun. The one place of the library that reads the environment."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tensor3d.distributed.job_store import KeyedStore, host_store


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
    address, port = variables["MASTER_ADDR"], _number(variables, "MASTER_PORT")
    # Ranks would look for such a host until their time is up; at port 0 each has another one.
    if not address or any(mark.isspace() or mark == "/" for mark in address):
        raise ValueError(f"MASTER_ADDR must be the host name or the address of rank 0. Got {address!r}.")
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT must be from 1 to {(1 << 16) - 1}, the same for all ranks. Got {port}.")
    return WorkerInfo(
        rank=rank,
        world=world,
        local_rank=local,
        per_node=per_node,
        address=address,
        port=port,
        # torchrun's agent may host the store itself; its workers are then all clients.
        hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
    )


def job_secret(environment: Mapping[str, str] | None = None) -> bytes:
    """What only the processes of the job know (`TENSOR3D_SECRET`, set by the launchers); empty where none was given."""
    return (os.environ if environment is None else environment).get("TENSOR3D_SECRET", "").encode()


def gloo_interface() -> str:
    """The network interface that gloo is told to use; empty where it takes the address of the host name."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


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

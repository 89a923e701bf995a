"""Runs a module as the ranks of an MPI job: `mpirun ... python launch/mpi_worker.py [OPTIONS] -m MODULE ARGUMENTS...`.

MPI tells every process its rank and its node, and carries the address of rank 0 to all others. Then MPI is finalised,
and each process starts `python -m MODULE ARGUMENTS...` with the variables that torchrun would set (RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT). It stays behind to pass on signals and statuses
(mpi_supervisor.py): so no MPI library meddles with the module's memory, forks and network, and mpirun, which kills all
ranks as soon as it sees one fail, sees none fail while another still saves.

| what happened                            | exit status                                            |
| ---------------------------------------- | ------------------------------------------------------ |
| all ranks ended well                     | 0                                                      |
| a rank failed                            | that of the first one; 128 + n where signal n ended it |
| else, where ranks saved after a signal   | 75                                                     |
| the processes do not fit, or do not meet | 2, and one message on standard error                   |
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi_supervisor import Link, MpiSupervisor, say
from net_interface import given, interfaces, route

BAD_INPUT = 2
# What MPI and another launcher have left in the environment is not for the module.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_LOCAL", "TORCHELASTIC_")


class MeetingError(Exception):
    """The processes cannot become the ranks of a job; the same message on all of them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process lies, as MPI sees it."""

    rank: int
    host: str
    leader: int
    """The lowest rank on its node."""
    local_rank: int
    local_size: int


def main(arguments: Sequence[str]) -> int:
    """The exit status for mpirun: that of the job on rank 0, and 0 on the others."""
    parser = argparse.ArgumentParser(
        prog="launch/mpi_worker.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interface", help="network interface by which the nodes reach each other")
    parser.add_argument(
        "--wait", type=float, default=300.0, help="seconds in which all processes must come (default: %(default)g)"
    )
    parser.add_argument(
        "--status-file", type=Path, help="where rank 0 writes the exit status, if the folder is there on its node"
    )
    parser.add_argument("-m", dest="module", required=True, metavar="MODULE", help="what to run; its arguments follow")
    end = arguments.index("-m") + 2 if "-m" in arguments else len(arguments)
    asked = parser.parse_args(arguments[:end])
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # `meet` does both
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:  # the second: mpi4py without an MPI library
        why = str(problem).splitlines()[0]
        return refused(f"mpi4py and an MPI library are needed ({why}). Install them: pip install mpi4py mpich.")
    try:
        place, link, variables = meet(MPI, asked.interface, asked.wait)
    except MeetingError as problem:
        return refused(str(problem))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    command = [sys.executable, "-m", asked.module, *arguments[end:]]
    status = MpiSupervisor(place.rank, place.host, link, command, {**environment, **variables}).run()
    if place.rank == 0 and asked.status_file is not None and asked.status_file.parent.is_dir():
        asked.status_file.write_text(f"{status}\n")
    return status


def refused(message: str) -> int:
    """Says it on one process. The exit status of this one."""
    rank = mpirun_environment("RANK", os.environ)
    if rank not in (None, 0):
        return 0
    say(message)
    if rank is not None:
        # mpirun would kill the others, and might answer with the status of one that it has killed.
        time.sleep(1.0)
    return BAD_INPUT


def mpirun_environment(what: str, environment: Mapping[str, str]) -> int | None:
    """RANK or SIZE, before MPI is asked; None: no mpirun that this file knows has started the process."""
    for name in (f"OMPI_COMM_WORLD_{what}", f"PMI_{what}"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def meet(mpi: Any, interface: str | None, wait: float) -> tuple[Place, Link, dict[str, str]]:
    """The processes meet over MPI, which ends with the meeting. Every one calls it.

    Args:
        mpi: the module `mpi4py.MPI`, not initialised.
        interface: by which the nodes reach each other; None: the one that leads from node to node.
        wait: seconds for all to come.

    Returns:
        This process's place, its link to the others, and the variables that torchrun would set.

    Raises:
        MeetingError: on every process alike.
    """
    started = mpirun_environment("SIZE", os.environ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # said below, in full
        if "OMPI_COMM_WORLD_SIZE" in os.environ and mpi.get_vendor()[0] != "Open MPI":
            raise MeetingError(another_library(mpi, "mpirun is that of Open MPI"))  # its MPI_Init would abort
        give_up = exit_after(wait)
        mpi.Init()
    try:
        # What processes tell each other is not unpickled.
        mpi.pickle.__init__(lambda told: json.dumps(told).encode(), lambda told: json.loads(bytes(told)))
        comm = mpi.COMM_WORLD
        if started is not None and comm.size != started:
            raise MeetingError(another_library(mpi, f"mpirun started {started} processes, and each sees {comm.size}"))
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        place = Place(
            rank=comm.rank,
            host=socket.gethostname(),
            leader=node.bcast(comm.rank),
            local_rank=node.rank,
            local_size=node.size,
        )
        places = [Place(**told) for told in comm.allgather(dataclasses.asdict(place))]
        if problem := misfit(places):
            raise MeetingError(problem)
        link, variables = join(comm, places, interface, wait)
    finally:
        mpi.Finalize()
        give_up.cancel()
    variables.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(len(places)),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        GROUP_RANK=str(place.rank // place.local_size),
    )
    return place, link, variables


def another_library(mpi: Any, seen: str) -> str:
    library = mpi.Get_library_version().splitlines()[0].strip(" \0")
    return (
        f"{seen}: mpi4py has loaded the library of another MPI ({library}). Set MPI4PY_LIBMPI to that of mpirun, a "
        "file libmpi.so.*."
    )


def exit_after(seconds: float) -> threading.Timer:
    """Ends this process unless it is cancelled in time: MPI waits without end for a process that does not come, and
    Open MPI connects two of them only when they first have something to say."""

    def give_up() -> None:
        say(
            f"{socket.gethostname()}: not all processes of the job came within {seconds:g} s. Look at the nodes that "
            "say nothing, and at --interface."
        )
        os._exit(BAD_INPUT)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


def misfit(places: Sequence[Place]) -> str:
    """Why these cannot be numbered as torchrun numbers ranks, node by node and as many on each; empty where they can.

    Args:
        places: of all processes, in the order of their ranks.
    """
    nodes = {place.leader: place for place in places}
    if len({place.local_size for place in nodes.values()}) > 1:
        told = ", ".join(f"{place.host}: {place.local_size}" for place in nodes.values())
        return f"every node needs as many processes as the others. Got {told}. Give mpirun the number for each node."
    for place in places:
        expected = places[place.rank - place.rank % place.local_size]
        if place.leader != expected.rank or place.local_rank != place.rank % place.local_size:
            return (
                f"ranks must be numbered node by node. Got rank {place.rank} on {place.host}, where "
                f"{expected.host} is expected. Let mpirun fill one node after the other: --map-by ppr:N:node with Open "
                "MPI, -ppn N with MPICH."
            )
    return ""


def join(comm: Any, places: Sequence[Place], interface: str | None, wait: float) -> tuple[Link, dict[str, str]]:
    """Connects every process with rank 0. Every one calls it.

    Returns:
        The link, and the variables that say where rank 0 is and by which interface it is reached.

    Raises:
        MeetingError: on every process alike; all that cannot reach rank 0 are named.
    """
    own, several = places[comm.rank], len({place.leader for place in places}) > 1
    desk: Future[Link] | None = None
    offer: tuple[str, str, int, int, str, str] | None = None
    if own.rank == 0:
        try:
            address = own_address(next((place.host for place in places if place.leader), own.host), interface, several)
            listener = socket.create_server((address, 0), backlog=1024)
            # The second secret is that of the ranks; the first one is said to the desk.
            own_word, secret = secrets.token_hex(16), secrets.token_hex(16)
            offer = ("", address, listener.getsockname()[1], free_port(address), own_word, secret)
            # At once: strangers who fill the queue would keep the others out.
            hosts = {place.rank: place.host for place in places[1:]}
            desk = in_background(lambda: Link.at_desk(listener, own_word, hosts, wait))
        except (OSError, ValueError) as error:
            offer = (str(error), "", 0, 0, "", "")
    problem, address, port, master_port, word, secret = comm.bcast(offer)
    if problem:
        raise MeetingError(problem)
    link, trouble = None, ""
    if own.rank:
        try:
            link = Link.to_desk(address, port, word, own.rank)
        except OSError as error:
            trouble = error.strerror or str(error)
    troubles = comm.allgather(trouble)
    if any(troubles):
        hosts = dict.fromkeys(place.host for place, trouble in zip(places, troubles, strict=True) if trouble)
        first = next(filter(None, troubles))
        raise MeetingError(
            f"{', '.join(hosts)} cannot reach rank 0 on {places[0].host} at {address}: {first}. Open the ports between "
            "the nodes, or name the network: --interface."
        )
    if desk is not None:
        try:
            link = desk.result()
        except OSError as error:
            trouble = str(error)
    if trouble := comm.bcast(trouble):
        raise MeetingError(f"{trouble}. Look for a firewall that lets connections through and nothing behind them.")
    assert link is not None
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(master_port), "TENSOR3D_SECRET": secret}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    name = next((name for name, has in interfaces() if has == link.address), None) if several else loopback
    if name is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would take the interface to which this host's name resolves, often the loopback.
        variables["GLOO_SOCKET_IFNAME"] = name
    if (interface or name) is not None and "NCCL_SOCKET_IFNAME" not in os.environ:
        variables["NCCL_SOCKET_IFNAME"] = interface or name or ""
    return link, variables


def in_background(action: Callable[[], Link]) -> Future[Link]:
    """What a thread makes of it, which ends with the process at the latest."""
    made: Future[Link] = Future()

    def act() -> None:
        try:
            made.set_result(action())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=act, name="desk", daemon=True).start()
    return made


def own_address(other: str, interface: str | None, several: bool) -> str:
    """The address of this node by which `other`, a host of another node where there are several, reaches it.

    Raises:
        ValueError: there is no such interface or no way to the other node.
    """
    if interface is not None:
        return given(interface)[1]
    if not several:
        return "127.0.0.1"
    address = route(other)[1]
    if address.startswith("127."):
        raise ValueError(
            f"{other}, a host of another node, is {address} here: a loopback. Name the network: --interface."
        )
    return address


def free_port(address: str) -> int:
    """A port that is free now, below those that the kernel gives to whoever connects: it stays free."""
    for port in random.sample(range(20_000, 32_768), 100):
        with socket.socket() as trial:
            try:
                trial.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"a hundred ports of {address} between 20000 and 32767 are all in use")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Whether a port is free, and whether the master can be reached, before anything of PyTorch's waits for either.

PyTorch's own store writes a page of warnings while it tries again, and waits without end where something else answers.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tools.doctor.rules import Finding, NotReadyError

_ONE_TRY = 5.0
_HANDSHAKE = 10.0
"""Seconds in which a store answers a client, at least: idle connections of strangers may hold it up."""


def address_of(text: str) -> tuple[str, int]:
    """Reads `HOST:PORT` of `--master`. Raises ValueError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--master must be HOST:PORT with a port from 1 to 65535, like node0:29501. Got {text!r}.")
    return host, int(port)


def in_use(port: int) -> bool:
    """Whether nobody but whoever has it already could listen at this port of this machine."""
    kinds = [(socket.AF_INET, ""), *([(socket.AF_INET6, "::")] if socket.has_ipv6 else [])]
    for kind, host in kinds:
        try:
            with socket.socket(kind, socket.SOCK_STREAM) as listener:
                # As PyTorch's store does: connections that have ended a moment ago do not count.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if kind == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((host, port))
                listener.listen()
        except PermissionError:
            return True  # a port below 1024
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True  # else: a kind of address that this machine does not have
    return False


def is_own(host: str) -> bool:
    """Whether this machine has the address of a host name; True where that cannot be told."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for kind, _, _, _, address in found:
        try:
            with socket.socket(kind, socket.SOCK_STREAM) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


def reach(host: str, port: int, wait: float) -> None:
    """Returns when something listens there.

    Raises:
        NotReadyError: the name is unknown (at once), or nothing has answered within `wait` seconds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        told = f"the master's name {host!r} cannot be resolved: {error.strerror or error}. Give a name that every node"
        raise NotReadyError([Finding(text=f"{told} knows, or an address.", about=(0,))]) from error
    deadline, pause = time.monotonic() + wait, 0.05
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(_ONE_TRY, left))):
                return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    address = str(found[0][4][0])
    at = f"{host}:{port}" + ("" if address == host else f" ({address})")
    raise NotReadyError(
        [
            Finding(
                text=f"the master {at} did not answer within {wait:g} s ({reason}). Look whether node 0 was started "
                "and still runs, whether the address is right, and whether a firewall lets this port through.",
                about=(0,),
            )
        ]
    )


def open_within(open_store: Callable[[], dist.Store], at: str, wait: float) -> dist.Store:
    """The store, once it has answered, within `wait` seconds and no less than ten.

    Raises:
        NotReadyError: what answers `at` this address is no store, or the store cannot be made.
    """
    result: list[dist.Store] = []
    failure: list[Exception] = []

    def connect() -> None:
        try:
            result.append(open_store())
        except RuntimeError as error:
            failure.append(error)

    # A thread, because no time-out of PyTorch's ends a handshake with a stranger.
    thread = threading.Thread(target=connect, name="open-store", daemon=True)
    thread.start()
    thread.join(max(_HANDSHAKE, wait))
    if result:
        return result[0]
    if failure:
        told = f"no store at {at}: {str(failure[0]).splitlines()[0]}"
    else:
        told = f"something answers at {at} that is not the store of this job"
    raise NotReadyError([Finding(text=f"{told}. Choose another port, the same on all nodes.", about=(0,))])


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)

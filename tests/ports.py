"""Ports for tests: free ones that stay free, because the kernel gives them to nobody who asks for any port."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

_ANYBODYS = random.SystemRandom()  # no test's seed has two workers of pytest choose the same


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that neither the kernel nor launch/mpi_worker.py chooses.

    A port from `bind(("127.0.0.1", 0))` may be another process's as soon as it is let go: of a rank beside this test,
    which answers where a test expects nobody.
    """
    with ExitStack() as held:
        found: list[int] = []
        for port in _ANYBODYS.sample(range(10_000, 20_000), 100 + count):
            probe = held.enter_context(socket.socket())
            # A rank that is forked now keeps a copy of it: whoever listens there later, as PyTorch does, is let in.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"found {len(found)} of {count} free ports of 127.0.0.1 between 10000 and 19999")


def free_port() -> int:
    return free_ports(1)[0]

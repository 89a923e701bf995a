"""The processes that launch/mpi_worker.py leaves beside the ranks: they pass on signals, and agree on one exit status.

Each of them starts one rank and holds a connection to the one of rank 0, the desk, for as long as it lives.

1. A rank ends; its status goes to the desk.
2. After the first failure the others have GRACE seconds to notice and to say what they saw; then all of them get
   SIGTERM, and PATIENCE seconds later SIGKILL.
3. When all have ended, the desk lets the others leave, with 0, and sees them go. Then it leaves itself, with the status
   of the job: nobody is left whom mpirun could kill for it.

A process that is gone without a word counts as killed; one that loses the desk, or mpirun, ends its rank. Nobody waits
without end for a node that does not answer any more.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

PREEMPTED = 75
GRACE, PATIENCE = 5.0, 30.0
LOST = 128 + signal.SIGKILL
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PARENT_DEATH_SIGNAL = 1  # Linux: PR_SET_PDEATHSIG
_CONNECT = 30.0
STRANGER = 5.0
"""Seconds in which whoever connects with the desk says who it is."""
_CALLERS = 64
"""Connections of unknown ends that are held at a time: the oldest goes first, for who belongs here speaks at once."""
_LINE = 100
_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 9))  # two minutes of silence
_LOOK = 2.0  # seconds between two looks at whether mpirun is still there


def say(text: str) -> None:
    print(f"launch/mpi_worker.py: {text}", file=sys.stderr, flush=True)


class Link:
    """What connects a process with the others: one connection to the desk; at the desk, one for each other rank."""

    def __init__(self, address: str, connections: Mapping[int, socket.socket], hosts: Mapping[int, str]) -> None:
        self.address = address
        """Own address of this end."""
        self.connections = dict(connections)
        """By the rank at the other end."""
        for connection in connections.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _ALIVE:
                if hasattr(socket, name):  # not everywhere
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.hosts = hosts

    @staticmethod
    def to_desk(address: str, port: int, word: str, rank: int) -> Link:
        """Connects with the desk. Raises OSError where it cannot be reached."""
        connection = socket.create_connection((address, port), timeout=_CONNECT)
        connection.settimeout(None)
        connection.sendall(f"{word} {rank}\n".encode())
        return Link(connection.getsockname()[0], {0: connection}, {0: address})

    @staticmethod
    def at_desk(desk: socket.socket, word: str, hosts: Mapping[int, str], wait: float = _CONNECT) -> Link:
        """Takes in the connections of all others, side by side, and closes the door.

        Whoever does not begin with the word is a stranger. One that says nothing is dropped after STRANGER seconds, or
        before, when so many wait; nobody else waits for it.

        Args:
            desk: listens.
            word: the job's secret, which MPI has carried to the others.
            hosts: by the ranks that are to come.
            wait: seconds for all of them.

        Raises:
            OSError: some have not come in time.
        """
        address: str = desk.getsockname()[0]
        connections: dict[int, socket.socket] = {}
        callers: dict[socket.socket, _Caller] = {}
        deadline = time.monotonic() + wait
        with desk, selectors.DefaultSelector() as selector:

            def drop(caller: socket.socket, *, close: bool = True) -> None:
                selector.unregister(caller)
                del callers[caller]
                if close:
                    caller.close()

            desk.setblocking(False)
            selector.register(desk, selectors.EVENT_READ)
            while (missing := [rank for rank in hosts if rank not in connections]) and time.monotonic() < deadline:
                for key, _ in selector.select(0.1):
                    if key.fileobj is desk:
                        with suppress(OSError):  # it has gone already
                            caller, _ = desk.accept()
                            caller.setblocking(False)
                            callers[caller] = _Caller()
                            selector.register(caller, selectors.EVENT_READ)
                        continue
                    caller = key.fileobj  # type: ignore[assignment]
                    if not callers[caller].hear(caller):
                        continue
                    rank = callers[caller].rank(word)
                    known = rank in missing and rank not in connections
                    drop(caller, close=not known)
                    if known:
                        caller.setblocking(True)
                        connections[rank] = caller
                late = time.monotonic() - STRANGER
                oldest = list(callers)
                for number, caller in enumerate(oldest):
                    if callers[caller].since < late or number < len(oldest) - _CALLERS:
                        drop(caller)
            for caller in list(callers):
                drop(caller)
        if missing:
            for connection in connections.values():
                connection.close()
            told = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in missing)
            raise TimeoutError(f"{told} did not come to the desk within {wait:g} s")
        return Link(address, connections, hosts)


class _Caller:
    """Who has connected with the desk and has not said yet who it is."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._said = b""

    def hear(self, connection: socket.socket) -> bool:
        """Takes in what has come, without waiting. Whether that is all: a line, too much, or an end."""
        try:
            while len(self._said) <= _LINE:
                letter = connection.recv(1)  # what follows the line is for whoever reads the connection later
                if not letter:
                    return True
                self._said += letter
                if letter == b"\n":
                    return True
        except BlockingIOError:
            return False
        except OSError:  # reset
            self._said = b""
        return True

    def rank(self, word: str) -> int:
        """The rank of who knows the word; -1 for a stranger."""
        said, _, rank = self._said.removesuffix(b"\n").rpartition(b" ")
        known = self._said.endswith(b"\n") and hmac.compare_digest(said, word.encode())
        return int(rank) if known and re.fullmatch(rb"\d{1,9}", rank) else -1


class MpiSupervisor:
    """One process of the crew, with its rank.

    Args:
        rank: which one; 0 has the desk.
        host: name of this node, for messages.
        link: to the others.
        command: starts the rank.
        environment: of the rank, in place of this process's own.
    """

    def __init__(
        self, rank: int, host: str, link: Link, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._rank, self._host, self._link = rank, host, link
        self._command, self._environment = command, environment
        self._selector = selectors.DefaultSelector()
        self._deadlines: list[tuple[float, Callable[[], None]]] = []
        self._statuses: dict[int, int] = {}  # at the desk, in the order in which ranks ended
        self._status: int | None = None  # that of the own rank
        self._left = False  # told to leave, or nobody is there to tell
        self._ending = False

    def run(self) -> int:
        """Starts the rank and stays until all ranks of the job have ended. The exit status for mpirun."""
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number comes through the socket
        self._child = subprocess.Popen(self._command, env=self._environment, preexec_fn=_dies_with_parent())
        self._selector.register(woken, selectors.EVENT_READ, None)
        for other, connection in self._link.connections.items():
            self._selector.register(connection, selectors.EVENT_READ, other)
        self._look_at_child()
        parent = os.getppid()
        while not self._done():
            if os.getppid() != parent:  # nobody would end the job any more
                self._end_child()
            for key, _ in self._selector.select(self._time_left()):
                if key.data is None:
                    self._heed(woken.recv(4096))
                else:
                    self._read(key.data)
            for entry in [entry for entry in self._deadlines if entry[0] <= time.monotonic()]:
                self._deadlines.remove(entry)
                entry[1]()
        return self._leave()

    def _done(self) -> bool:
        if self._rank:
            return self._status is not None and self._left
        return len(self._statuses) == len(self._link.hosts) + 1

    def _time_left(self) -> float:
        return max(0.0, min([_LOOK, *(when - time.monotonic() for when, _ in self._deadlines)]))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._deadlines.append((time.monotonic() + seconds, action))

    # --- the own rank ---------------------------------------------------------------------------------------------

    def _heed(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._look_at_child()
            else:
                self._child.send_signal(number)

    def _look_at_child(self) -> None:
        code = self._child.poll()
        if code is None or self._status is not None:
            return
        self._status = code if code >= 0 else 128 - code
        if self._rank:
            self._send(0, f"ended {self._status}")
            if self._status not in (0, PREEMPTED):
                self._after(GRACE, self._end_child)  # the same clock as at the desk, in case it cannot be heard
        else:
            self._count(0, self._status)

    def _end_child(self) -> None:
        if not self._ending:
            self._ending = True
            self._child.terminate()
            self._after(PATIENCE, self._child.kill)
            self._after(2 * PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """Those that have not answered until now are gone."""
        self._left = True
        if self._rank:
            return
        missing = [other for other in self._link.connections if other not in self._statuses]
        if missing:
            silent = ", ".join(dict.fromkeys(self._link.hosts[other] for other in missing))
            say(f"{silent} does not answer any more, and counts as lost. An mpirun that waits for it must be ended.")
        for other in missing:
            self._drop(other)
            self._statuses[other] = LOST

    # --- the others -----------------------------------------------------------------------------------------------

    def _send(self, other: int, text: str) -> None:
        with suppress(OSError):  # that it is gone is seen when it is read
            self._link.connections[other].sendall(f"{text}\n".encode())

    def _read(self, other: int) -> None:
        try:
            line = _line(self._link.connections[other])
        except OSError:
            line = ""
        what, _, number = line.partition(" ")
        if what == "ended":
            self._count(other, int(number))
        elif what == "end":
            self._end_child()
        elif what == "leave":
            self._left = True
        elif not line:
            self._drop(other)
            if self._rank:
                self._left = True
                self._end_child()
            elif other not in self._statuses:
                self._count(other, LOST)

    def _drop(self, other: int) -> None:
        connection = self._link.connections.pop(other)
        self._selector.unregister(connection)
        connection.close()

    def _count(self, other: int, status: int) -> None:
        """At the desk: a rank has ended."""
        if status not in (0, PREEMPTED) and job_status([0, *self._statuses.values()]) in (0, PREEMPTED):
            say(f"rank {other} on {self._link.hosts.get(other, self._host)} ended with {status}")
        self._statuses[other] = status
        if status:
            # Ranks that save leave one after another; after a failure those that are left have nothing to do any more.
            self._after(PATIENCE if status == PREEMPTED else GRACE, self._end_all)

    def _end_all(self) -> None:
        self._end_child()
        for other in self._link.connections:
            self._send(other, "end")

    def _leave(self) -> int:
        if self._rank:
            return 0
        deadline = time.monotonic() + 10.0
        for other in self._link.connections:
            self._send(other, "leave")
        for connection in self._link.connections.values():
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            with suppress(OSError):
                while connection.recv(4096):
                    pass
        return job_status(list(self._statuses.values()))


def job_status(statuses: Sequence[int]) -> int:
    """One status for ranks that ended with these, in this order."""
    return next((status for status in statuses if status not in (0, PREEMPTED)), max(statuses))


def _line(connection: socket.socket) -> str:
    """The next line, empty at the end of the connection. Lines are short and come in one piece, or nearly so."""
    text = b""
    while not text.endswith(b"\n"):
        letter = connection.recv(1)
        if not letter or len(text) > _LINE:
            return ""
        text += letter
    return text.decode(errors="replace").strip()


def _dies_with_parent() -> Callable[[], None] | None:
    """What a new process does first, so that SIGKILL to this one ends it as well; None where only Linux could."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:  # it has died already
            os._exit(LOST)

    return ask


if __name__ == "__main__":
    raise SystemExit("launch/mpi_supervisor.py is part of launch/mpi_worker.py: run that.")

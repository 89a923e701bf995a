"""torchrun whose exit status is that of the ranks: `python launch/torchrun.py` with torchrun's own arguments.

torchrun answers 1 whatever the ranks answered, so a scheduler could not tell a run that has saved and wants to be
started again (75) from one that has failed. It also passes on SIGTERM and SIGINT, but by itself neither SIGUSR1 nor
Ctrl-Z (SIGTSTP), which would leave the ranks to train on with nobody behind them.

torchrun would also open its ports on all addresses, where a stranger finds a rendezvous that is unpickled, and leave a
folder /tmp/torchelastic_* behind when it is killed. Here one machine stays behind its loopback: --standalone, and every
other call for one node, meets in a store on 127.0.0.1, and gloo and NCCL take the loopback too unless
GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says otherwise. Of several nodes the first listens at the address by which
--master-addr is its own, else at --local-addr. Only --rdzv-backend=c10d for several nodes is torch's own.

Ranks without a GPU are forked from a process that has imported what they need (`RankForks`): eight of them take the
imports of one, in time and in memory.

| what happened                     | exit status                                                                  |
| --------------------------------- | ---------------------------------------------------------------------------- |
| all ranks ended well              | 0                                                                            |
| a rank failed, no restart is left | that of the first rank that failed; 128 + n where signal n killed it         |
| the rendezvous failed             | 2: a port in use, a node that does not come                                  |
| the ranks ended with 75           | 75: whoever sent them a signal wants them to end, and they are not restarted |
| a signal was passed on            | that of the first rank that answered neither 0 nor 75; else 75 where any did |
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import importlib
import json
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from io import FileIO, TextIOWrapper
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast
from unittest.mock import patch

from torch.distributed import DistError, TCPStore, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.launcher import api

PREEMPTED, BAD_INPUT = 75, 2
TOLD = (BAD_INPUT, PREEMPTED)
"""Statuses of ranks that have said themselves why they ended."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
LOOPBACK = "127.0.0.1"
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these is there where NVIDIA's or AMD's driver is."""
PRELOAD = ("torch.distributed.tensor", "torch._dynamo", "scipy.optimize")
"""What ranks import later than at their start: torch._dynamo with the first DTensor, scipy.optimize to plan packs."""
OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TENSOR3D_SECRET", "PET_SIGNALS_TO_HANDLE"),
)
"""Variables that torchrun, or `listen`, sets for a rank and that nothing reads while it is imported."""


def main(arguments: Sequence[str]) -> int:
    """The exit status, after everything is said."""
    # As if --signals-to-handle had been given; a torch that does not know it yet ignores this.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
    asked = run.parse_args(list(arguments))
    if not (asked.log_dir or asked.redirects != "0" or asked.tee != "0"):
        asked.log_dir = os.devnull  # else a folder in /tmp for nothing
    forks = RankForks.begin(asked)
    try:
        return run_agent(asked, forks)
    finally:
        if forks:
            forks.close()


def run_agent(asked: argparse.Namespace, forks: RankForks | None) -> int:
    """torchrun itself; the exit status."""
    try:
        listener = listen(asked)
    except OSError as error:
        where = f"port {asked.master_port} of {asked.master_addr}"
        print(f"launch/torchrun.py: cannot listen at {where}: {error.strerror}.", file=sys.stderr, flush=True)
        return BAD_INPUT
    codes: list[int | None] = []

    class Rendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
        """Torch's own, whose store listens where it was told to; it is made once, and serves all restarts."""

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None and listener is not None:
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    is_master=True,
                    timeout=self.timeout,
                    master_listen_fd=listener.detach(),
                )
            return super().next_rendezvous()

    class Agent(LocalElasticAgent):
        """Notes how the ranks ended that it was told to end, and stops and continues them with itself."""

        def run(self, role: str = "default") -> RunResult:
            # Not where it is ignored, as under a shell without job control.
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                signal.signal(signal.SIGTSTP, lambda *_: stop(self._ranks()))
            return super().run(role)

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            # A signal between two ranks would have torchrun leave without those that it has begun.
            with ExitStack() as until_started:
                usual = SubprocessContext._start

                def start(context: SubprocessContext) -> None:
                    until_started.enter_context(answered_later())  # torchrun has installed its handlers by now
                    usual(context)

                with patch.object(SubprocessContext, "_start", start):
                    return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            codes = {failure.exitcode for failure in result.failures.values()}
            # Those that were slower to leave were ended by torchrun, when it saw the first one go.
            if PREEMPTED in codes and codes <= {PREEMPTED, -signal.SIGTERM, -signal.SIGKILL}:
                self._remaining_restarts = 0  # they have saved for somebody who wants them to end
            return result

        def _ranks(self) -> list[int]:
            return list(self._pcontext.pids().values()) if self._pcontext else []

        def _shutdown(self, *arguments: Any, **named: Any) -> None:  # torch 2.11 knows no timeout
            if isinstance(sys.exc_info()[1], SignalException):
                # Another one, while it waits for the ranks, would end torchrun alone and leave them behind.
                for name in SIGNALS.split(","):
                    signal.signal(signal.Signals[name], lambda number, _: send(number, self._ranks()))
            super()._shutdown(*arguments, **named)
            handlers: Mapping[int, object] = getattr(self._pcontext, "subprocess_handlers", {})
            codes[:] = [handler.proc.returncode for handler in handlers.values()]  # type: ignore[attr-defined]

    # torchrun has no other way to say which
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    if forks:
        forks.serve(SubprocessHandler)
    static_tcp_rendezvous.StaticTCPRendezvous = Rendezvous  # type: ignore[misc]
    try:
        run.run(asked)
    except ChildFailedError as error:
        status = exit_status([error.get_first_failure()[1].exitcode])
        if status not in TOLD:
            print(error.format_msg(), file=sys.stderr, flush=True)
        return status
    except DistError as error:
        print(f"launch/torchrun.py: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except SignalException as error:
        status = exit_status(codes) if codes else 128 + error.sigval
        print(f"launch/torchrun.py: {error.sigval.name}; the ranks ended with {status}", file=sys.stderr, flush=True)
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def listen(asked: argparse.Namespace) -> socket.socket | None:
    """The socket of the store where this agent has it, bound to one address; None on other nodes and for c10d.

    Args:
        asked: torchrun's arguments; those that say where the store is are made to fit.

    Raises:
        OSError: the port is in use, or there is no such address.
    """
    if run.parse_min_max_nnodes(asked.nnodes)[1] == 1:
        listener = socket.create_server((LOOPBACK, 0 if asked.standalone else asked.master_port or 0))
        asked.standalone, asked.rdzv_backend, asked.rdzv_endpoint, asked.node_rank = False, "static", "", 0
        asked.master_addr, asked.master_port = listener.getsockname()
        asked.local_addr = LOOPBACK
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        # Other users of this machine reach its loopback: the ranks know each other's messages by this.
        os.environ.setdefault("TENSOR3D_SECRET", secrets.token_hex(16))
        return listener
    if asked.rdzv_backend != "static" or asked.node_rank != 0 or asked.rdzv_endpoint:
        return None
    asked.master_port = asked.master_port or 29500
    return bound((asked.master_addr, asked.local_addr), asked.master_port)


def bound(hosts: Sequence[str | None], port: int) -> socket.socket:
    """A listening socket at the first of these that is an address of this machine by which others come in; at all
    addresses where none is.

    Raises:
        OSError: the port is in use there.
    """
    for host in filter(None, hosts):
        try:
            found = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), key=lambda each: each[0])
        except OSError:
            continue  # a name that is not known here
        for kind, _, _, _, address in found:
            own = str(address[0])
            # What others know by a name may be a loopback here (/etc/hosts), by which they do not come in.
            if ip_address(own.partition("%")[0]).is_loopback and host not in (own, "localhost"):
                continue
            with socket.socket(kind, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((own, 0))
                except OSError:
                    continue  # not this machine's
            return socket.create_server((own, port), family=kind)
    return socket.create_server(("", port))


@contextmanager
def answered_later() -> Iterator[None]:
    """A signal that comes inside is answered at the end."""
    names = map(signal.Signals.__getitem__, SIGNALS.split(","))
    usual = {number: handler for number in names if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        os.write(2, f"launch/torchrun.py: {signal.Signals(number).name}; as soon as the ranks are there\n".encode())

    for number in usual:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for first, frame in came[:1]:
        usual[signal.Signals(first)](first, frame)


def stop(ranks: Sequence[int]) -> None:
    """Stops these processes and this one, which continues them when somebody continues it."""
    send(signal.SIGSTOP, (*ranks, os.getpid()))
    send(signal.SIGCONT, ranks)


def send(number: int, processes: Sequence[int]) -> None:
    """Sends a signal to those of them that still run."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def exit_status(codes: Sequence[int | None]) -> int:
    """One status for ranks that ended with these; None: one that would not end, like one that had to be killed."""
    statuses = [128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code for code in codes]
    failed = [status for status in statuses if status not in (0, PREEMPTED)]
    return failed[0] if failed else max(statuses)


# --- Ranks that are forked from a process that has imported what they need --------------------------------------------


class RankForks:
    """Starts `python -u -m MODULE ...` for each rank by forking a process that has imported torch, and MODULE where it
    ends with `if __name__ == "__main__"`, once.

    To whoever looks they are started as ever: children of torchrun, leaders of a session, with the signals, the
    environment and the arguments that they would have. Not on GPUs, whose driver does not live on in a fork; not where
    the environment of a rank differs by more than torchrun's own variables, for libraries read theirs when they are
    loaded; and on Linux alone.
    """

    def __init__(self, module: str, call: socket.socket, keeper: int) -> None:
        self._module, self._call, self._keeper = module, call, keeper
        self._environment = dict(os.environ)
        self._lines = call.makefile()
        self._process: int | None = None
        """A handle, and not its number, which another process may get."""
        with suppress(OSError):
            self._process = os.pidfd_open(int(self._lines.readline() or 0))

    @classmethod
    def begin(cls, asked: argparse.Namespace) -> RankForks | None:
        """Starts that process, which imports while torchrun goes on; None where ranks are to be started as usual.

        It returns in a rank never: the rank runs its module, and ends.
        """
        has_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, GPUS))
        # Without it torch and NumPy have made threads by now.
        if has_gpu or sys.platform != "linux" or not asked.module or "OMP_NUM_THREADS" not in os.environ:
            return None
        # Whoever loses its parent below this process becomes its child (PR_SET_CHILD_SUBREAPER).
        if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:
            return None
        ours, theirs = socket.socketpair()
        keeper = os.fork()
        if keeper:
            theirs.close()
            return cls(asked.training_script, ours, keeper)
        # The keeper is all that is between: among torchrun's children are its ranks, and nothing that looks like one.
        ours.close()
        os.setsid()
        dispositions = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in map(signal.Signals.__getitem__, SIGNALS.split(","))
        }
        over, held = os.pipe()
        if os.fork():
            os.dup2(over, 0)
            os.execv("/bin/sh", ["sh", "-c", "read -r _", "launch/torchrun.py"])  # until the other one is gone
        os.close(over)
        arguments, environment = serve(theirs, asked.training_script, held, dispositions)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        sys.stdout, sys.stderr = unbuffered(sys.stdout, 1), unbuffered(sys.stderr, 2)
        runpy.run_module(asked.training_script, run_name="__main__", alter_sys=True)
        sys.exit()

    def serve(self, handler: type[SubprocessHandler]) -> None:
        """Has torchrun start its ranks by this."""
        usual = handler._popen

        def popen(rank: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
            written = rank._stdout is not None or rank._stderr is not None
            return (None if written else self._start(args, env)) or usual(rank, args, env)

        handler._popen = popen  # type: ignore[assignment, method-assign]

    def _start(self, command: tuple[str, ...], environment: dict[str, str]) -> ForkedRank | None:
        """A rank; None where it has to be started as usual."""
        if command[:4] != (sys.executable, "-u", "-m", self._module):
            return None
        names = environment.keys() | self._environment.keys()
        differ = {name for name in names if environment.get(name) != self._environment.get(name)}
        if not all(name in OF_RANKS or name.startswith("TORCHELASTIC_") for name in differ):
            return None
        with suppress(OSError):
            self._call.sendall(json.dumps([command[4:], environment]).encode() + b"\n")
            if number := int(self._lines.readline() or 0):
                return ForkedRank(number)
        print("launch/torchrun.py: a rank cannot be forked and is started by itself", file=sys.stderr, flush=True)
        return None

    def close(self) -> None:
        """Ends what was begun; ranks live on."""
        if self._process:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
        self._call.close()
        os.waitpid(self._keeper, 0)


class ForkedRank:
    """A rank as torchrun knows its processes: what it uses of `subprocess.Popen`."""

    def __init__(self, number: int) -> None:
        self.pid = number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return code


def serve(
    call: socket.socket, module: str, held: int, dispositions: Mapping[signal.Signals, Any]
) -> tuple[list[str], dict[str, str]]:
    """Forks a rank for each line that comes; returns in the ranks alone, with their arguments and environment.

    Args:
        held: the end of a pipe that no rank is to have.
        dispositions: of signals, for the ranks.
    """
    call.sendall(b"%d\n" % os.getpid())
    preload(module)
    with call.makefile() as lines:
        for line in lines:
            # A signal that comes before a rank has its dispositions waits for them.
            signal.pthread_sigmask(signal.SIG_BLOCK, dispositions)
            if number := fork_orphan():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, dispositions)
                call.sendall(b"%d\n" % number)
                continue
            os.setsid()
            os.close(held)
            call.close()
            for each, what in dispositions.items():
                signal.signal(each, what)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, dispositions)
            arguments, environment = json.loads(line)
            return arguments, environment
    os._exit(0)


def fork_orphan() -> int:
    """The number of a new process whose parent is gone, so that torchrun becomes it; 0 in that process."""
    told, tell = os.pipe()
    if child := os.fork():
        os.close(tell)
        os.waitpid(child, 0)
        with open(told, "rb") as file:
            return int(file.read())
    parent = os.getpid()
    with suppress(OSError):
        if orphan := os.fork():
            os.write(tell, b"%d" % orphan)
    if os.getpid() == parent:
        os._exit(0)
    os.close(told)
    os.close(tell)
    while os.getppid() == parent:
        time.sleep(0.001)
    return 0


def unbuffered(stream: TextIO | None, number: int) -> Any:
    """The same as `python -u` has it; None where it is closed."""
    if stream is None:
        return None
    raw = FileIO(number, "w", closefd=False)
    return TextIOWrapper(cast(Any, raw), encoding=stream.encoding, errors=stream.errors, write_through=True)


def preload(module: str) -> None:
    """Imports what a rank would, as far as that runs nothing."""
    sys.path[0] = os.getcwd()  # as of `python -m`
    gc.disable()  # what is loaded is no garbage
    for name in PRELOAD:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(Exception, SystemExit):  # the ranks will say it
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(module := f"{module}.__main__")
        if spec is not None and spec.origin is not None and has_guard(Path(spec.origin).read_text(encoding="utf-8")):
            importlib.import_module(module)
            del sys.modules[module]  # the ranks run it anew, as __main__
    gc.enable()
    gc.collect()
    gc.freeze()  # what ranks share stays shared


def has_guard(source: str) -> bool:
    """Whether importing it defines things and no more: its last statement is `if __name__ == "__main__":`."""
    last = ast.parse(source).body[-1]
    return isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

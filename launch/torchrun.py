"""torchrun whose exit status is that of the ranks: `python launch/torchrun.py` with torchrun's own arguments.

torchrun answers 1 whatever the ranks answered, so a scheduler could not tell a run that has saved and wants to be
started again (75) from one that has failed. It also passes on SIGTERM and SIGINT, but by itself neither SIGUSR1 nor
Ctrl-Z (SIGTSTP), which would leave the ranks to train on with nobody behind them.

torchrun would also open its ports on all addresses, where a stranger finds a rendezvous that is unpickled, and leave a
folder /tmp/torchelastic_* behind when it is killed. Here one machine stays behind its loopback: --standalone, and every
other call for one node, meets in a store on 127.0.0.1, and gloo and NCCL take the loopback too unless
GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says otherwise. Of several nodes the first listens at the address by which
--master-addr is its own, else at --local-addr. Only --rdzv-backend=c10d for several nodes is torch's own.

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
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

from torch.distributed import DistError, TCPStore, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.launcher import api

PREEMPTED, BAD_INPUT = 75, 2
TOLD = (BAD_INPUT, PREEMPTED)
"""Statuses of ranks that have said themselves why they ended."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    """The exit status, after everything is said."""
    # As if --signals-to-handle had been given; a torch that does not know it yet ignores this.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
    asked = run.parse_args(list(arguments))
    if not (asked.log_dir or asked.redirects != "0" or asked.tee != "0"):
        asked.log_dir = os.devnull  # else a folder in /tmp for nothing
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

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            codes = {failure.exitcode for failure in result.failures.values()}
            # Those that were slower to leave were ended by torchrun, when it saw the first one go.
            if PREEMPTED in codes and codes <= {PREEMPTED, -signal.SIGTERM, -signal.SIGKILL}:
                self._remaining_restarts = 0  # they have saved for somebody who wants them to end
            return result

        def _ranks(self) -> list[int]:
            return list(self._pcontext.pids().values()) if self._pcontext else []

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            if isinstance(sys.exc_info()[1], SignalException):
                # Another one, while it waits for the ranks, would end torchrun alone and leave them behind.
                for name in SIGNALS.split(","):
                    signal.signal(signal.Signals[name], lambda number, _: send(number, self._ranks()))
            super()._shutdown(death_sig, timeout)
            handlers: Mapping[int, object] = getattr(self._pcontext, "subprocess_handlers", {})
            codes[:] = [handler.proc.returncode for handler in handlers.values()]  # type: ignore[attr-defined]

    # torchrun has no other way to say which
    api.LocalElasticAgent = Agent  # type: ignore[misc]
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Starts launch/torchrun.sh on every host of a list over ssh: `python launch/ssh.py --hosts a,b RECIPE ...`.

The hosts have the repository at the same path (a shared disk, or copies), and ssh enters them without a password. What
they print is shown with the host's name in front. SIGTERM, SIGUSR1 and Ctrl-C go to all hosts, whose ranks end the
step, save and leave. When a host fails, the others have --grace seconds to end by themselves before they are told to.

Exit status: that of the first host that failed; else 75 where any has saved to be started again; else 0.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

ROOT = Path(__file__).resolve().parent.parent
BAD_INPUT, PREEMPTED = 2, 75
# A host that is cut off is noticed after a minute and a half.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=30"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; 2 for a bad call, with one message."""
    parser = argparse.ArgumentParser(
        prog="launch/ssh.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options, RECIPE and its overrides are those of launch/torchrun.sh. RECIPE is looked for in "
        "the repository of the hosts. No variable of this shell travels. The hosts get a secret of the job, by which "
        "they know each other's messages.",
        allow_abbrev=False,
    )
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument("--hosts", help="names with commas; the first one is the master")
    named.add_argument(
        "--hostfile", type=Path, help="a host a line, with slots=N or :N behind it if wanted; # begins a comment"
    )
    parser.add_argument(
        "--master", help="HOST[:PORT] of the first host as the others reach it (default: its name, without a user)"
    )
    parser.add_argument("--ssh", default=SSH, help="command that enters a host (default: %(default)s)")
    parser.add_argument("--repository", default=str(ROOT), help="where it lies on the hosts (default: %(default)s)")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds (default: %(default)g)")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each host and start nothing")
    asked, rest = parser.parse_known_args(arguments)
    try:
        if not asked.grace >= 0:
            raise ValueError(f"--grace must be at least 0 seconds. Got {asked.grace:g}.")
        hosts, slots = read_hosts(asked.hosts, asked.hostfile)
        commands = remote_commands(hosts, slots, asked.master or _address(hosts[0]), asked.ssh, asked.repository, rest)
    except (OSError, ValueError) as problem:
        print(f"launch/ssh.py: {problem}", file=sys.stderr)
        return BAD_INPUT
    if asked.dry_run:
        for command in commands:
            print(shlex.join(command))
        return 0
    return Hosts(hosts, commands).run(asked.grace)


def read_hosts(names: str | None, hostfile: Path | None) -> tuple[list[str], int | None]:
    """The hosts, and how many processes each has, where a file says it.

    Raises:
        ValueError: no host, one twice, a line that cannot be read, or different slots.
    """
    try:
        # Editors of Windows begin with a byte order mark.
        text = "" if hostfile is None else hostfile.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{hostfile} is not UTF-8 at byte {problem.start + 1}. Convert it: iconv -t utf-8.") from None
    lines = (names or "").split(",") if hostfile is None else text.splitlines()
    hosts: list[str] = []
    slots: dict[str, str | None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if len(words) == 1 and (short := re.fullmatch(r"([^:]+):(\d+)", words[0])):  # and not an address of IPv6
            if hostfile is None:
                raise ValueError(
                    f"--hosts: a host has no {short[2]} behind it. A port of ssh is said by --ssh. Got {line!r}."
                )
            words = [short[1], f"slots={short[2]}"]  # as launch/mpirun.sh has it, too
        if not words and hostfile is not None:
            continue
        count = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        wrong = not words or words[0].startswith("-") or not words[0].isprintable()
        if wrong or len(words) > 2 or (len(words) == 2 and count is None):
            where = "--hosts" if hostfile is None else f"{hostfile}, line {number}"
            raise ValueError(f"{where}: a host is written NAME, NAME slots=N or NAME:N. Got {line!r}.")
        # Names of hosts know no case, the user before one does.
        if _same(words[0]) in map(_same, hosts):
            raise ValueError(f"host {words[0]} stands there twice. Every node is one host.")
        hosts.append(words[0])
        slots[words[0]] = count[1] if count else None
    if not hosts:
        raise ValueError(f"{hostfile or '--hosts'} names no host.")
    if len(set(slots.values())) > 1:
        told = ", ".join(f"{host}: {number or 'none given'}" for host, number in slots.items())
        raise ValueError(f"every host needs the same slots, because every node has as many processes. Got {told}.")
    each = slots[hosts[0]]
    return hosts, None if each is None else int(each)


def _same(host: str) -> str:
    """Equal for names of one host."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.lower()}"


def _address(host: str) -> str:
    """Where a host is that ssh enters as a user."""
    return host.rpartition("@")[2]


def remote_commands(
    hosts: Sequence[str], slots: int | None, master: str, ssh: str, repository: str, rest: Sequence[str]
) -> list[list[str]]:
    """What is run here for each host. Raises ValueError where that is no command."""
    commands = []
    try:
        enter = shlex.split(ssh)
    except ValueError as problem:
        raise ValueError(f"--ssh {ssh!r} is no command: {problem}.") from None
    if not enter:
        raise ValueError("--ssh is empty. Name what enters a host, such as 'ssh -p 2222', or leave it out.")
    for node, host in enumerate(hosts):
        launcher = ["launch/remote.sh", "launch/torchrun.sh", "--nodes", str(len(hosts)), "--node-rank", str(node)]
        launcher += [
            "--master",
            master,
            "--hosts",
            ",".join(hosts),
            *([] if slots is None else ["--per-node", str(slots)]),
            *rest,
        ]
        # The far shell splits the words again.
        # The secret of the job comes first by standard input: nobody sees it in a list of processes.
        far = f"cd {shlex.quote(repository)} && read -r TENSOR3D_SECRET && export TENSOR3D_SECRET && "
        commands.append([*enter, host, f"exec sh -c {shlex.quote(f'{far}exec {shlex.join(launcher)}')}"])
    return commands


class Hosts:
    """The running commands, one for each host."""

    def __init__(self, names: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
        self._names, self._commands = names, commands
        self._running: list[subprocess.Popen[bytes]] = []
        self._printing = threading.Lock()
        self._secret = os.environ.get("TENSOR3D_SECRET") or secrets.token_hex(16)

    def run(self, grace: float) -> int:
        """Waits for all of them. The exit status."""
        for signum, name in ((signal.SIGTERM, "TERM"), (signal.SIGINT, "TERM"), (signal.SIGUSR1, "USR1")):
            signal.signal(signum, lambda *_, name=name: self._tell(name))
        readers = []
        for name, command in zip(self._names, self._commands, strict=True):
            # A session of its own: Ctrl-C would end ssh itself before the ranks have saved.
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as problem:  # of the first host, or of all
                self._say(f"{command[0]} cannot be started: {problem.strerror}. Name what enters a host: --ssh.")
                return BAD_INPUT
            self._running.append(process)
            self._write(process, self._secret)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                reader = threading.Thread(target=self._show, args=(name, source, target), daemon=True)
                reader.start()
                readers.append(reader)
        statuses = self._wait(grace)
        for reader in readers:
            reader.join(timeout=5.0)
        failed = [status for status in statuses if status not in (0, PREEMPTED)]
        return failed[0] if failed else max(statuses)

    def _wait(self, grace: float) -> list[int]:
        """Statuses in the order in which hosts ended."""
        statuses: list[int] = []
        left = dict(zip(self._names, self._running, strict=True))
        deadline: float | None = None
        warned = False
        while left:
            for name, process in list(left.items()):
                code = process.poll()
                if code is None:
                    continue
                statuses.append(code if code >= 0 else 128 - code)
                del left[name]
                if statuses[-1] not in (0, PREEMPTED):
                    self._say(f"{name} ended with {statuses[-1]}")
                    deadline = deadline or time.monotonic() + grace
            if deadline is not None and left and time.monotonic() > deadline:
                if warned:
                    self._say(f"giving up on {', '.join(left)}")
                    for process in left.values():
                        process.kill()  # its end closes the far standard input, and remote.sh ends what runs there
                else:
                    self._say(f"ending {', '.join(left)}")
                    self._tell("TERM")
                    warned, deadline = True, time.monotonic() + 60.0
            time.sleep(0.1)
        return statuses

    def _tell(self, name: str) -> None:
        for process in self._running:
            if process.poll() is None and process.stdin is not None:
                self._write(process, name)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # it has just ended
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()

    def _show(self, name: str, source: IO[bytes], target: TextIO) -> None:
        for line in source:
            # Read on where it cannot be shown any more: the host would stop at a pipe that is full.
            with self._printing, suppress(OSError):
                target.buffer.write(f"[{name}] ".encode() + line)
                target.buffer.flush()

    def _say(self, text: str) -> None:
        with self._printing:
            print(f"launch/ssh.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Several hosts on one machine, for tests: network namespaces with their own names and addresses, joined by a switch.

    with hosts(2) as (a, b):
        server = b.popen(["python", "-m", "http.server"])
        a.run(["ping", "-c", "1", b.name], check=True)

A host has its own loopback, one interface, `eth0`, with an address 10.77.0.N, and its own host name, which every host
of the group resolves. All of them see one file system, as nodes do that share theirs, but for what `own` names. `ssh`
on the PATH is a stand-in (`tests/fake_ssh.py`) that leads from host to host. Nobody outside the group can reach a host,
and no host can reach anybody outside.

Needs root and iproute2; `why_not` says what is missing. Everything is removed at the end, processes first. What a test
that was killed has left behind is removed by the next one that makes hosts.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")
_FILES = Path("/etc/netns")  # what lies in NAME here lies over /etc inside `ip netns exec NAME`
_STEM = re.compile(r"t3d-(\d+)-(\d+)-\d+")  # process that made it, when that one began, its how manieth group
_GROUPS = itertools.count()
_NEEDED = ("ip", "tc", "unshare", "mount", "hostname")


def why_not() -> str:
    """Why hosts cannot be made here, for `pytest.skip`; empty where they can."""
    if os.geteuid() != 0:
        return "hosts of network namespaces need root"
    if missing := [tool for tool in _NEEDED if shutil.which(tool) is None]:
        return f"hosts of network namespaces need {', '.join(missing)} (Debian: iproute2, util-linux, hostname)"
    trial = "ip link add type bridge && ip link add type veth"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", trial], capture_output=True, text=True, check=False
    )
    return f"network namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def hosts(count: int, *, own: Sequence[Path] = ()) -> Iterator[tuple[Host, ...]]:
    """`count` hosts that reach each other, up to 250, called node0, node1, ...

    Args:
        own: folders of which each host has a version of its own, empty at first (`Host.own` says where it lies).
    """
    sweep()
    stem = f"t3d-{os.getpid()}-{_began(os.getpid())}-{next(_GROUPS)}"
    folder = Path(tempfile.gettempdir()) / stem
    made = tuple(
        Host(name=f"node{number}", address=f"10.77.0.{number + 1}", stem=stem, folder=folder, number=number, own=own)
        for number in range(count)
    )
    try:
        _write_files(folder, made)
        _join(stem, made)
        yield made
    finally:
        for host in made:
            host.close()
        _remove(stem)


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """Bytes on the wire of a host, with the headers of Ethernet, since it was made."""

    received: int
    sent: int


@dataclass(kw_only=True)
class Host:
    """One of several hosts. Made by `hosts`."""

    name: str
    """As its own `hostname` says and as the others resolve it."""
    address: str
    """IPv4."""
    stem: str
    folder: Path
    """Of the group, for its scripts."""
    number: int
    own: Sequence[Path] = ()
    interface: str = INTERFACE
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"{self.stem}-{self.name}"

    @property
    def ssh(self) -> Path:
        """The stand-in for ssh."""
        return self.folder / "bin" / "ssh"

    def owned(self, path: Path) -> Path:
        """Where this host's version of an own folder lies for everybody else."""
        return self.folder / self.name / path.absolute().relative_to("/")

    def inside(self, command: Sequence[str | Path]) -> list[str]:
        """The command that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", str(self.folder / self.name / "enter")] + [
            str(word) for word in command
        ]

    def popen(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a process in a session of its own, which ends with the host at the latest, as do its descendants.

        Args:
            env: instead of this process's environment. Either way `ssh` is the stand-in.
            options: as for `subprocess.Popen`; standard input is empty by default.
        """
        variables = dict(os.environ if env is None else env)
        variables["PATH"] = f"{self.ssh.parent}:{variables.get('PATH', os.defpath)}"
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        process = subprocess.Popen(self.inside(command), env=variables, **options)
        self.started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 60.0,
        check: bool = False,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; what it writes is captured as text.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds; it has been killed.
            subprocess.CalledProcessError: `check`, and it failed.
        """
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        if input is not None:
            options["stdin"] = subprocess.PIPE
        with self.popen(command, env=env, **options) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def processes(self) -> list[int]:
        """Numbers of all processes on this host."""
        return [int(number) for number in _output("ip", "netns", "pids", self.namespace).split()]

    def crossed(self) -> Crossed:
        (link,) = json.loads(_output("ip", "-n", self.namespace, "-s", "-j", "link", "show", self.interface))
        return Crossed(received=link["stats64"]["rx"]["bytes"], sent=link["stats64"]["tx"]["bytes"])

    def slow(self, rate: str) -> None:
        """Lets no more than this through its wire, in each direction: "200mbit"."""
        bucket = ["root", "tbf", "rate", rate, "burst", "256kb", "limit", "4mb"]
        _output("tc", "-n", self.namespace, "qdisc", "replace", "dev", self.interface, *bucket)
        _output("tc", "-n", f"{self.stem}-switch", "qdisc", "replace", "dev", self._port, *bucket)

    def cut(self) -> None:
        """Pulls its cable out: what is sent to it or by it is lost, and nobody is told."""
        _output("ip", "-n", f"{self.stem}-switch", "link", "set", self._port, "down")

    def mend(self) -> None:
        """Puts its cable back."""
        _output("ip", "-n", f"{self.stem}-switch", "link", "set", self._port, "up")

    @property
    def _port(self) -> str:
        return f"port{self.number}"

    def close(self) -> None:
        """Kills all that runs here."""
        _kill_all(self.namespace)
        for process in self.started:
            with suppress(ProcessLookupError):  # one whose namespace was never entered
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(BrokenPipeError):  # what was never read by whom it was for
                        stream.close()
        self.started.clear()


def sweep() -> None:
    """Removes the hosts of processes that have died."""
    folders = (_NAMESPACES, _FILES, Path(tempfile.gettempdir()))
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    for stem in {match.group() for name in names if (match := _STEM.match(name))}:
        pid, began = (int(part) for part in stem.split("-")[1:3])
        if _began(pid) != began:
            _remove(stem)


def _remove(stem: str) -> None:
    found = [path.name for path in _NAMESPACES.glob(f"{stem}-*")] if _NAMESPACES.is_dir() else []
    for name in found:
        _kill_all(name)
        with suppress(subprocess.CalledProcessError):  # another test process sweeps as well
            _output("ip", "netns", "delete", name)
    for folder in (*_FILES.glob(f"{stem}-*"), Path(tempfile.gettempdir()) / stem):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty, or not ours
        _FILES.rmdir()


def _kill_all(namespace: str) -> None:
    """Kills every process of a namespace; one may have forked meanwhile, so it is looked again."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        living = [int(number) for number in listed.stdout.split()]
        for number in living:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if not living:
            return
        time.sleep(0.02)


def _write_files(folder: Path, made: Sequence[Host]) -> None:
    folder.mkdir()
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made)
    for host in made:
        files = _FILES / host.namespace
        files.mkdir(parents=True)
        (files / "hosts").write_text(names)
        mounts = []
        for path in host.own:
            host.owned(path).mkdir(parents=True)
            mounts.append(f"mount --bind {shlex.quote(str(host.owned(path)))} {shlex.quote(str(path.absolute()))}\n")
        (folder / host.name).mkdir(exist_ok=True)
        _script(folder / host.name / "enter", f'hostname {host.name}\n{"".join(mounts)}exec "$@"\n')
    doors = {name: host.inside([]) for host in made for name in (host.name, host.address)}
    (folder / "doors.json").write_text(json.dumps(doors))
    (folder / "bin").mkdir()
    stand_in = shlex.join([sys.executable, "-I", str(Path(__file__).with_name("fake_ssh.py")), f"{folder}/doors.json"])
    _script(folder / "bin" / "ssh", f'exec {stand_in} "$@"\n')


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\nset -e\n{text}")
    path.chmod(0o755)


def _join(stem: str, made: Sequence[Host]) -> None:
    switch = f"{stem}-switch"
    _batch(None, [f"netns add {name}" for name in (switch, *(host.namespace for host in made))])
    _batch(
        None,
        [
            f"link add {host._port} netns {switch} type veth peer name {host.interface} netns {host.namespace}"
            for host in made
        ],
    )
    # Without IPv6 on the wire nothing crosses it but what a test sends.
    _without_ipv6(switch, "all")
    ports = [f"link set {host._port} master bridge up" for host in made]
    _batch(switch, ["link add bridge type bridge", "link set bridge up", *ports])
    for host in made:
        _without_ipv6(host.namespace, host.interface)
        _batch(
            host.namespace,
            [
                "link set lo up",
                f"address add {host.address}/24 dev {host.interface}",
                f"link set {host.interface} up",
            ],
        )


def _without_ipv6(namespace: str, interface: str) -> None:
    setting = f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"
    _output("ip", "netns", "exec", namespace, "sh", "-c", f"[ ! -e {setting} ] || echo 1 > {setting}")


def _batch(namespace: str | None, lines: Sequence[str]) -> None:
    where = [] if namespace is None else ["-n", namespace]
    _output("ip", *where, "-batch", "-", text="\n".join(lines) + "\n")


def _output(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr) from RuntimeError(
            f"{shlex.join(command)}: {done.stderr.strip()}"
        )
    return done.stdout


def _began(process: int) -> int:
    """When a process began, in the kernel's ticks; -1: there is none."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return -1

"""tests/hosts.py itself: hosts that reach each other and nobody else, and a stand-in for ssh between them."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import hosts
from tests.hosts import Host

SIZE = 100_000
# Answers one connection with this many bytes, and says when it listens.
SERVER = f"""
import socket
with socket.create_server(("0.0.0.0", 7777)) as server:
    print("listening", flush=True)
    server.accept()[0].sendall(bytes({SIZE}))
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7777), timeout=0.5) as there:
    print(sum(len(data) for data in iter(lambda: there.recv(65536), b"")))
"""

reason = hosts.why_not()
needs_hosts = pytest.mark.skipif(bool(reason), reason=reason)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    with hosts.hosts(2, own=[tmp_path]) as made:
        yield made


def python(host: Host, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return host.run([sys.executable, "-I", "-c", text, *arguments], timeout=20)


def serve(host: Host) -> None:
    server = host.popen([sys.executable, "-I", "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"


@needs_hosts
def test_they_have_names_and_reach_each_other(pair: tuple[Host, ...]) -> None:
    a, b = pair
    assert [host.run(["hostname"]).stdout for host in pair] == ["node0\n", "node1\n"]
    assert (a.name, b.name) == ("node0", "node1")
    before = a.crossed()
    serve(b)
    assert python(a, CLIENT, b.name).stdout == f"{SIZE}\n"
    received = a.crossed().received - before.received
    assert SIZE < received < SIZE * 1.1
    assert b.crossed().sent > SIZE


@needs_hosts
def test_nobody_else_reaches_them(pair: tuple[Host, ...]) -> None:
    a, b = pair
    serve(b)
    with suppress(OSError), socket.create_connection((b.address, 7777), timeout=0.2):
        pass  # somebody else who has this address
    with hosts.hosts(3) as others:  # they have the addresses of ours, and a wire of their own
        assert "refused" in python(others[0], CLIENT, others[1].name).stderr
        for address in (others[2].name, others[2].address):
            assert re.search("not known|resolution|timed out|No route", python(a, CLIENT, address).stderr)
    assert python(a, CLIENT, b.name).stdout == f"{SIZE}\n", "it answers but once: nobody was there before"


@needs_hosts
def test_a_cut_cable_loses_what_is_sent(pair: tuple[Host, ...]) -> None:
    a, b = pair
    serve(b)
    b.cut()
    assert "timed out" in python(a, CLIENT, b.address).stderr
    b.mend()
    assert python(a, CLIENT, b.address).stdout == f"{SIZE}\n"


@needs_hosts
def test_a_slow_wire_has_a_bucket_at_both_ends(pair: tuple[Host, ...]) -> None:
    a, b = pair
    a.slow("80mbit")
    for namespace, port in ((a.namespace, a.interface), (f"{a.stem}-switch", "port0")):
        shown = subprocess.run(
            ["tc", "-n", namespace, "qdisc", "show", "dev", port], capture_output=True, text=True, check=True
        ).stdout
        assert "rate 80Mbit" in shown
    serve(b)
    assert python(a, CLIENT, b.address).stdout == f"{SIZE}\n"


@needs_hosts
def test_each_has_its_own_version_of_a_folder(pair: tuple[Host, ...]) -> None:
    a, b = pair
    (folder,) = a.own
    a.run(["touch", folder / "from a"], check=True)
    assert a.run(["ls", folder]).stdout == "from a\n"
    assert b.run(["ls", folder]).stdout == ""
    assert list(folder.iterdir()) == []
    assert [path.name for path in a.owned(folder).iterdir()] == ["from a"]


@needs_hosts
def test_ssh_carries_words_streams_and_the_status(pair: tuple[Host, ...]) -> None:
    a, _ = pair
    remote = "hostname; cat; echo \"$TERM.\" 'x  y' >&2; exit 3"
    done = a.run(["ssh", "-o", "BatchMode=yes", "-x", "root@node1", remote], env={"TERM": "here"}, input="in")
    assert (done.returncode, done.stdout, done.stderr) == (3, "node1\nin", ". x  y\n")
    # Two words become one line for the shell there, and standard input may be left alone.
    assert a.run(["ssh", "-n", "node1", "echo", "a  b"]).stdout == "a b\n"
    assert a.run(["ssh", "-tt", "node1", "[ -t 0 ] && [ -t 1 ] && echo terminal; exit 5"]).stdout == "terminal\n"
    assert a.run(["ssh", "node1", "kill -TERM $$"]).returncode == 255
    assert "Could not resolve hostname node7" in a.run(["ssh", "node7", "true"]).stderr


@needs_hosts
def test_ssh_does_not_get_through_a_cut_cable(pair: tuple[Host, ...]) -> None:
    a, b = pair
    b.cut()
    done = a.run(["ssh", b.name, "true"])
    b.mend()
    assert (done.returncode, done.stderr) == (255, "ssh: connect to host node1 port 22: No route to host\n")


@needs_hosts
def test_a_dying_ssh_hangs_up_on_its_command(pair: tuple[Host, ...], tmp_path: Path) -> None:
    a, b = pair
    note = b.owned(tmp_path) / "note"
    script = (
        f"trap 'echo hung up > {shlex.quote(str(tmp_path))}/note; exit' HUP; echo ready; while :; do sleep 0.05; done"
    )
    local = a.popen(["ssh", "-tt", b.name, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert local.stdout is not None
    assert b"ready" in local.stdout.readline()
    there = b.processes()
    local.kill()
    until(lambda: note.exists() and note.read_text() == "hung up\n")
    until(lambda: not any(map(running, there)))


@needs_hosts
def test_nothing_is_left() -> None:
    with hosts.hosts(1) as (host,):
        # A process that has left its session, and whose parent is gone.
        host.run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
        (lonely,) = host.processes()
    assert not running(lonely)
    assert left(host.stem) == []


@needs_hosts
def test_what_a_killed_test_leaves_is_swept() -> None:
    body = "from tests.hosts import hosts\nwith hosts(1) as (host,):\n print(host.stem, flush=True)\n input()"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", body], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        stem = maker.stdout.readline().strip()
        hosts.sweep()
        assert len(left(stem)) == 4, "two namespaces, the files of the host, and the folder of the group"
        maker.send_signal(signal.SIGKILL)
    hosts.sweep()
    assert left(stem) == []


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left(stem: str) -> list[Path]:
    folders = (Path("/run/netns"), Path("/etc/netns"), Path("/tmp"))
    return [path for folder in folders if folder.is_dir() for path in folder.glob(f"{stem}*")]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)

"""launch/ssh.py: hosts from a list or a file, the command for each, signals, and one exit status for all."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import ran

LAUNCH = Path(__file__).parents[2] / "launch"
# In the place of ssh: the words behind the host's name go to a shell, as sshd does it.
SHELL = "sh -c 'shift; exec sh -c \"$*\"' ssh"


def ssh(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(LAUNCH / "ssh.py"), *map(str, arguments)]


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """The repository as the hosts have it, with a launcher that does what its first word says, by node."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "remote.sh").symlink_to(LAUNCH / "remote.sh")
    script = tmp_path / "launch" / "torchrun.sh"
    script.write_text('#!/usr/bin/env bash\nnode=$4\nwhile [ "$1" != -- ]; do shift; done\nshift\neval "$1"\n')
    script.chmod(0o755)
    return tmp_path


def run(far: Path, body: str, *options: str, hosts: str = "a,b") -> subprocess.CompletedProcess[str]:
    command = ssh("--hosts", hosts, "--ssh", SHELL, "--repository", far, *options, "--", body)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_of_each_host(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("\ufeff# ours\r\nuser@a slots=4\r\n\nuser@b:4  # the other\n")
    command = ssh("--hostfile", hostfile, "--repository", "/far away", "--dry-run", "--cube", "2x2x2", "r.toml")
    first, second = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first.startswith("ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=30 user@a ")
    assert " user@b " in second
    assert "/far away" in first
    assert (
        "exec launch/remote.sh launch/torchrun.sh --nodes 2 --node-rank 1 --master a --hosts user@a,user@b "
        "--per-node 4 --cube 2x2x2 r.toml" in second
    )


def test_the_hosts_get_a_secret_that_no_command_line_shows(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'echo "<$TENSOR3D_SECRET>"; cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\\0" "\\n" >"args$node"'
    found = []
    for _ in range(2):
        told = {line.partition(" ")[2] for line in run(far, body).stdout.splitlines()}
        assert len(told) == 1, "the same on all hosts"
        found.append(told.pop().strip("<>"))
        assert re.fullmatch("[0-9a-f]{32}", found[-1])
        assert not any(found[-1] in (far / f"args{node}").read_text(errors="replace") for node in range(2))
    assert found[0] != found[1]
    monkeypatch.setenv("TENSOR3D_SECRET", "given by the user")
    assert "[a] <given by the user>" in run(far, body).stdout


def test_statuses_and_output(far: Path) -> None:
    done = run(far, 'echo "here is $node"; exit $((node * 75))')
    assert done.returncode == 75
    assert sorted(done.stdout.splitlines()) == ["[a] here is 0", "[b] here is 1"]
    assert run(far, "exit 0").returncode == 0
    failed = run(far, "exit $((node * 3))")
    assert failed.returncode == 3
    assert "b ended with 3" in failed.stderr


def test_a_host_that_fails_takes_the_others_with_it(far: Path) -> None:
    ready = far / "ready"
    other = f"if [ $node = 1 ]; then until [ -e {ready} ]; do sleep 0.05; done; exit 7; fi"
    done = run(
        far, f'{other}; trap "echo told; exit 5" TERM; touch {ready}; while :; do sleep 0.1; done', "--grace", "0.2"
    )
    assert done.returncode == 7
    assert "[a] told" in done.stdout


@pytest.mark.parametrize(("sent", "heard"), [("SIGTERM", "TERM"), ("SIGINT", "TERM"), ("SIGUSR1", "USR1")])
def test_signals_reach_every_host(far: Path, sent: str, heard: str) -> None:
    body = f'trap "echo {heard}; exit 75" {heard}; echo ready; while :; do sleep 0.1; done'
    command = ssh("--hosts", "a,b", "--ssh", SHELL, "--repository", far, "--", body)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[a] ready\n", "[b] ready\n"}
        process.send_signal(getattr(signal, sent))
        assert sorted(process.stdout.read().splitlines()) == [f"[a] {heard}", f"[b] {heard}"]
    assert process.returncode == 75


def test_the_far_end_goes_when_the_connection_breaks(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    body = f"trap 'touch {gone}; exit' TERM; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [LAUNCH / "remote.sh", "bash", "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        process.wait(30)
    assert gone.exists()


def test_nothing_stays_behind_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    marker = tmp_path.name
    command = [LAUNCH / "remote.sh", "bash", "-c", f": {marker}; exit 4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 4
        deadline = time.monotonic() + 10
        while marker in (
            told := subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        ):
            assert time.monotonic() < deadline, told
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no host"),
        ("a\na\n", "host a stands there twice"),
        ("me@Node-1\nme@node-1\n", "host me@node-1 stands there twice"),
        ("a slots=4\nb\n", "needs the same slots.*a: 4, b: none given"),
        ("a slots=four\n", "line 1: a host is written NAME, NAME slots=N or NAME:N. Got 'a slots=four'"),
        ("a 4 5\n", "Got 'a 4 5'"),
        ("-oProxyCommand=x\n", "Got '-oProxyCommand=x'"),
        ("a:0\n", "line 1: .* Got 'a:0'"),
        ("a\nb\0c\n", r"line 2: a host is written NAME, NAME slots=N or NAME:N\. Got 'b\\x00c'"),
        ("a\nn\udcf6de\n", r"hosts is not UTF-8 at byte 4\. Convert it"),
    ],
)
def test_bad_hostfiles(tmp_path: Path, content: str, message: str) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(content, errors="surrogateescape")
    done = subprocess.run(ssh("--hostfile", hostfile, "r.toml"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hosts", "a:2,b:2"), "a host has no 2 behind it. A port of ssh is said by --ssh. Got 'a:2'"),
        (("--ssh", ""), "--ssh is empty. Name what enters a host"),
        (("--ssh", "ssh -i 'key"), "is no command: No closing quotation"),
        (("--grace", "nan"), "--grace must be at least 0 seconds. Got nan"),
    ],
)
def test_bad_options(options: tuple[str, ...], message: str) -> None:
    done = subprocess.run(ssh("--hosts", "a,b", *options, "r.toml"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_ssh(tmp_path: Path) -> None:
    done = ran(ssh("--hosts", "a,b", "--ssh", "no-such-command", "r.toml"))
    assert done.returncode == 2
    assert done.stderr == (
        "launch/ssh.py: no-such-command cannot be started: No such file or directory. Name what enters a host: --ssh.\n"
    )

"""A stand-in for ssh between the hosts of tests/hosts.py: `ssh [OPTIONS] HOST COMMAND...`.

Like ssh and sshd it

- joins the words of the command by spaces and gives them to a shell at the other end, in the home folder and with a
  fresh environment: what is to arrive must be quoted, and no variable travels;
- carries standard input, output and errors, through a terminal with -t;
- answers with the status of the command, and with 255 where the host cannot be reached or a signal ended the command;
- passes on no signal. When it dies, the connection does: under -t the kernel hangs up on the command's session, which
  ends it; without -t a command notices when it reads or writes, if at all.

Options that change none of this are accepted and passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
_UNREACHABLE = 255


def main(arguments: list[str]) -> int:
    doors = json.loads(Path(arguments[0]).read_text())
    terminal, name, command, detached = parse(arguments[1:])
    host = name.rpartition("@")[2]
    if host not in doors:
        print(f"ssh: Could not resolve hostname {host}: Name or service not known", file=sys.stderr)
        return _UNREACHABLE
    if not (plugged([]) and plugged(doors[host])):
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr)
        return _UNREACHABLE
    home = os.path.expanduser("~")
    shell = ["/bin/sh", "-c", f'cd {home}; exec /bin/sh -c "$0"', command] if command else ["/bin/sh"]
    environment = {
        "HOME": home,
        "USER": "root",
        "SHELL": "/bin/sh",
        # As sshd sets it; with the folder of this stand-in in front, so that one hop may follow another.
        "PATH": f"{Path(arguments[0]).parent / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    status = (through_terminal if terminal else through_pipes)([*doors[host], *shell], environment, detached)
    return status if status >= 0 else _UNREACHABLE


def parse(words: list[str]) -> tuple[bool, str, str, bool]:
    """Whether a terminal is asked for, the host, the command, and whether standard input is to be left alone."""
    terminal = detached = False
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--":
            break
        for place, letter in enumerate(option[1:], start=1):
            terminal, detached = terminal or letter == "t", detached or letter == "n"
            if letter in _WITH_VALUE:
                if place == len(option) - 1:
                    words.pop(0)
                break
    if not words:
        raise SystemExit("usage: ssh [OPTIONS] HOST [COMMAND...]")
    return terminal, words[0], " ".join(words[1:]), detached


def plugged(door: list[str]) -> bool:
    """Whether the cable of this host, or the one behind the door, is in."""
    look = [*door, "cat", "/sys/class/net/eth0/carrier"]
    return subprocess.run(look, capture_output=True, text=True, check=False).stdout.strip() == "1"


def through_pipes(command: list[str], environment: Mapping[str, str], detached: bool) -> int:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    ends = {0: process.stdin.fileno()}
    starts = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
    if detached:
        ends.clear()
        process.stdin.close()
    while starts:
        ready, _, _ = select.select([*ends, *starts], [], [])
        for source in ready:
            data = os.read(source, 1 << 16)
            if source in starts:
                put(starts[source], data) if data else starts.pop(source)
            elif not data or not put(ends[source], data):
                ends.clear()
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
    return process.wait()


def through_terminal(command: list[str], environment: Mapping[str, str], detached: bool) -> int:
    ours, theirs = pty.openpty()
    # The other end is the controlling terminal of a new session: when this process dies, the kernel hangs up on it.
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _CONTROLLED, *command],
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    sources = [ours] if detached else [ours, 0]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if ours in ready:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # nobody has the other end open any more
                return process.wait()
            put(1, data)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                sources.remove(0)
            put(ours, data or b"\x04")  # the terminal's end of file


_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def put(where: int, data: bytes) -> bool:
    """Writes all of it; whether somebody still reads it."""
    while data:
        try:
            data = data[os.write(where, data) :]
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

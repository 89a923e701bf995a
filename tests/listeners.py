"""Which sockets a running job listens at, for tests: read from /proc, by the inodes that its processes hold open."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

READABLE = sys.platform == "linux"
_LISTENING = "0A"


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    found = [process]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                found += [int(word) for word in children.read_text().split()]
    return found


def listeners(*processes: int) -> dict[tuple[IPv4Address | IPv6Address, int], set[int]]:
    """Address and port at which these processes and their descendants listen, with the processes that hold them."""
    holders: dict[str, set[int]] = {}
    for process in {each for one in processes for each in family(one)}:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    what = os.readlink(descriptor)
                    if what.startswith("socket:["):
                        holders.setdefault(what[8:-1], set()).add(process)
    found: dict[tuple[IPv4Address | IPv6Address, int], set[int]] = {}
    tables = {Path(f"/proc/{process}/net/{kind}") for process in processes for kind in ("tcp", "tcp6")}
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and words[9] in holders:
                found[_place(words[1])] = holders[words[9]]
    return found


def beyond_loopback(*processes: int) -> list[str]:
    """Those of them that others than this machine reach, for a message."""
    return [
        f"{address} port {port}, held by {[_told(process) for process in sorted(who)]}"
        for (address, port), who in listeners(*processes).items()
        if not (getattr(address, "ipv4_mapped", None) or address).is_loopback
    ]


def _place(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    address, _, port = text.partition(":")
    # The kernel prints words of 32 bits, each in the order of this machine.
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return ip_address(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)), int(port, 16)


def _told(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:100]
    return str(process)

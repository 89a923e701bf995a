"""The network interface of this machine that leads to another one, and its own address on it.

`python launch/net_interface.py HOST` prints "eth0 10.0.0.7". Where HOST is this machine, that is the interface
that has the address, and not the loopback: the others come in by it.
"""

from __future__ import annotations

import argparse
import fcntl
import socket
import struct
import sys
import time
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with one message on standard error."""
    parser = argparse.ArgumentParser(prog="launch/net_interface.py", description=__doc__)
    parser.add_argument("host")
    parser.add_argument("--interface", help="take this one, and print its address")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds in which the host may become reachable")
    asked = parser.parse_args(arguments)
    try:
        print(*(route(asked.host, asked.wait) if asked.interface is None else given(asked.interface)))
    except (OSError, ValueError) as problem:
        print(f"launch/net_interface.py: {problem}", file=sys.stderr)
        return 2
    return 0


def route(host: str, wait: float = 0.0) -> tuple[str, str]:
    """Name and own address of the interface by which `host` is reached.

    Raises:
        ValueError: the name is unknown, there is no way to it within `wait` seconds, or no interface has the address.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            own = _own_address(host)
            if own.startswith("127.") and host != "localhost" and not host.startswith("127."):
                raise ValueError(
                    f"the master {host!r} is {own} on {socket.gethostname()}, a loopback (/etc/hosts), by which no "
                    "other node comes in. Give its address, or name the interface: --interface."
                )
            break
        except socket.gaierror as problem:
            raise ValueError(
                f"the master {host!r} is unknown here ({problem.strerror}). Give its IPv4 address."
            ) from None
        except OSError as problem:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"the master {host!r} cannot be reached from {socket.gethostname()} ({problem.strerror}; tried for "
                    f"{wait:.0f} s). Check the network, or name the interface: --interface."
                ) from None
            time.sleep(0.5)
    for name, address in interfaces():
        if address == own:
            return name, own
    raise ValueError(f"no interface of {socket.gethostname()} has the address {own}. Name one: --interface.")


def given(name: str) -> tuple[str, str]:
    """The same for an interface by name. Raises ValueError where there is none, or it has no IPv4 address."""
    known = dict(interfaces())
    if name not in known:
        has = ", ".join(known) or "none"
        raise ValueError(f"{socket.gethostname()} has no interface {name!r} with an IPv4 address. It has {has}.")
    return name, known[name]


def interfaces() -> list[tuple[str, str]]:
    """All that have an IPv4 address, with it."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _own_address(host: str) -> str:
    # Connecting a datagram socket sends nothing: it only looks up the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((socket.gethostbyname(host), 9))
        return str(asking.getsockname()[0])


if __name__ == "__main__":
    sys.exit(main())

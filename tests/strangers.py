"""Strangers that connect with a store of PyTorch's, for tests: silent, with half a message, nonsense, a gigabyte."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_HELLO = b"\0" + struct.pack("<I", 0x3C85F7CE)  # with which clients of a TCPStore begin
_SET = _HELLO + b"\1" + struct.pack("<Q", 3) + b"key"
_SAID = (
    *(_HELLO, _HELLO[:3], _SET, b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", _HELLO + b"\xff" * 100),
    *(
        _HELLO + b"\1" + struct.pack("<Q", 1 << 62),
        _SET + struct.pack("<Q", 1 << 62),
        _SET + struct.pack("<Q", 1 << 24),
    ),
)
_MIB = bytes(1 << 20)


@contextmanager
def strangers(port: int, *, idle: int = 300) -> Iterator[None]:
    """Inside the block they are connected with this port of the loopback, as far as it lets them."""
    with ExitStack() as stack:

        def call(said: bytes, more: int = 0) -> None:
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            caller.settimeout(20)
            with suppress(OSError):  # it was thrown out
                caller.sendall(said)
                for _ in range(more):
                    caller.sendall(_MIB)

        for _ in range(idle):
            call(b"")
        for said in _SAID:
            call(said)
        for begin in (b"", _SET + struct.pack("<Q", 1 << 30)):
            call(begin, more=1024)
        yield

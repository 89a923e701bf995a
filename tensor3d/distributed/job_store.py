"""The store in which the processes of a job meet: where it listens, and parts of it that hold what the job has set."""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

_SEAL = 64
"""Bytes of an HMAC in hexadecimal digits."""


def host_store(
    host: str,
    port: int,
    *,
    alone: bool,
    timeout: timedelta,
    wait_for_workers: bool = False,
    world_size: int | None = None,
) -> dist.TCPStore:
    """A store of this process that listens at the address by which `host` is this machine; torch's own would listen at
    all addresses, as this one does only where none of `host` is one by which others come in.

    Args:
        host: as its clients know it.
        alone: whether all of them are on this machine, so that its loopback will do.

    Raises:
        dist.DistNetworkError: the port is in use.
    """
    try:
        listener = _listener(host, port, alone)
    except OSError as error:
        raise dist.DistNetworkError(f"cannot listen at port {port} of {host}: {error.strerror or error}") from error
    address, port = listener.getsockname()[:2]
    # Its own client goes where it listens; of all addresses, the loopback.
    return dist.TCPStore(
        {"0.0.0.0": "127.0.0.1"}.get(address, address),
        port,
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        master_listen_fd=listener.detach(),
    )


def _listener(host: str, port: int, alone: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []  # a name that is not known here
    for kind, _, _, _, address in sorted(found, key=lambda each: each[0]):  # IPv4 first
        own = str(address[0])
        if ip_address(own.partition("%")[0]).is_unspecified:
            continue
        # What others know by a name may be a loopback here (/etc/hosts), by which they do not come in.
        if not alone and host not in (own, "localhost") and ip_address(own.partition("%")[0]).is_loopback:
            continue
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((own, 0))
            except OSError:
                continue  # not this machine's
        return socket.create_server((own, port), family=kind)
    return socket.create_server(("127.0.0.1" if alone else "", port))


class KeyedStore(dist.Store):
    """A part of a store for messages of the job alone: each value carries an HMAC of part, key and value, and what
    carries none, or a wrong one, counts as not there. A store of PyTorch's takes whatever anybody connects and sets.

    Args:
        store: the whole.
        part: name of the part, in front of all keys.
        secret: of the job; empty: values are as they are set, and all are taken.
        strict: `check` looks at the values too, which costs another question when all are there; else `get` and
            `multi_get` alone do, and give nothing for a stranger's.
    """

    def __init__(self, store: dist.Store, part: str, secret: bytes, *, strict: bool = True) -> None:
        super().__init__()
        self.underlying_store = store
        self._store, self._part, self._secret, self._strict = dist.PrefixStore(part, store), part, secret, strict

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Waits for the key. Empty for what a stranger has set."""
        return self._opened(key, self._store.get(key)) or b""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._opened(key, value) or b"" for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def check(self, keys: list[str]) -> bool:
        if not self._store.check(keys):
            return False
        if not (self._strict and self._secret):
            return True
        return all(
            self._opened(key, value) is not None for key, value in zip(keys, self._store.multi_get(keys), strict=True)
        )

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        """Raises DistStoreError where not all have come in time."""
        deadline, least = time.monotonic() + timeout.total_seconds(), timedelta(milliseconds=1)
        while True:
            self._store.wait(keys, max(least, timedelta(seconds=deadline - time.monotonic())))
            if self.check(keys):
                return
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{keys[0]} holds what no process of this job has set. Look for a stranger.")
            least = timedelta(seconds=1)  # they are there, and a busy host needs more than what may be left to say so
            time.sleep(0.02)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's, where "" expects nothing: sets `desired` where nothing of the job's is there. What is there."""
        wanted, there = self._sealed(key, desired), self._sealed(key, expected).encode() if expected else b""
        for _ in range(100):  # strangers may go on setting and deleting it
            found = self._store.compare_set(key, there, wanted)  # type: ignore[arg-type]
            opened = self._opened(key, found)
            if opened is not None and (opened or not self._secret):
                return opened
            there = found if found != there else b""
        return b""

    def _sealed(self, key: str, value: str) -> str:
        return self._seal(key, value.encode()) + value if self._secret else value

    def _opened(self, key: str, value: bytes) -> bytes | None:
        if not self._secret:
            return value
        seal, text = value[:_SEAL], value[_SEAL:]
        return text if hmac.compare_digest(seal, self._seal(key, text).encode()) else None

    def _seal(self, key: str, value: bytes) -> str:
        message = b"%d %s %d %s %s" % (len(self._part), self._part.encode(), len(key), key.encode(), value)
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

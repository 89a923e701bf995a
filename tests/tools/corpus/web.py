"""A web server on this machine that can fail in all the ways that servers do."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one GET of a file."""

    status: int | None = None
    """Answer with this status instead."""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Close the connection after so many bytes of the body."""
    stall: bool = False
    """Say nothing more after that, and keep the connection."""
    spoil: bool = False
    """Send zeros."""
    delay: float = 0.0
    """Seconds before the answer."""


@dataclass(kw_only=True)
class File:
    content: bytes
    etag: str = '"first"'
    modified: str = ""
    ranges: bool = True
    checks_if_range: bool = True
    longest: int | None = None
    """Answer a range with so many bytes of it, at most."""
    length: bool = True
    """Say Content-Length."""
    faults: list[Fault] = field(default_factory=list)
    """Of the next requests, in order."""


class Web(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, File] = {}
        self.closing = threading.Event()
        self.log: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers of every request."""
        self.most_at_once = 0
        """GETs that were answered at the same time."""
        self._at_once, self._turn = 0, threading.Lock()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def add(self, path: str, content: bytes, **how: Any) -> str:
        """Puts a file there; its URL."""
        self.files[path] = File(content=content, **how)
        return self.url(path)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around the answer to a GET."""
        with self._turn:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        yield
        with self._turn:
            self._at_once -= 1

    def ranges(self, path: str) -> list[str]:
        """The Range header of every GET of a file, "" where there was none."""
        return [headers.get("Range", "") for method, asked, headers in self.log if (method, asked) == ("GET", path)]


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self._note()
        file = self.server.files.get(self.path)
        self.send_response(404 if file is None else 200)
        if file is not None and file.length:
            self.send_header("Content-Length", str(len(file.content)))
        self.end_headers()

    def do_GET(self) -> None:
        self._note()
        file = self.server.files.get(self.path)
        if file is None:
            self.send_error(404)
            return
        fault = file.faults.pop(0) if file.faults else Fault()
        if fault.delay:  # counted before the body goes out: the next request may come as soon as it is there
            with self.server.counted():
                time.sleep(fault.delay)
        if fault.status is not None:
            self._answer(fault.status, fault.headers)
            return
        begin = self._begin(file)
        if begin > len(file.content):
            self._answer(416, {"Content-Range": f"bytes */{len(file.content)}"})
            return
        end = min(len(file.content), begin + file.longest) if begin and file.longest else len(file.content)
        body = file.content[begin:end]
        headers = {"ETag": file.etag, "Last-Modified": file.modified, **fault.headers}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(file.content)}"
        if file.length:
            headers["Content-Length"] = str(len(body))
        self._answer(206 if begin else 200, headers, bytes(len(body)) if fault.spoil else body[: fault.cut])
        if fault.stall:
            self.server.closing.wait(30)

    def _begin(self, file: File) -> int:
        wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if not file.ranges or wanted is None:
            return 0
        if file.checks_if_range and condition is not None and condition not in (file.etag, file.modified):
            return 0
        return int(wanted.removeprefix("bytes=").removesuffix("-"))

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _note(self) -> None:
        self.server.log.append((self.command, self.path, dict(self.headers.items())))

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Web]:
    web = Web()
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.closing.set()
        web.shutdown()
        web.server_close()
        thread.join()


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()

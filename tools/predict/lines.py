"""Lines of an input of any length, as they come: a pause of whoever writes them is noticed."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import BinaryIO

MOST_LINE = 1 << 24
"""Bytes of a line; a longer one is no text, and would only fill the memory."""
_CHUNK = 1 << 16
_AHEAD = 8  # chunks


class Lines:
    """Lines of a file or pipe, read by a thread, which waits when it is some chunks ahead.

    Args:
        wait: seconds that the first lines taken wait for others.
    """

    def __init__(self, file: BinaryIO, wait: float) -> None:
        self._file, self._wait = file, wait
        self._chunks: queue.Queue[list[bytes] | Exception | None] = queue.Queue(_AHEAD)
        self._rest: list[bytes] = []
        self._is_over = False
        # A daemon: it may be waiting for input that never comes.
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def take(self, size: int, idle: float | None = None) -> list[bytes] | None:
        """Some lines, with their ends: about `size` bytes, or what has come when the wait is over; None at the end.

        Args:
            idle: seconds after which, where no line has come at all, there is nothing in the list. None: never.

        Raises:
            ValueError: a line of more than `MOST_LINE` bytes; after the lines before it.
            OSError: the input cannot be read.
        """
        taken: list[bytes] = []
        held, deadline = 0, None
        while held < size:
            if not self._rest and not self._fill(taken, deadline, idle):
                break
            if deadline is None:
                deadline = time.monotonic() + self._wait
            while self._rest and held < size:
                taken.append(self._rest.pop())
                held += len(taken[-1])
        return None if not taken and self._is_over else taken

    def _fill(self, taken: list[bytes], deadline: float | None, idle: float | None) -> bool:
        """Whether lines have come in time."""
        if self._is_over:
            return False
        timeout = idle if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            found = self._chunks.get(timeout=timeout)
        except queue.Empty:
            return False
        if found is None:
            self._is_over = True
            return False
        if isinstance(found, Exception):
            if taken:  # what stands before it comes first; nothing is put behind it, so there is room
                self._chunks.put(found)
                return False
            raise found
        self._rest = found[::-1]
        return True

    def _read(self) -> None:
        # From the descriptor: a thread that waits inside of a buffered reader keeps Python from ending.
        descriptor = self._file.fileno()
        parts: list[bytes] = []
        size, number = 0, 0
        try:
            while chunk := os.read(descriptor, _CHUNK):
                *lines, rest = chunk.split(b"\n")
                if lines:
                    whole = [b"".join([*parts, lines[0]]), *lines[1:]]
                    self._chunks.put([line + b"\n" for line in whole])
                    number += len(whole)
                    parts, size = [], 0
                if rest:
                    parts.append(rest)
                    size += len(rest)
                if size > MOST_LINE:
                    raise ValueError(
                        f"line {number + 1}: longer than {MOST_LINE >> 20} MiB, which is no text. Is the input one of "
                        "lines?"
                    )
            if parts:
                self._chunks.put([b"".join(parts)])
            self._chunks.put(None)
        except (OSError, ValueError) as problem:
            self._chunks.put(problem)

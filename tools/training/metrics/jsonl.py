"""metrics.jsonl: everything a run has measured, one JSON object a line, readable while it is written.

Each line has a "kind", the "step" it belongs to and the Unix "time" it was written at. Floats have all their digits, so
that two runs can be compared to the last bit; one that is not finite is a string ("NaN", "Infinity", "-Infinity"),
since JSON has no number for it and `float` reads it back.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tensor3d.files import append, draft, open_regular, sync
from tools.common.files import parsed_json

JOURNAL = "metrics.jsonl"
"""In the folder of a run."""
EVENT = "event"
"""The kind that outlives a restart: what has happened stays, while steps that are done again replace their lines."""


class JsonlLogger:
    """Appends to a run's journal. What a killed run wrote of steps after `first_step` is cut off first.

    Every line reaches the operating system at once: of a killed process nothing is lost; `sync` is for a machine that
    fails.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self.left_out = 0
        """Lines that were damaged, and are cut off too; but for a last one without its end, as a kill leaves it."""
        if os.path.lexists(path) and not (path.is_symlink() and not path.exists()):
            self.left_out = _cut(path, first_step)  # what a link names stays as it is: its lines are copied
        # Unbuffered: a buffer would keep what could not be written, and write it later in the midst of other lines.
        self._file: BinaryIO = append(path, buffering=0)
        self._torn = False
        sync(path.parent)

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """One line. Raises OSError where it cannot be written whole (a full disk); a later line can be tried again."""
        line = json.dumps({"kind": kind, "time": time.time()} | {name: _plain(value) for name, value in record.items()})
        # A line that was cut off must not swallow the next one.
        text = ("\n" if self._torn else "") + line + "\n"
        self._torn = True
        content = text.encode()
        if self._file.write(content) != len(content):
            raise OSError(f"{self._file.name}: a line could not be written whole")
        self._torn = False

    def sync(self) -> None:
        """Waits until all lines are on disk. Raises OSError."""
        os.fsync(self._file.fileno())

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed the file, or the folder around it."""
        return not os.path.lexists(self._file.name)

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path, damaged: Callable[[], object] = lambda: None) -> Iterator[dict[str, Any]]:
    """The lines of a journal, in order. One that is not whole, as a kill or a full disk leaves it, is passed over.

    Args:
        damaged: called for each of these.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        for line in file:
            record = _parsed(line)
            if record is not None:
                yield record
            else:
                damaged()


def _cut(path: Path, first_step: int) -> int:
    """Keeps the whole lines of events and of steps up to `first_step`. Written beside and renamed. How many others were
    damaged."""
    damaged = 0
    with open_regular(path) as old, draft(path) as new:
        for line in old:
            record = _parsed(line)
            if record is None:
                damaged += line.endswith(b"\n")
            elif record["kind"] == EVENT or record["step"] <= first_step:
                new.write(line)
    return damaged


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = parsed_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step, peaks = record.get("step"), record.get("peak_bytes")
    if record["kind"] == "memory" and not (type(peaks) is list and peaks and all(type(peak) is int for peak in peaks)):
        return None
    return record if type(step) is int and 0 <= step < 1 << 63 else None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value

"""TensorBoard's files, which a run can do without."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tensor3d.files import create

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


class TensorBoardLogger:
    """Writes a file of TensorBoard's in a folder, without the thread of its own writer, whose error nobody could catch.
    Where that fails, it says so and the run goes on without.

    Args:
        first_step: points of later steps, of a run that was killed, are hidden.
        say: for one line to the user.
    """

    def __init__(self, folder: Path, *, first_step: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._records: Any = None
        self._file: BinaryIO | None = None
        try:
            # Imported here: seven of eight ranks do without.
            from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        except ImportError:
            say("TensorBoard is not installed (pip install tensorboard): metrics.jsonl alone is written.")
            return
        self._events, self._summaries, start = event_pb2, summary_pb2.Summary, event_pb2.SessionLog.START
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = create(folder / _name(folder))
            self._records = RecordWriter(self._file)
        except OSError as problem:
            self._give_up(problem)
        self._put(first_step + 1, file_version="brain.Event:2")
        self._put(first_step + 1, session_log=event_pb2.SessionLog(status=start))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """One point of each curve."""
        if self._records is not None:
            points = [self._summaries.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            self._put(step, summary=self._summaries(value=points))

    def sync(self) -> None:
        """Waits until all points are on disk."""

        def put_on_disk() -> None:
            assert self._file is not None, "with the records"
            self._records.flush()
            os.fsync(self._file.fileno())

        self._try(put_on_disk)

    def close(self) -> None:
        self._try(lambda: self._records.close())

    def _put(self, step: int, **what: Any) -> None:
        self._try(
            lambda: self._records.write(
                self._events.Event(wall_time=time.time(), step=step, **what).SerializeToString()
            )
        )

    def _try(self, action: Callable[[], object]) -> None:
        if self._records is not None:
            try:
                action()
            except OSError as problem:
                self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        self._records = None  # a record that was cut off would spoil the next ones
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._say(f"TensorBoard's files cannot be written any more ({problem}): the run goes on without.")


def _name(folder: Path) -> str:
    """TensorBoard reads a folder's files by name: the second of their beginning, the host, the process. The file of a
    run that is resumed comes behind those that are there, also in the same second, or when the clock was set back: else
    its points would be hidden."""
    there = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    second = max([int(time.time()), *(second + 1 for second in there)])
    return f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0"

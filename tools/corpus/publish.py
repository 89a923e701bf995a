"""Folders that appear whole or not at all, also when two processes make the same one."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """An empty folder beside `output`, removed at the end with whatever is left in it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.{uuid.uuid4().hex}.tmp")
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, output: Path, is_current: Callable[[], bool]) -> None:
    """Renames `draft` to `output`, in the place of an older folder if there is one.

    A folder cannot be replaced by another in one step, so an older one is first moved aside. Whoever finds that
    somebody else was faster, and that what is there now is as good (`is_current`), leaves it.
    """
    while not is_current():
        try:
            os.rename(draft, output)
        except OSError:
            if not output.is_dir():
                raise
            # It is gone when another process has just moved it; then we look again.
            with draft_of(output) as aside, suppress(FileNotFoundError):
                os.rename(output, aside / "older")
        else:
            return


@contextmanager
def taking_turns(output: Path) -> Iterator[None]:
    """Lets processes on one machine that want the same folder wait for one another, so that one of them does the work.

    It saves work and is not needed for correctness: a file system that knows no locks is no obstacle.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(f".{output.name}.lock")
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

"""Files that appear whole or not at all: for tensor3d and models.

What prepares text runs without torch, which importing tensor3d brings: tools have `tools.common.files.draft`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def draft(path: Path) -> Iterator[BinaryIO]:
    """A new binary file beside `path`: on disk under that name when the block ends well, gone when it fails."""
    temporary = beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """A name in the same folder that nothing else has, to write to first."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

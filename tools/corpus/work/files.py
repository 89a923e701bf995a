"""Files that appear whole or not at all, and what inputs are known by."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_SAMPLE = 1 << 20


@contextmanager
def draft(path: Path) -> Iterator[BinaryIO]:
    """A new binary file beside `path`: on disk under that name when the block ends well, gone when it fails."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fingerprint_file(path: Path) -> str:
    """A hash of the file's name and size and of the first and last MiB: cheap, also for a dump of many GB.

    A change in the middle that keeps the size is not noticed.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{path.name}\0{size}\0".encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()

"""Files that appear whole or not at all, and what inputs are known by."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# --- JSON that somebody else has written ------------------------------------------------------------------------------


def parsed_json(text: str | bytes) -> Any:
    """The value of a text, or of its bytes in UTF-8.

    Raises:
        ValueError: no UTF-8, no JSON, or deeper than Python reads; the message tells which, to be put behind a name.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are too deep in one another") from None


# --- Files that appear whole or not at all ----------------------------------------------------------------------------

_SAMPLE = 1 << 16
_EVERY = 1 << 22


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


def write_file(path: Path, content: str | bytes) -> None:
    """Whole or not at all; text in UTF-8."""
    with draft(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fingerprint_file(path: Path) -> str:
    """A hash of the file's name and size, of 64 KiB in every 4 MiB, and of its end: cheap, also for a dump of many GB.

    A change between the samples that keeps the size is not noticed.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(os.fsencode(path.name) + f"\0{size}\0".encode(), digest_size=16)
    with path.open("rb") as file:
        for place in (*range(0, size, _EVERY), max(0, size - _SAMPLE)):
            file.seek(place)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()

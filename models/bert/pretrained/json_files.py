"""JSON files that hold one object: read with errors that name the file, written whole or not at all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensor3d.checkpoint.files import write_file


def read_object(path: Path) -> dict[str, Any]:
    """Raises ValueError, with the file's name, where there is no JSON object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:  # ValueError: no UTF-8 and no JSON
        raise ValueError(f"{path} is no JSON: {problem}. Get it again from where the folder is from.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object. Got a {type(content).__name__}.")
    return content


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Beside and renamed."""
    with replacing(path) as partial:
        write_file(partial, [memoryview((json.dumps(content, indent=2) + "\n").encode())])


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which gets the name `path` when the block ends well; else nothing of it stays.

    Raises:
        ValueError: the disk is full, or the like, of which the operating system does not say with which file.
    """
    partial = beside(path)
    try:
        yield partial
        os.replace(partial, path)
    except OSError as problem:
        if problem.filename is not None:
            raise
        raise ValueError(
            f"{path} cannot be written: {problem.strerror}. What there was of it has been removed. Make room, or write "
            "to another folder."
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """A name in the same folder that nothing else has, to write to first."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")

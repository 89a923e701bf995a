"""Where text comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

_BLOCK = 1 << 20


class Source(Protocol):
    """Documents of plain text, always in the same order."""

    def fingerprint(self) -> str:
        """Changes whenever a document changes. Cheap beside reading the documents."""

    def documents(self) -> Iterator[str]:
        """The documents; blank lines separate the paragraphs of one."""


def hash_files(files: Iterable[Path], root: Path) -> str:
    """A hash of the files' contents and of their names below `root`; where the folder itself lies does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()

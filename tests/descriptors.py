"""What this process holds open, for tests: by what it is, since a count also tells of threads that other tests
have left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> list[os.stat_result]:
    """What stands behind each descriptor of this process."""
    found = []
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed since, as that of the listing itself
            found.append(os.fstat(int(name)))
    return found


def open_files(folder: Path) -> list[Path]:
    """The files under a folder that are open here, once for each descriptor."""
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for each in open_descriptors() for path, status in files if os.path.samestat(each, status)]

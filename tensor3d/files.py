"""Files that appear whole or not at all; what may be read, written to and removed.

Whoever may write into a folder may put a link, a FIFO or a device there. So what is written is new (`draft`), what is
read is a regular file (`open_regular`), and what is removed is the link, not what it names (`remove`).

It needs the standard library alone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Any, BinaryIO

# --- Written beside and renamed ---------------------------------------------------------------------------------------

_DRAFT = re.compile(r".+\.[0-9a-f]{32}\.tmp")
ABANDONED = 600.0
"""Seconds without a change, after which what somebody was writing counts as left behind."""


@contextmanager
def draft(path: Path) -> Iterator[BinaryIO]:
    """A new binary file beside `path`: on disk under that name when the block ends well, gone when it fails.

    A link that bears the name is replaced, and what it names stays as it is.
    """
    temporary = beside(path)
    try:
        with naming(path), create(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:  # such as a folder of that name
        if problem.filename == str(temporary):  # of which nobody knows
            problem.filename = str(path)
            del problem.filename2
        raise
    finally:
        with suppress(OSError):  # which would hide what has happened; the next run removes it
            temporary.unlink(missing_ok=True)


_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of which the system does not say with which file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside the block a file is read or written: an error of a full or failing disk gets its name."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None and problem.errno in _REFUSED:
            problem.filename = str(path)
        raise


def beside(path: Path) -> Path:
    """A name in the same folder that nobody can guess, to write to first."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def create(path: Path, buffering: int = -1) -> BinaryIO:
    """A file that was not there, to be written. Raises FileExistsError where anything has the name, also a link."""
    file: BinaryIO = open(path, "x+b", buffering, opener=_not_through_links)  # noqa: SIM115  # for the caller
    return file


def append(path: Path, buffering: int = -1) -> BinaryIO:
    """A file to be written on from its end, made if it is not there. A link, a FIFO or a device there is removed, and
    what a link names stays as it is."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()
    file: BinaryIO = open(path, "ab", buffering, opener=_not_through_links)  # noqa: SIM115  # for the caller
    return file


def sweep_drafts(folder: Path, *, of: str | None = None, older_than: float = ABANDONED) -> None:
    """Removes the drafts that processes have left in a folder that were killed.

    Args:
        of: those of the file of this name alone.
        older_than: seconds since they were changed; before that somebody may be writing.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            if _DRAFT.fullmatch(path.name) and (of is None or path.name[:-37] == of):
                with suppress(OSError):
                    if time() - path.lstat().st_mtime > older_than:
                        path.unlink()


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Read: regular files alone ----------------------------------------------------------------------------------------

_KINDS = {"a FIFO": stat.S_ISFIFO, "a socket": stat.S_ISSOCK, "a device": lambda _: True}


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """A file to be read, also by a link.

    Raises:
        OSError: it cannot be read, or is a folder, a FIFO, of which one would wait for a writer, or a device.
    """
    _check_regular(os.stat(path), path)  # first: to open a device may do something
    file: BinaryIO = open(path, "rb", buffering, opener=_without_waiting)  # noqa: SIM115  # for the caller
    try:
        _check_regular(os.fstat(file.fileno()), path)  # again: it may be another one now
    except OSError:
        file.close()
        raise
    return file


def read_file(path: Path) -> bytes:
    """Its content. Errors are those of `open_regular`."""
    with open_regular(path) as file, naming(path):
        return file.read()


def broken_links(folder: Path, names: Iterable[str]) -> str:
    """A sentence, after a space, where one of these names in a folder is a link to nothing, as in a copy of a cache
    that left out what its links name; else empty. For messages about a file that is missing."""
    for path in (folder / name for name in names):
        if path.is_symlink() and not path.exists():
            target = os.readlink(path)
            return f" {path.name} is there as a link to {target}, which is not: copy what the links name, too (cp -rL)."
    return ""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads(..., object_pairs_hook=unique_keys)`.

    Raises:
        ValueError: a key is there twice; Python takes the last value.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {key!r:.60} is there twice in one object")
    return found


WRONG_ENTRIES = (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, ValueError)
"""What it raises to take entries of a file for what they are not, or are not there."""


def what_is_wrong(problem: Exception) -> str:
    """With the content of a file, which was taken to be another: for a message that names the file, and goes on.

    Args:
        problem: what reading its entries has raised. KeyError alone would say a name, and not that it is missing.
    """
    if isinstance(problem, KeyError):
        return f"it has no {problem.args[0]!r}" if problem.args else "an entry is missing"
    if isinstance(problem, TypeError | AttributeError | IndexError):
        return f"an entry is of another kind than it should be ({problem})"
    if isinstance(problem, json.JSONDecodeError):
        return f"it is no JSON: {problem}"
    return str(problem).rstrip(".")


def _check_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"it is {_kind(found)}, and a regular file is needed", str(path))


def _kind(found: os.stat_result) -> str:
    return next(name for name, is_kind in _KINDS.items() if is_kind(found.st_mode))


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _not_through_links(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


# --- What is written to, and what is taken away -----------------------------------------------------------------------


def check_replaceable(path: Path, option: str = "--output") -> None:
    """Raises ValueError where what bears the name, also by a link, is a FIFO, a socket or a device: a file that is
    written beside and renamed would take its place, of /dev/null for the whole machine."""
    if not path.exists() or path.is_file() or path.is_dir():
        return
    raise ValueError(
        f"{option} must be a file. {path} is {_kind(path.stat())}, whose place the file would take. Name another path, "
        "and copy it from there."
    )


def nearest(path: Path) -> Path:
    """Of a path to be written and the folders above it, the lowest that is there.

    Raises:
        ValueError: no such name can be written, or a link to nothing is in the way.
    """
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            name = os.fsencode(path).decode()
        except UnicodeDecodeError:
            remedy = "is not UTF-8, in which what is written speaks of it. Choose a path of such characters."
            raise ValueError(f"{text!r} {remedy}") from None
        raise ValueError(
            f"{name!r} is read in {sys.getfilesystemencoding()}, the encoding of this locale, and not in UTF-8. Set "
            "LC_ALL=C.UTF-8 or PYTHONUTF8=1."
        ) from None
    if "\0" in text:
        raise ValueError(f"{text!r} holds a zero byte. Choose a path without.")
    there = path.absolute()
    for each in (there, *there.parents):
        if each.exists():
            return each
        if each.is_symlink():
            raise ValueError(f"{each} is a link to {os.readlink(each)!r}, which is not there. Remove it or make that.")
    raise ValueError(f"{path} lies nowhere: not even {there.anchor} is there. Choose another path.")


def check_folder(folder: Path, option: str = "--output") -> None:
    """Raises ValueError where there cannot be a folder of this name; nothing is made.

    Args:
        option: what named it.
    """
    there = nearest(folder)
    if not there.is_dir():
        raise ValueError(f"the run needs a folder, and {there} is a file. Choose another {option}.")


def make_folder(folder: Path, option: str = "--output") -> list[Path]:
    """Makes a folder, unless it is there. What was made, the lowest first. Errors are those of `check_folder`."""
    check_folder(folder, option)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def remove(path: Path) -> OSError | None:
    """Takes away a file, a link (and not what it names) or a folder with all that is in it, also where another process
    does the same at the same time. Returns why something of it is still there, if so: what is left over ends no run."""
    problem: OSError | None = None
    for _ in range(3):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return None
        except FileNotFoundError as error:  # of something inside of it: somebody else was faster
            problem = error
        except OSError as error:
            return error
    return problem if os.path.lexists(path) else None

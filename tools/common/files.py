"""Files that appear whole or not at all, what inputs are known by, and which run has a folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal, cast

from tensor3d.files import (  # noqa: F401 - whoever works with files finds all about them here
    WRONG_ENTRIES,
    append,
    beside,
    check_folder,
    check_replaceable,
    create,
    draft,
    make_folder,
    naming,
    nearest,
    open_regular,
    read_file,
    remove,
    sweep_drafts,
    unique_keys,
    what_is_wrong,
)

if TYPE_CHECKING:
    from tensor3d.distributed.rank_status import ProcessId

_log = logging.getLogger(__name__)

# --- JSON that somebody else has written ------------------------------------------------------------------------------


def parsed_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a text, or of its bytes in UTF-8, which may begin with the mark that editors of Windows put there.

    Args:
        unique: refuse a key that an object has twice, as of data that somebody has written by hand or glued together.

    Raises:
        ValueError: no UTF-8, no JSON, or deeper than Python reads; the message tells which, to be put behind a name.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except RecursionError:
        raise ValueError("its lists or objects are too deep in one another") from None


_NO_TEXT = {
    **dict.fromkeys((".csv", ".tsv", ".parquet", ".arrow", ".xlsx"), "a table"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON"),
}


def not_plain_text(path: Path) -> str | None:
    """What a file is by its suffix where that is no text to be read as it stands: "a table" or "JSON"."""
    return _NO_TEXT.get(path.suffix.lower())


def is_unicode(text: Any) -> bool:
    """Whether it is a string, without half of a surrogate pair."""
    if not isinstance(text, str):
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# --- Files that appear whole or not at all ----------------------------------------------------------------------------

_SAMPLE = 1 << 16
_EVERY = 1 << 22


def write_file(path: Path, content: str | bytes) -> None:
    """Whole or not at all; text in UTF-8."""
    with draft(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_output(path: Path | None, option: str = "--output", *, others: Iterable[Path | None] = ()) -> None:
    """Raises ValueError where no file can be written: better before the work than after. Drafts of it that a killed
    process has left are removed.

    Args:
        others: what the command reads, or writes to as well: none of these is written over.
    """
    if path is None:
        return
    nearest(path)
    for other in others:
        if other is not None and (other == path or (path.is_file() and other.is_file() and path.samefile(other))):
            raise ValueError(
                f"{option} is {path}, which is another file of this command, too, and would be lost. Name a new one."
            )
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} must be a file in a folder that exists. Got {path}.")
    check_replaceable(path, option)
    sweep_drafts(path.parent, of=path.name)


def check_suffix(path: Path | None, known: Sequence[str], option: str = "--output") -> None:
    """Raises ValueError where a name says that a file is of another kind than what is written into it.

    Args:
        known: suffixes of its kind, the usual one first.
    """
    if path is not None and path.suffix[1:].isalpha() and path.suffix.lower() not in known:
        raise ValueError(
            f"{option} is written as {known[0][1:].upper()}, and {path} is called otherwise. Name it "
            f"{path.with_suffix(known[0])}, and convert that where another kind is needed."
        )


def fingerprint_file(path: Path) -> str:
    """A hash of the file's name and size, of 64 KiB in every 4 MiB, and of its end: cheap, also for a dump of many GB.

    A change between the samples that keeps the size is not noticed.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(os.fsencode(path.name) + f"\0{size}\0".encode(), digest_size=16)
    with open_regular(path) as file:
        for place in (*range(0, size, _EVERY), max(0, size - _SAMPLE)):
            file.seek(place)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


# --- Which run has a folder -------------------------------------------------------------------------------------------
#
# run.lock names the process that has the folder: the machine, the process, when that was started. It is made by a hard
# link, else by exclusive creation, which also network file systems do once; kernel locks, which some of them do not
# know, only keep two starters from judging a dead owner at the same moment. Its owner renews its time. It is taken over
# from a process that is gone from this machine, and from one on another machine, or in another container, of which
# nobody here can know, when it has not been renewed for as long as SILENCE while one looked. No clocks are compared.

LOCK = "run.lock"
BEAT, SILENCE = 5.0, 45.0
"""Seconds between two renewals, and how long there must be none. Network file systems show one some seconds late."""
_LOOK = 0.5  # seconds between two looks at a lock
_LEAVING = 10.0  # in which a rank whose launcher is gone must have ended; they do within 3 s
_SETTLING = 1.0  # in which whoever has judged the same dead owner on another machine has acted
_PATIENCE = 2.0  # with somebody who keeps a kernel lock, for which the right to read is enough


class FolderInUseError(ValueError):
    """Another run has the folder."""


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """Who made a lock."""

    host: str
    machine: str
    """As `ProcessId` has it, which tells machines and containers apart."""
    process: int
    started: int
    """Clock ticks since the boot, by which a later process of the same number is told apart."""
    launcher: int
    since: str
    token: str
    """No other lock has it."""

    @classmethod
    def here(cls) -> _Owner:
        own = _process_ids().own()
        return cls(
            host=socket.gethostname(),
            machine=own.machine,
            process=os.getpid(),
            started=own.started,
            launcher=os.getppid(),
            since=datetime.now().astimezone().isoformat(" ", "seconds"),
            token=secrets.token_hex(16),
        )

    @classmethod
    def of(cls, content: bytes) -> _Owner | None:
        """None where the content is not what `here` has written."""
        try:
            owner = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        told = all(type(getattr(owner, name)) is kind for name, kind in kinds.items())
        return owner if told and (owner.host + owner.since).isprintable() else None

    @property
    def state(self) -> Literal["alive", "leaving", "gone", "unknown"]:
        """Of the process, as far as it can be seen from here. Leaving: its launcher is gone, so that it will end."""
        ids = _process_ids()
        process = ids(machine=self.machine, number=self.process, started=self.started)
        found = process.look(ids.own().machine)
        if found in ("gone", "unknown"):
            return cast(Any, found)
        with suppress(OSError):
            parent = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[1]
            return "alive" if int(parent) == self.launcher else "leaving"
        return "gone"


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A lock, as it was at one moment."""

    content: bytes
    renewed: int
    """By the clock of the file system, in ns."""

    @property
    def owner(self) -> _Owner | None:
        return _Owner.of(self.content)

    @property
    def state(self) -> str:
        return "unknown" if self.owner is None else self.owner.state


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Inside the block the folder, which is made if it is not there, is this process's. What was made and is then still
    empty is removed. Whoever loses the folder to another one, having been stopped for long, is interrupted.

    Raises:
        FolderInUseError: another process has it; the message names which.
        ValueError: there can be no such folder.
    """
    made: list[Path] = []
    try:
        path, content = folder / LOCK, json.dumps(asdict(_Owner.here())).encode()
        _lock(folder, content, made)
        sweep_drafts(folder, older_than=0.0)
        ended = threading.Event()
        renewing = threading.Thread(target=_renew, args=(path, content, ended), name=LOCK, daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join(BEAT)
            with suppress(OSError, ValueError):
                if (seen := _look(path)) is not None and seen.content == content:
                    path.unlink()
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()


def check_unlocked(folder: Path) -> bool:
    """Whether nobody has the folder. Nothing is made, taken or waited for, so False is for whoever cannot be looked up
    from here, as on another machine, or is about to end: `lock_folder` will tell.

    Raises:
        FolderInUseError: a process of this machine has it.
    """
    with suppress(OSError):
        if (seen := _look(folder / LOCK)) is not None:
            if (state := seen.state) == "alive":
                raise _in_use(folder, seen)
            return state == "gone"
    return True


def _lock(folder: Path, content: bytes, made: list[Path]) -> None:
    """Makes the lock. Folders that had to be made for it are added to `made`."""
    path, leaving = folder / LOCK, monotonic() + _LEAVING
    first: _Seen | None = None  # of an owner that cannot be looked up, with when it was seen first
    since = 0.0
    while True:
        try:
            made += make_folder(folder)
            with _one_at_a_time(folder) as alone:
                seen = _look(path)
                state = "free" if seen is None else seen.state
                silent = seen is not None and seen == first and monotonic() - since > SILENCE
                if seen is not None and (silent or state == "gone"):
                    _take_away(path, seen)
                if (state in ("free", "gone") or silent) and _put(path, content):
                    if state != "free" and (silent or not alone):
                        sleep(_SETTLING)
                        if (now := _look(path)) is None or now.content != content:
                            continue
                    return
        except FileNotFoundError:  # another one was refused, and has removed the folder that it had made
            sleep(_LOOK / 10)
            continue
        if seen is None:
            continue
        if state == "alive" or (state == "leaving" and monotonic() > leaving):
            raise _in_use(folder, seen)
        if state == "unknown":
            if first is None or first.content != seen.content:
                first, since = seen, monotonic()
                _log.info("%s; waiting for up to %.0f s whether it is still at work", _in_words(folder, seen), SILENCE)
            elif first != seen:
                raise _in_use(folder, seen)
        sleep(_LOOK)


def _look(path: Path) -> _Seen | None:
    """The lock, if there is one; a link, a FIFO or the like in its place is removed. Raises ValueError for a folder."""
    try:
        kind = path.lstat().st_mode
        if stat.S_ISDIR(kind):
            raise ValueError(f"{path} is a folder, and a run makes a file of this name. Remove it.")
        if not stat.S_ISREG(kind):
            path.unlink()
            return None
        with open_regular(path) as file:  # opened anew: only so does NFS ask the server for its time
            return _Seen(content=file.read(1 << 16), renewed=os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _put(path: Path, content: bytes) -> bool:
    """Makes the lock, whole from the beginning. False: there is one."""
    temporary = beside(path)
    try:
        with naming(path), create(temporary) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return temporary.stat().st_nlink == 2  # NFS asks again where an answer was lost
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            with create(path) as file:
                file.write(content)
        return True
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # which would hide what has happened
            temporary.unlink(missing_ok=True)


def _take_away(path: Path, seen: _Seen) -> None:
    """Removes a lock, and no other that has taken its place meanwhile."""
    aside = beside(path)
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if (taken := _look(aside)) is None or taken.content != seen.content:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Starters of one folder judge it in turn, where the file system has locks and nobody keeps one; else False."""
    descriptor, end, alone = os.open(folder, os.O_RDONLY), monotonic() + _PATIENCE, False
    try:
        while not alone and monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                sleep(0.01)
            except OSError:
                break
        yield alone
    finally:
        os.close(descriptor)


def _renew(path: Path, content: bytes, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError, ValueError):  # a file system that is away for a moment
            seen = _look(path)
            if seen is not None and seen.content == content:
                os.utime(path, follow_symlinks=False)
            elif seen is None:  # somebody has removed it, or the folder around it, which the run makes again
                _put(path, content)
            elif seen is not None and seen.owner is not None:
                _log.error("%s, having heard nothing of this run: it ends here.", _in_words(path.parent, seen))
                os.kill(os.getpid(), signal.SIGINT)
                return


def _in_use(folder: Path, seen: _Seen) -> FolderInUseError:
    return FolderInUseError(f"{_in_words(folder, seen)}. Wait for its end, or choose another --output.")


def _in_words(folder: Path, seen: _Seen) -> str:
    owner = seen.owner
    who = "a run" if owner is None else f"process {owner.process} on {owner.host}"
    return f"{folder} is in use by {who}{'' if owner is None else f' since {owner.since}'}"


def _process_ids() -> type[ProcessId]:
    """Imported late: it brings torch, which every run has, and no text needs."""
    from tensor3d.distributed.rank_status import ProcessId

    return ProcessId

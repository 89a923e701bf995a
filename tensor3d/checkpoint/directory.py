"""Where checkpoints lie, and how one comes and goes so that a kill at any moment leaves the others whole.

    step-00000100               complete: it has this name by a rename, and loses it by one
    step-00000100.RUN.partial   being written, by the run of that token
    step-00000100.old           complete: the former one of that step, while a new one takes its place
    step-00000100.RANDOM.trash  being deleted
    step-ABCDEF.token           there for the moment in which the ranks see whether they share the directory
    best                        text: the name of the best checkpoint

Links among them are never followed when something is deleted or renamed: the link itself is. What cannot be deleted is
logged as a warning and stays: it is in nobody's way.

`serial` in progress.json counts the checkpoints of a directory. It tells which is the newest also where a run has
gone back to an earlier step.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from tensor3d.distributed.object_collectives import ObjectGroup
from tensor3d.files import ABANDONED, draft, nearest, read_file, remove, sweep_drafts, sync

_log = logging.getLogger(__name__)

# --- Whether all ranks see one folder: on several machines a folder of the same name may be another one on each -------
#
# Network file systems remember for a while that a name is not there. Listing the folder above it makes them look again.

TOKEN = ".token"
SOME_SECONDS = 20.0
"""In which a name that one rank has made must be seen by the others."""
_AGAIN = 0.1  # seconds between two looks


def check_shared(directory: Path, crew: ObjectGroup) -> None:
    """Rank 0 makes the folder and puts a file into it, which every rank must see. Every rank calls it.

    Raises:
        ValueError: a rank does not see it, or there can be no such folder; on every rank, naming rank and folder.
        OSError: rank 0 cannot make it; on every rank.
    """
    made = crew.broadcast(_put_token(directory, crew) if crew.rank == 0 else None)
    if isinstance(made, (OSError, ValueError)):
        raise made
    if crew.size == 1:
        return
    folders = crew.gather(None if appears(directory / made) else str(directory))
    if crew.rank == 0:
        with suppress(OSError):  # a later run takes it away
            (directory / made).unlink()
    blind = crew.broadcast([(rank, folder) for rank, folder in enumerate(folders) if folder is not None])
    if blind:
        ranks = ", ".join(f"rank {rank} ({folder})" for rank, folder in blind[:4])
        raise ValueError(
            f"checkpoints need a folder that all ranks share, and what rank 0 has written to it is not seen by {ranks}"
            f"{f' and {len(blind) - 4} more' if len(blind) > 4 else ''}. Choose one on a file system that all machines "
            "mount."
        )


def appears(path: Path) -> bool:
    """Whether a path is there, or comes to be seen within `SOME_SECONDS`."""
    end = monotonic() + SOME_SECONDS
    while not path.exists():
        if monotonic() > end:
            return False
        look_again(path)
    return True


def look_again(path: Path) -> None:
    """Waits a moment, and makes the file system forget that a path was not there."""
    sleep(_AGAIN)
    for folder in (path.parent.parent, path.parent):
        with suppress(OSError):
            os.listdir(folder)


def _put_token(directory: Path, crew: ObjectGroup) -> str | OSError | ValueError:
    name = f"step-{secrets.token_hex(8)}{TOKEN}"
    try:
        nearest(directory)  # names a link to nothing
        directory.mkdir(parents=True, exist_ok=True)
        if crew.size > 1:
            (directory / name).touch()
    except (OSError, ValueError) as problem:
        return problem
    return name


# --- Where checkpoints lie --------------------------------------------------------------------------------------------

VERSION = 1
PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_BEST = "best"
_DEEP = "it is nested too deeply"
_ELSEWHERE = "Resume from an earlier checkpoint."


class DamagedError(ValueError):
    """A checkpoint of which something is missing, cut or changed: another one may be good. An error that is only a
    ValueError says that a checkpoint does not belong here, and an earlier one of the run would not either."""


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in a directory, or None. Those of which nobody can tell whether they are newer are
    named in the log."""
    found = complete(directory)
    for problem in unread(found[:-1]):
        _log.warning("%s Whether it is newer than %s nobody can tell.", problem, found[-1])
    return found[-1] if found else None


def best(directory: Path) -> Path | None:
    """The checkpoint that training marked as the best, or None."""
    try:
        name = read_file(directory / _BEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return directory / name if _NAME.fullmatch(name) and (directory / name).is_dir() else None


def complete(directory: Path) -> list[Path]:
    """All complete checkpoints in a directory, the oldest first."""
    if not directory.is_dir():
        return []
    by_step: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):  # step-N.old before step-N, which takes its place
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            by_step[int(match[1])] = path
    return [path for _, path in sorted(by_step.items(), key=lambda item: (_serial(item[1]), item[0]))]


def unread(folders: Iterable[Path]) -> list[str]:
    """What is wrong with those checkpoints that do not say when they were written, which count as the oldest."""
    problems = []
    for folder in folders:
        try:
            read_json(folder / PROGRESS)
        except DamagedError as problem:
            problems.append(str(problem))
    return problems


def without_folder(directory: Path) -> list[Path]:
    """What has a checkpoint's name and is no folder, such as a link to a disk that is not there: whether it is the
    newest one nobody can tell."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name) and not path.is_dir())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DamagedError, with the file's name, for anything else."""
    try:
        content = json.loads(read_file(path).decode())
    except (ValueError, RecursionError) as problem:
        reason = _DEEP if isinstance(problem, RecursionError) else problem
        raise DamagedError(f"{path} is damaged: {reason}. {_ELSEWHERE}") from None
    except OSError as problem:
        raise DamagedError(f"{path} cannot be read: {problem.strerror}. {_ELSEWHERE}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is damaged: it holds no object. {_ELSEWHERE}")
    return content


def read_progress(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its run: version, step, ranks, cube, optimizer, serial, and the facts of the run.

    Raises:
        DamagedError: what it says cannot be read, or `folder` has the name of a checkpoint and says nothing.
        ValueError: `folder` is no checkpoint, or one of another version of the format.
    """
    path = folder / PROGRESS
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_checkpoint(folder) from None
    except OSError:
        pass  # which reading it meets again, and tells
    progress = read_json(path)
    version = progress.get("version")
    if not _is_number(progress.get("step"), 0):
        raise DamagedError(f"{path} names no step. {_ELSEWHERE}")
    if version is None:
        raise ValueError(
            f"{folder} was written by a tensor3d from before checkpoints had a version, whose files were pickles. "
            "Load it with the tensor3d that wrote it."
        )
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise ValueError(
            f"{folder} was written by {'a newer' if newer else 'another'} tensor3d: its format is version {version}, "
            f"this one reads {VERSION}. {'Update tensor3d' if newer else _ELSEWHERE.rstrip('.')}."
        )
    for name, good in (
        ("ranks", _is_number(progress.get("ranks"), 1)),
        ("serial", _is_number(progress.get("serial"), 0)),
        ("cube", isinstance(progress.get("cube"), str)),
        ("optimizer", isinstance(progress.get("optimizer"), str)),
    ):
        if not good:
            raise DamagedError(f"{path} is damaged: its {name} is {progress.get(name)!r}. {_ELSEWHERE}")
    return progress


def _no_checkpoint(folder: Path) -> ValueError:
    """Why a folder without progress.json is refused."""
    told = f"{folder.absolute()} is not a checkpoint: it has no {PROGRESS}."
    if os.path.lexists(folder / ".metadata"):
        why = "A .metadata of torch.distributed.checkpoint is a pickle, which may run code: it is never read."
        return ValueError(f"{told} {why}")
    if _NAME.fullmatch(folder.name) and os.path.isdir(folder):
        return DamagedError(f"{told} It has the name of one, so it is damaged. {_ELSEWHERE}")
    near = None
    with suppress(OSError):
        near = latest(folder)
    remedy = f"Did you mean {near}?" if near else "A checkpoint is a folder step-NNNNNNNN written by training."
    return ValueError(f"{told} {remedy}")


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_writable(directory: Path) -> None:
    """Raises ValueError where no checkpoint could be written, by writing a file; nothing stays behind.

    Where the directory is not there yet, the nearest folder above it must be writable.
    """
    there = directory.absolute()
    try:
        there = nearest(directory)
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"tensor3d")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise ValueError(
            f"checkpoints cannot be written to {directory}: {problem.strerror} in {there}. Choose another folder, or "
            "make room or ask for permission to write there."
        ) from None


def partial_of(directory: Path, step: int, run: str) -> Path:
    """Where the run of this token writes a checkpoint: another run in the same directory does not touch it."""
    return directory / f"step-{step:08d}.{run}.partial"


def begin(partial: Path) -> None:
    """Makes a new, empty folder to write into."""
    discard(partial)  # of a save that failed, and could not be deleted then
    partial.mkdir(parents=True)


def commit(partial: Path, final: Path) -> None:
    """Gives a finished folder its name. An older one of that name stays beside it, for `settle`."""
    old = final.with_suffix(".old")
    sync(partial)
    if final.is_symlink() or not final.is_dir():
        discard(final)
    replaced = final.exists()
    if replaced:
        discard(old)
        os.replace(final, old)
    try:
        os.replace(partial, final)
    except OSError:
        if replaced:
            with suppress(OSError):  # it counts under the other name too
                os.replace(old, final)
        raise


def settle(final: Path) -> None:
    """After `commit`: the new name is on disk, then the older one is gone."""
    sync(final.parent)
    discard(final.with_suffix(".old"))


def discard(path: Path) -> None:
    """Deletes a folder, or a link. First it loses its name: half of a checkpoint never bears one."""
    if os.path.lexists(path):
        # A name that nothing has: in the place of a leftover that cannot be deleted nothing could be put.
        trash = path.with_name(f"{path.name.partition('.')[0]}.{secrets.token_hex(4)}.trash")
        with suppress(FileNotFoundError):  # another run does the same, and was faster
            os.replace(path, trash)
            _remove(trash)


def clean(directory: Path, *, older_than: float = ABANDONED) -> None:
    """Takes away what a killed run has left, as far as that can be done. Raises nothing.

    Args:
        older_than: seconds without a change; before that another run may be writing. 0 is for who knows that there is
            none.
    """
    try:
        for path in sorted(directory.glob("step-*.old")):
            if os.path.lexists(path.with_suffix("")):
                discard(path)
            else:
                os.replace(path, path.with_suffix(""))
    except OSError as problem:  # it counts under that name too
        _warn(problem)
    for path in _listed(directory, ".trash"):
        _remove(path)
    sweep(directory, older_than=older_than)


def sweep(directory: Path, *, older_than: float = ABANDONED) -> None:
    """Takes away what another run has begun and not gone on with for 10 minutes: before that it may be alive. And links
    in such places, which no run puts there."""
    for path in (*_listed(directory, ".partial"), *_listed(directory, TOKEN)):
        if path.is_symlink() or _age(path) >= older_than:
            _remove(path)
    sweep_drafts(directory, older_than=older_than)


def _listed(directory: Path, ending: str) -> list[Path]:
    try:
        return sorted(directory.glob(f"step-*{ending}"))
    except OSError as problem:
        _warn(problem)
        return []


def _age(path: Path) -> float:
    """Seconds since a file, or a folder or anything in it, was changed; 0 where it goes away or cannot be looked at."""
    try:
        inside = list(path.iterdir()) if path.is_dir() else []
        return time() - max(each.lstat().st_mtime for each in (path, *inside))
    except OSError:
        return 0.0


def _remove(path: Path) -> None:
    if (problem := remove(path)) is not None:
        _warn(problem)


def _warn(problem: OSError) -> None:
    _log.warning(
        "%s is left over and cannot be removed: %s. It is in nobody's way.", problem.filename, problem.strerror
    )


def rotate(directory: Path, *, keep_last: int | None, keep_every: int | None, protected: Collection[str]) -> None:
    """Deletes all but the newest `keep_last`, those whose step divides by `keep_every`, the best and the protected."""
    if keep_last is None:
        return
    marked = best(directory)
    for path in complete(directory)[:-keep_last]:
        match = _NAME.fullmatch(path.name)
        assert match is not None
        kept = keep_every is not None and int(match[1]) % keep_every == 0
        if not kept and path.name not in protected and path != marked:
            discard(path)


def mark_best(path: Path) -> None:
    """Writes the name of a checkpoint beside it, for `best`."""
    with draft(path.parent / _BEST) as file:
        file.write(f"{path.name}\n".encode())


def next_serial(directory: Path) -> int:
    return 1 + max((_serial(path) for path in complete(directory)), default=0)


def _serial(folder: Path) -> int:
    """0 where it cannot be told: such a one counts as older than all others."""
    try:
        serial = read_json(folder / PROGRESS).get("serial")
    except ValueError:
        return 0
    return serial if isinstance(serial, int) else 0

"""Where checkpoints lie, and how one comes and goes so that a kill at any moment leaves the others whole.

    step-00000100           complete: it has this name by a rename, and loses it by one
    step-00000100.partial   being written
    step-00000100.old       complete: the former one of that step, while a new one takes its place
    step-00000100.trash     being deleted
    best                    text: the name of the best checkpoint

`serial` in progress.json counts the checkpoints of a directory. It tells which is the newest also where a run has
gone back to an earlier step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

VERSION = 1
PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_BEST = "best"
_DEEP = "it is nested too deeply"


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in a directory, or None."""
    found = complete(directory)
    return found[-1] if found else None


def best(directory: Path) -> Path | None:
    """The checkpoint that training marked as the best, or None."""
    try:
        name = (directory / _BEST).read_text().strip()
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, with the file's name, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        reason = _DEEP if isinstance(problem, RecursionError) else problem
        raise ValueError(f"{path} is damaged: {reason}. Resume from an earlier checkpoint.") from None
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}. Resume from an earlier checkpoint.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no object. Resume from an earlier checkpoint.")
    return content


def read_progress(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its run.

    Raises:
        ValueError: `folder` is no checkpoint, or one of another version of the format.
    """
    if not (folder / PROGRESS).is_file():
        near = latest(folder)
        remedy = f" Did you mean {near}?" if near else " A checkpoint is a folder step-NNNNNNNN written by training."
        if (folder / ".metadata").is_file():
            remedy = " A .metadata of torch.distributed.checkpoint is a pickle, which may run code: it is never read."
        raise ValueError(f"{folder} is not a checkpoint: it has no {PROGRESS}.{remedy}")
    progress = read_json(folder / PROGRESS)
    version = progress.get("version")
    if not isinstance(progress.get("step"), int):
        raise ValueError(f"{folder / PROGRESS} names no step. Resume from an earlier checkpoint.")
    if version is None:
        raise ValueError(
            f"{folder} was written by a tensor3d from before checkpoints had a version, whose files were pickles. "
            "Load it with the tensor3d that wrote it."
        )
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise ValueError(
            f"{folder} was written by {'a newer' if newer else 'another'} tensor3d: its format is version {version}, "
            f"this one reads {VERSION}. {'Update tensor3d' if newer else 'Resume from an earlier checkpoint'}."
        )
    return progress


def check_writable(directory: Path) -> None:
    """Raises ValueError where no checkpoint could be written, by writing a file; nothing stays behind.

    Where the directory is not there yet, the nearest folder above it must be writable.
    """
    there = directory.absolute()
    try:
        there = next(path for path in (there, *there.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"tensor3d")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise ValueError(
            f"checkpoints cannot be written to {directory}: {problem.strerror} in {there}. Choose another folder, or "
            "make room or ask for permission to write there."
        ) from None


def begin(directory: Path, step: int) -> Path:
    """A new, empty folder to write into."""
    partial = folder_of(directory, step).with_suffix(".partial")
    if partial.exists():  # of a run that was killed while it wrote
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path) -> Path:
    """Gives a finished folder its name. An older one of that name is gone only when the new one is there."""
    final = partial.with_suffix("")
    old = partial.with_suffix(".old")
    sync_folder(partial)
    if final.exists():
        discard(old)
        os.replace(final, old)
    os.replace(partial, final)
    sync_folder(final.parent)
    discard(old)
    return final


def discard(path: Path) -> None:
    """Deletes a folder. First it loses its name: half of a checkpoint never bears one."""
    trash = path.parent / f"{path.name.partition('.')[0]}.trash"
    if trash.exists():
        shutil.rmtree(trash)
    if path.exists():
        os.replace(path, trash)
        shutil.rmtree(trash)


def clean(directory: Path) -> None:
    """Takes away what a killed run has left."""
    if not directory.is_dir():
        return
    for path in sorted(directory.glob("step-*.old")):
        if path.with_suffix("").exists():
            discard(path)
        else:
            os.replace(path, path.with_suffix(""))
    for pattern in ("step-*.partial", "step-*.trash"):
        for path in sorted(directory.glob(pattern)):
            shutil.rmtree(path)


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
    draft = path.parent / f"{_BEST}.partial"
    draft.write_text(path.name + "\n")
    os.replace(draft, path.parent / _BEST)


def next_serial(directory: Path) -> int:
    return 1 + max((_serial(path) for path in complete(directory)), default=0)


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _serial(folder: Path) -> int:
    """0 where it cannot be told: such a one counts as older than all others."""
    try:
        serial = read_json(folder / PROGRESS).get("serial")
    except ValueError:
        return 0
    return serial if isinstance(serial, int) else 0

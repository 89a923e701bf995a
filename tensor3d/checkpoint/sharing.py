"""Whether all ranks see one folder: on several machines a folder of the same name may be another one on each.

Network file systems remember for a while that a name is not there. Listing the folder above it makes them look again.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from tensor3d.checkpoint.crew import Crew

TOKEN = ".token"
SOME_SECONDS = 20.0
"""In which a name that one rank has made must be seen by the others."""
_AGAIN = 0.1  # seconds between two looks


def check_shared(directory: Path, crew: Crew) -> None:
    """Rank 0 makes the folder and puts a file into it, which every rank must see. Every rank calls it.

    Raises:
        ValueError: a rank does not see it; on every rank, naming that rank and its folder.
        OSError: rank 0 cannot make it; on every rank.
    """
    made = crew.broadcast(_put_token(directory, crew) if crew.rank == 0 else None)
    if isinstance(made, OSError):
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


def appears(path: Path, seconds: float | None = None) -> bool:
    """Whether a path is there, or comes to be seen within some seconds."""
    end = monotonic() + (SOME_SECONDS if seconds is None else seconds)
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


def _put_token(directory: Path, crew: Crew) -> str | OSError:
    name = f"step-{secrets.token_hex(8)}{TOKEN}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if crew.size > 1:
            (directory / name).touch()
    except OSError as problem:
        return problem
    return name

"""The folder that a conversion writes: it appears whole or not at all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tensor3d import Cube
from tensor3d.agree import on_first_rank
from tools.corpus.publish import draft_of


def check_new(folder: Path) -> None:
    """Raises ValueError where there is something already, or where no folder can be put in the place of another."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Name another folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Name another folder.")
    place = folder.resolve()
    kind = "the current folder" if place == Path.cwd() else "a mount point" if place.is_mount() else None
    if kind is not None:
        raise ValueError(
            f"{folder} is {kind}, in the place of which no other folder can be put. Name a folder inside of it."
        )


@contextmanager
def new_folder(folder: Path, cube: Cube) -> Iterator[Path]:
    """A folder beside `folder`, the same on every rank, which gets its name when the block ends well. One that `folder`
    links to is written itself.

    Raises:
        ValueError: `folder` cannot be written, or there is something already; on every rank.
    """
    place = folder.resolve()  # a link has another folder beside it

    def publish(draft: Path) -> None:
        check_new(folder)
        os.rename(draft, place)

    with ExitStack() as stack:  # of the first rank
        if cube.rank == 0:
            stack.enter_context(_ended_by_sigterm())
        draft = on_first_rank(cube, lambda: stack.enter_context(draft_of(place)))
        yield draft
        on_first_rank(cube, lambda: publish(draft))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM, by which schedulers stop a process, ends it as an error does, so that the draft is
    removed. Signals are handled by the main thread alone."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

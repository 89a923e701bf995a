"""Ended by a signal, as by an error: what was begun is put in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM, by which schedulers and launchers stop a process, raises SystemExit, so that what was written is
    removed; where nothing handles it yet, and in the main thread, which alone can handle signals."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the clearing up is not to be ended
        raise SystemExit(128 + number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

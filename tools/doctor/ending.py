"""How a check ends: its exit status, and in good order after a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

NOT_READY = 2
"""Exit status where training would not start."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that what was written is removed."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)

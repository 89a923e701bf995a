"""Work in a thread of its own, for which another thread waits without falling silent."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL = 0.1  # seconds


class Aside(Generic[T]):
    """Begins at once.

    Args:
        action: what is done. It is forgotten afterwards, with all that it holds.
        low_priority: let the threads that train go first. On Linux priority belongs to a thread.
    """

    def __init__(self, action: Callable[[], T], *, low_priority: bool = False) -> None:
        self._action: Callable[[], T] | None = action
        self._low_priority = low_priority
        self._result: T | None = None
        self._error: Exception | None = None
        # A daemon: it must not keep a process that ends by an error.
        self._thread = threading.Thread(target=self._run, name="tensor3d-checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, waiting: Callable[[], None], limit: float = math.inf) -> None:
        """Until it is done, or `limit` seconds have passed; `waiting` is called about every 0.1 s of it."""
        end = monotonic() + limit
        self._thread.join(min(_POLL, limit))
        while self.running and monotonic() < end:
            waiting()
            self._thread.join(_POLL)

    def result(self) -> T:
        """What the action has returned; raises what it has raised. After `wait`."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # no error, so there is a result

    def _run(self) -> None:
        action, self._action = self._action, None
        assert action is not None
        if self._low_priority and sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            self._result = action()
        except Exception as error:
            self._error = error

"""Worker processes that never outlive the process that they work for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection


def begin_worker() -> None:
    """A worker goes when it is interrupted or when the process that it works for is gone, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def _leave_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)

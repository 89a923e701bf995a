"""How many cores there are to use. It imports nothing heavy: steps of the preparation start without torch."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores of this process: a container or a batch system may give it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

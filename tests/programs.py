"""Programs that run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def ran(command: Sequence[str | Path], *, timeout: float = 100, **options: Any) -> subprocess.CompletedProcess[str]:
    """How a program ended, whatever its status, and what it said. It reads nothing unless `options` say so.

    Args:
        options: of `subprocess.run`.
    """
    if "input" not in options:
        options = {"stdin": subprocess.DEVNULL, **options}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)

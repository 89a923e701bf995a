"""Ctrl-C while a command is still importing: what it would do about it, `run_main` of cli.py, does not stand yet."""

from __future__ import annotations

import sys
from types import TracebackType


def end_quietly_on_ctrl_c() -> None:
    """From here on a Ctrl-C that nobody catches ends this process with status 130, and without a traceback."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], problem: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            raise SystemExit(130)
        shown(kind, problem, traceback)

    sys.excepthook = hook

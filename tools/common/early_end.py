"""Ctrl-C while a command is still importing: what it would do about it, `run_main` of cli.py, does not stand yet."""

from __future__ import annotations

import faulthandler
import sys
from types import TracebackType


def end_quietly_on_ctrl_c() -> None:
    """From here on a Ctrl-C that nobody catches ends this process with status 130, and without a traceback, unless
    Python was asked to tell of faults (`-X faulthandler`)."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], problem: BaseException, traceback: TracebackType | None) -> None:
        is_ctrl_c = issubclass(kind, KeyboardInterrupt)
        if not is_ctrl_c or faulthandler.is_enabled():
            shown(kind, problem, traceback)
        if is_ctrl_c:
            raise SystemExit(130)

    sys.excepthook = hook

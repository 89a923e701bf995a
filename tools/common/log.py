"""What a command tells beside its result: lines on standard error, by `logging`. It imports nothing heavy."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

VERBOSE = "--verbose"
HELP = f"{VERBOSE}, anywhere before a --, shows more, and begins each line of the log with time, rank and level."


class _StandardError(logging.Handler):
    """Writes to what is standard error when a line comes, and raises what the writing raises."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def take_verbose(arguments: Sequence[str] | None) -> tuple[list[str], bool]:
    """The arguments (None: of this process) without `--verbose`, and whether it was there."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    end = words.index("--") if "--" in words else len(words)
    return [word for word in words[:end] if word != VERBOSE] + words[end:], VERBOSE in words[:end]


def start_logging(*, verbose: bool = False, rank: int = 0) -> None:
    """Shows what the tools log from here on: the lines as they are, or with time, rank and level and those of the level
    DEBUG too."""
    handler = _StandardError()
    if verbose:
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    tools = logging.getLogger("tools")
    tools.handlers[:] = [handler]
    tools.setLevel(logging.DEBUG if verbose else logging.INFO)
    tools.propagate = False


# --- How far the work is ----------------------------------------------------------------------------------------------

INTERVAL = 10.0
"""Seconds between two lines of progress in a log, at least; the first one comes after as many."""
_control = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]")


def progress(items: Iterable[Any] | None = None, *, shown: bool = True, lines: bool = False, **what: Any) -> tqdm[Any]:
    """A bar on standard error where that is a terminal. Elsewhere there is none, or a line of a log now and then.

    Args:
        items: to go through; without them the caller updates the bar.
        shown: False: there is nothing, here or elsewhere.
        lines: what is not a terminal gets a line every `INTERVAL` seconds at most.
        what: `desc`, `total`, `unit` and so on, as tqdm has them.
    """
    from tqdm import tqdm  # imported here: not every command has it

    if not shown or sys.stderr.isatty():
        return tqdm(items, disable=not shown, **what)
    # Nothing is left behind at the end either: the command's own last line says more.
    return tqdm(items, disable=not lines, **{**what, "file": Lines(), "mininterval": INTERVAL, "leave": False})


class Lines:
    """A file that makes lines of what tqdm draws, and passes them on to standard error at most every `INTERVAL` s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def write(self, text: str) -> None:
        line, now = _control.sub("", text).strip(), self._clock()
        if line and now - self._last >= INTERVAL:
            self._last = now
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Each line was when it came."""

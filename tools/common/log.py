"""What a command tells beside its result: lines on standard error, by `logging`. It imports nothing heavy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

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

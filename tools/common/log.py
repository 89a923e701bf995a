"""What a command tells beside its result: lines on standard error, by `logging`. It imports nothing heavy."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

_log = logging.getLogger(__name__)

VERBOSE = "--verbose"
HELP = f"{VERBOSE}, anywhere before a --, shows more, and begins each line of the log with time, rank and level."


class _StandardError(logging.Handler):
    """Writes to what is standard error when a line comes, above a bar where one is drawn, and raises what the writing
    raises."""

    def emit(self, record: logging.LogRecord) -> None:
        line, bars = self.format(record), sys.modules.get("tqdm")
        if bars is not None and sys.stderr.isatty():
            bars.tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()
        else:
            print(line, file=sys.stderr, flush=True)


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


# --- Standard streams that are closed, or cannot be written any more --------------------------------------------------

_STREAMS = ("stdin", "stdout", "stderr")  # by the number of their file


def open_streams() -> None:
    """Makes /dev/null of the standard streams that were closed before the start (`>&-`). Else the next file that is
    opened would have their number, and what a library writes to standard error would go into a checkpoint. And what an
    encoding of the locale lacks is shown escaped."""
    for number in range(len(_STREAMS)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, which is this
    for number, name in enumerate(_STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115  # to the end
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class StdoutError(OSError):
    """Standard output cannot be written."""


class _ReaderGoneError(StdoutError, BrokenPipeError):
    """Nor is there anybody to read it."""


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Inside the block a standard output that cannot be written ends nothing: files of results may be still to come,
    and other ranks wait. At its end, also where a page of help has ended it, StdoutError is raised; and at once where
    bytes are written to its `buffer`, as by whoever tells a result after another, and has nothing else to do."""
    stream, lost = sys.stdout, list[OSError]()

    def at_once(problem: OSError) -> None:
        kind = _ReaderGoneError if isinstance(problem, BrokenPipeError) else StdoutError
        raise kind(problem.errno, problem.strerror) from None

    sys.stdout = _Watched(stream, lost.append, at_once)  # what a text stream has, it has
    shown: SystemExit | None = None
    try:
        try:
            yield
        except SystemExit as end:
            if end.code:
                raise
            shown = end
        sys.stdout.flush()
        if lost:
            raise StdoutError(lost[0].errno, lost[0].strerror) from None
        if shown is not None:
            raise shown
    finally:
        sys.stdout = stream
        _end(stream)


def lost_stdout(problem: StdoutError, name: str, status: int = 0) -> int:
    """How a command ends whose standard output cannot be written: quietly where its reader has gone, as `head` does;
    else with a line on standard error.

    Args:
        name: of the command.
        status: with which it would have ended.

    Returns:
        The exit status: `status`, or 2.
    """
    if problem.errno == errno.EPIPE:  # whoever read it has seen enough
        return status
    with suppress(OSError):
        _log.error("%s: standard output cannot be written: %s.", name, problem.strerror)
    return 2


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside the block standard output and error raise nothing when they cannot be written (a full disk, a pipe that
    nobody reads): weeks of training do not end for want of a line. The other one of the two is told, once."""
    streams, lost = (sys.stdout, sys.stderr), set[str]()

    def go_on(name: str, problem: OSError, other: TextIO) -> None:
        if name not in lost:
            lost.add(name)
            told = f"standard {name} cannot be written ({problem.strerror}): the run goes on, lines are missing."
            with suppress(OSError):
                print(told, file=other, flush=True)

    sys.stdout = _Watched(streams[0], lambda problem: go_on("output", problem, streams[1]))
    sys.stderr = _Watched(streams[1], lambda problem: go_on("error", problem, streams[0]))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            _end(stream)


class _Watched:
    """A stream whose errors go to a function, those of its `buffer` to another one, if there is one."""

    def __init__(
        self, stream: Any, failed: Callable[[OSError], None], of_bytes: Callable[[OSError], None] | None = None
    ) -> None:
        self._stream, self._failed, self._of_bytes = stream, failed, of_bytes or failed

    @property
    def buffer(self) -> _Watched:
        return _Watched(self._stream.buffer, self._of_bytes)

    def write(self, text: str | bytes) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as problem:
            self._failed(problem)


def _end(stream: TextIO) -> None:
    """Puts /dev/null in the place of a stream that cannot be written: the interpreter's last flush would fail again."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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

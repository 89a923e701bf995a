"""`python -m tools.corpus STEP ...`: from dumps and text to what pre-training reads. `--help` lists the steps."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from tools.common import log
from tools.common.option_names import with_options
from tools.common.parse import parse_options
from tools.corpus.pipeline.step import LEFT_OUT, Manifest
from tools.corpus.pipeline.workers import MpiTeam, Options

_log = logging.getLogger("tools.corpus")
PROGRAM = "python -m tools.corpus"
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """Where a step is found. Its module is imported when it is asked for: reading text needs no torch."""

    summary: str
    module: str
    options: str
    function: str
    goes_on: bool = True
    """Whether what was done before an interrupt is kept."""


STEPS: Mapping[str, Entry] = MappingProxyType(
    {
        "prepare": Entry(
            "a small corpus in one go, as pre-training does it",
            "tools.corpus.quick.prepare",
            "PrepareCommand",
            "run",
            goes_on=False,
        ),
        "download": Entry(
            "a Wikipedia dump, or files by their URLs", "tools.corpus.download.step", "DownloadOptions", "download"
        ),
        "extract": Entry(
            "documents of plain text, from dumps and files", "tools.corpus.extract.step", "ExtractOptions", "extract"
        ),
        "tokenizer": Entry(
            "a tokenizer, trained or taken over",
            "tools.corpus.tokenize.train",
            "TokenizerOptions",
            "tokenizer",
        ),
        "tokenize": Entry(
            "sentences as ids, in Megatron's .bin and .idx",
            "tools.corpus.tokenize.encode",
            "TokenizeOptions",
            "tokenize",
        ),
        "samples": Entry(
            "packed training sequences in shards", "tools.corpus.samples.step", "SamplesOptions", "samples"
        ),
        "inspect": Entry(
            "what any of these folders holds",
            "tools.corpus.inspect.command",
            "InspectOptions",
            "inspect",
            goes_on=False,
        ),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2 for what the user can mend, said in one line; 130 after an interrupt."""
    words, verbose = log.take_verbose(arguments)
    log.open_streams()
    log.start_logging(verbose=verbose)
    if not words or words[0] in ("-h", "--help"):
        status = _show(usage())
        return status if words else 2
    name, *rest = words
    if name not in STEPS:
        _log.error("error: there is no step %r.\n\n%s", name, usage())
        return 2
    try:
        return run(name, rest, verbose=verbose)
    except KeyboardInterrupt:
        _log.error("interrupted; the same command %s", "goes on from here" if STEPS[name].goes_on else "begins afresh")
        return 130


def run(name: str, arguments: Sequence[str], *, verbose: bool) -> int:
    """Runs a step with the arguments behind its name."""
    entry = STEPS[name]
    module = import_module(entry.module)
    options = parse_options(getattr(module, entry.options), arguments, f"{PROGRAM} {name}")
    do: Callable[..., Any] = getattr(module, entry.function)
    if not isinstance(options, Options):
        return _told(lambda: do(options), _show, type(options))
    try:
        team = options.team()
    except ValueError as error:
        _log.error("error: %s", error)
        return 2
    log.start_logging(verbose=verbose, rank=team.rank)
    speaks = team.rank == 0
    try:
        return _told(lambda: do(options, team), lambda manifest: _show(in_lines(manifest)), type(options), speaks)
    except Exception:
        # The other ranks wait for this one, and it has nothing to tell them.
        if isinstance(team, MpiTeam):
            team.abort()
        raise


def usage() -> str:
    """The steps, in the order in which they follow one another."""
    lines = [f"  {name:<10} {entry.summary}" for name, entry in STEPS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} STEP [OPTIONS]",
            "",
            *lines,
            "",
            "Each step reads the folder that the one before it wrote; `STEP --help` lists its options.",
            log.HELP,
            "Under `mpirun -n N` the ranks share the work; the output is the same whatever their number.",
        ]
    )


def _told(do: Callable[[], T], show: Callable[[T], int], options: type, speaks: bool = True) -> int:
    """Does it and shows what came of it, or says what is wrong; the exit status."""
    try:
        result = do()
    except (ValueError, OSError) as error:
        with suppress(BrokenPipeError):
            if speaks:
                _log.error("error: %s", with_options(in_words(error), options))
        return 2
    return show(result) if speaks else 0


def _show(text: str) -> int:
    try:
        with log.naming_stdout():
            print(text)
    except log.StdoutError as error:
        if error.errno != errno.EPIPE:  # else whoever read it has seen enough
            _log.error("error: the work is done, but cannot be shown: %s", error)
            return 2
    return 0


def in_words(error: Exception) -> str:
    """What has happened, and what to do."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"no space left on the disk{where}. Free some and run the same command again: what is done is kept."
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.path.abspath(os.fsdecode(error.filename))}: {error.strerror}. What is done is kept."
    return str(error)


def in_lines(manifest: Manifest) -> str:
    """What a step has come to."""
    rows = [
        (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in manifest.counts.items()
        if isinstance(value, int | float | str)
    ]
    lines = [f"  {name:<26} {value}" for name, value in rows]
    if manifest.left_out:
        lines.append(f"  left out as bad            {manifest.left_out:,}, listed in {manifest.folder / LEFT_OUT}.")
        lines.append("  When that is mended, remove the folder and run the step again.")
    return "\n".join([f"{manifest.folder}: {manifest.step} is done", *lines])


if __name__ == "__main__":
    sys.exit(main())

"""A command line is read. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tyro

from tools.common import log


def parse_options(kind: Any, words: Sequence[str], prog: str, **how: Any) -> Any:
    """What `tyro.cli` reads from a command line. All commands read theirs by it, so that a page of help ends as a
    result does where standard output is closed or full, or has lost its reader.

    Args:
        kind: a dataclass, or a union of some.
        words: the command line, less the program.
        prog: what is typed before `words`, as help shows it.
        how: `default`, `description` and `config`, as tyro has them.

    Raises:
        SystemExit: the command line asks for help, or is none.
    """
    log.open_streams()
    try:
        with log.naming_stdout():
            return tyro.cli(kind, args=list(words), prog=prog, **how)
    except log.StdoutError as problem:
        log.start_logging()
        raise SystemExit(log.lost_stdout(problem, prog.removeprefix("python -m "))) from None

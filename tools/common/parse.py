"""A command line is read. It imports nothing heavy."""

from __future__ import annotations

import dataclasses
import logging
import pwd
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from tools.common import log

_log = logging.getLogger(__name__)


def parse_options(kind: Any, words: Sequence[str], prog: str, **how: Any) -> Any:
    """What `tyro.cli` reads from a command line. All commands read theirs by it, so that a page of help ends as a
    result does where standard output is closed or full, or has lost its reader.

    Args:
        kind: a dataclass, or a union of some.
        words: the command line, less the program.
        prog: what is typed before `words`, as help shows it.
        how: `default`, `description` and `config`, as tyro has them.

    Raises:
        SystemExit: the command line asks for help, or is none, which is told.
    """
    name = prog.removeprefix("python -m ")
    log.open_streams()
    try:
        with log.naming_stdout():
            options = tyro.cli(kind, args=list(words), prog=prog, **how)
    except log.StdoutError as problem:
        log.start_logging()
        raise SystemExit(log.lost_stdout(problem, name)) from None
    except SystemExit as end:
        if end.code and (named := _named_values(kind, words)):
            log.start_logging()
            with suppress(OSError):
                _log.error("%s: there is no option %s: write its value alone, without a name", name, named[0])
        raise
    try:
        check_home(options)
    except ValueError as problem:
        log.start_logging()
        with suppress(OSError):
            _log.error("%s: %s", name, problem)
        raise SystemExit(2) from None
    return options


def _named_values(kind: Any, words: Sequence[str]) -> list[str]:
    """Those of the words that are names of values which are given without one, as `--input` in front of a file."""
    if not dataclasses.is_dataclass(kind):
        return []
    hints = get_type_hints(kind, include_extras=True)
    alone = {name for name, hint in hints.items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())}
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [word for word in typed if word[2:].replace("-", "_") in alone]


def check_home(options: Any) -> None:
    """Raises ValueError for a path that begins with ~ or ~USER, for a folder of that name would be made.

    Args:
        options: a dataclass of a command line, or paths.
    """
    if (path := next(_homeless(options), None)) is not None:
        home = path.partition("/")[0]
        raise ValueError(
            f"the {home} of {path} is no home folder: a shell puts that in its place at the beginning of a word alone, "
            f"and not in quotes, and nobody does in a recipe. Write --option {home}/PATH in place of "
            f"--option={home}/PATH, or the whole path."
        )


def _homeless(options: Any, *, inside: bool = False) -> Iterator[str]:
    """Paths that begin with a home folder, as a shell writes it, which would be a folder of that name. In sections, as
    of a recipe, texts are paths or words; beside them they may be anything."""
    if dataclasses.is_dataclass(options):
        for field in dataclasses.fields(options):
            yield from _homeless(getattr(options, field.name), inside=inside or _is_section(options, field.name))
    elif isinstance(options, tuple | list):
        for each in options:
            yield from _homeless(each, inside=inside)
    elif isinstance(options, (Path, str) if inside else Path) and _begins_with_home(str(options)):
        yield str(options)


def _begins_with_home(path: str) -> bool:
    """Whether a shell would put a home folder in the place of the first part: ~, or ~NAME of a user that there is."""
    first = path.partition("/")[0]
    if not first.startswith("~"):
        return False
    try:
        return first == "~" or bool(pwd.getpwnam(first[1:]))
    except KeyError:
        return False  # a file of that name, such as an editor leaves behind


def _is_section(options: Any, name: str) -> bool:
    return dataclasses.is_dataclass(getattr(options, name))

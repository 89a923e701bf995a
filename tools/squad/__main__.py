"""`python -m tools.squad windows|score|random FILE ...`: SQuAD's files without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Union

import tyro

from tools.entry import guarded
from tools.squad.commands import RandomCommand, ScoreCommand, WindowsCommand

_Commands = Union[  # noqa: UP007 (tyro reads its arms)
    Annotated[WindowsCommand, tyro.conf.subcommand("windows")],
    Annotated[ScoreCommand, tyro.conf.subcommand("score")],
    Annotated[RandomCommand, tyro.conf.subcommand("random")],
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where two histograms differ; 2 for bad input, with one message on standard error."""
    command: WindowsCommand | ScoreCommand | RandomCommand = tyro.cli(
        _Commands,
        args=sys.argv[1:] if arguments is None else list(arguments),
        prog="python -m tools.squad",
        description="Files of SQuAD v1.1 and v2.0: windows of contexts, scores of answers, and what guessing gives.",
    )
    return guarded("tools.squad", command.run)


if __name__ == "__main__":
    sys.exit(main())

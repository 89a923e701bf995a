"""`python -m tools.predict fill-mask|classify|answer|embed MODEL [TEXT ...] [OPTIONS]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Union

import tyro

from tools.entry import guarded
from tools.predict.command import PredictCommand
from tools.predict.commands import AnswerCommand, ClassifyCommand, EmbedCommand, FillMaskCommand
from tools.ranks import check_started

_Commands = Union[  # noqa: UP007 (tyro reads its arms)
    Annotated[FillMaskCommand, tyro.conf.subcommand("fill-mask")],
    Annotated[ClassifyCommand, tyro.conf.subcommand("classify")],
    Annotated[AnswerCommand, tyro.conf.subcommand("answer")],
    Annotated[EmbedCommand, tyro.conf.subcommand("embed")],
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, model or text or a file that cannot be read or written, 1 where another rank
    died (one message on standard error each), 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command: PredictCommand = tyro.cli(
        _Commands,
        args=arguments,
        prog="python -m tools.predict",
        description="Ask a trained model: pieces for masks, classes, answers, vectors.",
    )

    def run() -> int:
        command.check()
        check_started(command.shape, "tools.predict", arguments)
        return command.run()

    return guarded("tools.predict", run)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tools.gpt train [OPTIONS]` and `python -m tools.gpt generate RUN --prompt TEXT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Union

import tyro

from tools.common.cli import check_started, run_main
from tools.gpt.generate import GenerateCommand
from tools.gpt.train import TrainCommand

# --- The command ------------------------------------------------------------------------------------------------------

_Commands = Union[  # noqa: UP007 (tyro reads its arms)
    Annotated[TrainCommand, tyro.conf.subcommand("train")],
    Annotated[GenerateCommand, tyro.conf.subcommand("generate")],
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, run or corpus or a file that cannot be read or written, 1 where another rank
    died (one message on standard error each), 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    description = "GPT: training on packed text, split three ways, and text from what was trained."
    command: TrainCommand | GenerateCommand = tyro.cli(
        _Commands, args=arguments, prog="python -m tools.gpt", description=description
    )

    def run() -> int:
        command.check()
        check_started(command.shape, "tools.gpt", arguments)
        return command.run()

    return run_main("tools.gpt", run)


if __name__ == "__main__":
    sys.exit(main())

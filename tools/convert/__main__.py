"""`python -m tools.convert from-hf DIR OUT` and `python -m tools.convert to-hf MODEL OUT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Union

import tyro

from tools.convert.from_hf import FromHuggingFace
from tools.convert.to_hf import ToHuggingFace
from tools.entry import guarded
from tools.ranks import check_started

_Commands = Union[  # noqa: UP007 (tyro reads its arms)
    Annotated[FromHuggingFace, tyro.conf.subcommand("from-hf")],
    Annotated[ToHuggingFace, tyro.conf.subcommand("to-hf")],
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, a folder that cannot be converted or a file that cannot be read or written, 1
    where another rank died (one message on standard error each), 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    description = "BERTs of the Hugging Face library in and out, on any cube."
    command: FromHuggingFace | ToHuggingFace = tyro.cli(
        _Commands, args=arguments, prog="python -m tools.convert", description=description
    )

    def run() -> int:
        command.check()
        check_started(command.shape, "tools.convert", arguments)
        return command.run()

    return guarded("tools.convert", run)


if __name__ == "__main__":
    sys.exit(main())

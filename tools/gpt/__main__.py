"""`python -m tools.gpt train [OPTIONS]` and `python -m tools.gpt generate RUN --prompt TEXT`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Union

import torch.distributed as dist
import tyro

from tools.agree import in_words
from tools.gpt.generate import GenerateCommand
from tools.gpt.ranks import check_started
from tools.gpt.train import TrainCommand

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
    try:
        command.check()
        check_started(command.shape, arguments)
        return command.run()
    except (ValueError, FloatingPointError, OSError) as problem:
        print(f"tools.gpt: {in_words(problem)}", file=sys.stderr, flush=True)
        return 2
    except dist.DistError as problem:
        print(f"tools.gpt: {str(problem).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        # torchrun passes on the Ctrl-C that has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130


if __name__ == "__main__":
    sys.exit(main())

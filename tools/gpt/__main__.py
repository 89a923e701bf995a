"""`python -m tools.gpt train [OPTIONS]` and `python -m tools.gpt generate RUN --prompt TEXT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tools.common.cli import check_started, parse_command, refuse_empty, run_main
from tools.common.idle_options import tell_idle_options
from tools.common.log import take_verbose
from tools.gpt.generate import GenerateCommand
from tools.gpt.train import TrainCommand

# --- The command ------------------------------------------------------------------------------------------------------

_COMMANDS = {"train": TrainCommand, "generate": GenerateCommand}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, run or corpus or a file that cannot be read or written, 1 where another rank
    died (one message on standard error each), 130 after Ctrl-C."""
    words, verbose = take_verbose(arguments)
    description = "GPT: training on packed text, split three ways, and text from what was trained."
    command: TrainCommand | GenerateCommand = parse_command("tools.gpt", _COMMANDS, words, description)

    def run() -> int:
        refuse_empty(words, "--output", "--corpus", "--source")
        command.check()
        check_started(command.shape, "tools.gpt", words)
        tell_idle_options(command, command.idle_rules())
        return command.run()

    return run_main("tools.gpt", run, verbose=verbose, options=type(command))


if __name__ == "__main__":
    sys.exit(main())

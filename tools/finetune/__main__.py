"""`python -m tools.finetune classify|regress|answer RECIPE.toml [--cube XxYxZ] [--output DIR] [--section.key VALUE]`"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union

import tyro

from tools.entry import guarded
from tools.finetune.answer_command import AnswerCommand
from tools.finetune.command import FinetuneCommand, recipe_among
from tools.finetune.results import finetune
from tools.finetune.text_commands import ClassifyCommand, RegressCommand
from tools.ranks import check_started, cube_of

_PROG = "python -m tools.finetune"
COMMANDS: Mapping[str, type[FinetuneCommand]] = {
    kind.task: kind for kind in (ClassifyCommand, RegressCommand, AnswerCommand)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, recipe or file, or a loss that is not finite, 1 where another rank died (one
    message on standard error each), 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> int:
        command = parse(arguments)
        command.check()
        check_started(command.shape, "tools.finetune", arguments)
        with cube_of(command.shape) as cube:
            finetune(command, cube)
        return 0

    return guarded("tools.finetune", run)


def parse(arguments: Sequence[str]) -> FinetuneCommand:
    """The command line, with the recipe's values as the defaults of its options."""
    name, *rest = arguments or [""]
    command: FinetuneCommand
    if name in COMMANDS:
        # Alone, so that messages are about its own options.
        kind = COMMANDS[name]
        command = tyro.cli(kind, args=rest, default=kind.defaults(rest), prog=f"{_PROG} {name}")
    else:
        kinds = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items()]
        union: Any = Union[tuple(kinds)]  # noqa: UP007 (its arms are known when it runs)
        description = "Fine-tuning: a pre-trained BERT, or a small new one, learns classes, numbers or answers."
        command = tyro.cli(union, args=list(arguments), prog=_PROG, description=description)
    if command.recipe != recipe_among(arguments):
        raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {command.recipe}.")
    return command


if __name__ == "__main__":
    sys.exit(main())

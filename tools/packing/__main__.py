"""`python -m tools.packing report --histogram FILE.json`, and the same way `plan`, `stream` and `balance`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, Union

import tyro

from tools.packing.balance import BalanceCommand
from tools.packing.plan import PlanCommand
from tools.packing.report import ReportCommand
from tools.packing.stream import StreamCommand


class Command(Protocol):
    """Options of one command, which can run."""

    def run(self) -> int:
        """Returns the exit status; raises ValueError or OSError for what the user can mend."""


COMMANDS: tuple[tuple[str, Any], ...] = (
    ("report", ReportCommand),
    ("plan", PlanCommand),
    ("stream", StreamCommand),
    ("balance", BalanceCommand),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a bad call or a file that cannot be used (one message on standard error)."""
    kinds = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS)
    union: Any = Union[kinds]  # noqa: UP007 (its arms are a tuple)
    command: Command = tyro.cli(
        union,
        args=arguments,
        prog="python -m tools.packing",
        description="Packing: how full packs are, plans as files, and how evenly packs are dealt.",
    )
    try:
        return command.run()
    except (ValueError, OSError, MemoryError) as problem:
        print(f"tools.packing: {problem}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())

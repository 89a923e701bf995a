"""What every subcommand is: a frozen dataclass of options that can check itself and run."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import tyro

# --- What every subcommand is -----------------------------------------------------------------------------------------


class Subcommand(ABC):
    """One of them. Its fields are its options; its docstring is its help."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        """An instance with the values of what is not given, which may depend on the arguments (a recipe's path).

        Raises:
            ValueError: a file among the arguments that cannot be read.
        """
        options: Any = cls
        return options(**{field.name: tyro.MISSING for field in dataclasses.fields(options) if is_required(field)})

    @abstractmethod
    def run(self, arguments: Sequence[str]) -> int:
        """Measures, prints and writes; returns the exit status.

        Args:
            arguments: the command line, to be written beside the figures.

        Raises:
            ValueError: an option that cannot be; before any process is started.
            RankFailedError: a process failed.
        """


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING

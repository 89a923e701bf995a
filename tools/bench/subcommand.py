"""What every measurement is: a frozen dataclass of options that can check itself and run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Subcommand(ABC):
    """One measurement. Its fields are its options; its docstring is its help."""

    @classmethod
    @abstractmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        """An instance with the values of what is not given, which may depend on the arguments (a recipe's path).

        Raises:
            ValueError: a file among the arguments that cannot be read.
        """

    @abstractmethod
    def run(self, arguments: Sequence[str]) -> int:
        """Measures, prints and writes; returns the exit status.

        Args:
            arguments: the command line, to be written beside the figures.

        Raises:
            ValueError: an option that cannot be; before any process is started.
            RankFailedError: a process failed.
        """

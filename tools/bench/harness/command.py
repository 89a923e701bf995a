"""What every subcommand is: a frozen dataclass of options that can check itself and run."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from models.bert import BertConfig

# --- Sizes of a BERT and of its batches, as options of measurements whose sequences are all full ----------------------


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Fields of a measurement."""

    hidden: int = 256
    """Columns of a hidden state."""
    layers: int = 4
    """Transformer layers."""
    heads: int = 8
    """Attention heads of a layer."""
    vocab: int = 8192
    """Entries of the vocabulary."""
    sequences: int = 8
    """Of the global batch. All are full: nobody gains from packing."""
    length: int = 128
    """Tokens of a sequence."""

    @property
    def config(self) -> BertConfig:
        """Without dropout, so that all that is compared computes the same."""
        return BertConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=self.vocab,
            positions=max(512, self.length),
            dropout=0.0,
            attention_dropout=0.0,
        )

    def check_least(self, **least: int) -> None:
        """Raises ValueError for an option below its least, which is 1 for `sequences` and `length`."""
        for name, bound in {"sequences": 1, "length": 1, **least}.items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name} must be at least {bound}. Got {getattr(self, name)}.")


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


def recipe_among(arguments: Sequence[str]) -> Path | None:
    """The recipe must be known before its values can be the defaults of options."""
    return next((Path(argument) for argument in arguments if argument.endswith(".toml")), None)

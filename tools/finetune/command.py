"""What the commands `classify`, `regress` and `answer` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tyro

from tensor3d import Cube, CubeShape
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.recipe import FinetuneRecipe, read_recipe
from tools.finetune.task import Task


@dataclass(frozen=True, kw_only=True)
class FinetuneCommand(ABC):
    """Fine-tunes a model for one task. Subclasses add `settings`, a `FinetuneRecipe` with their own section `data`."""

    task: ClassVar[str]
    """Its name on the command line."""

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes/finetune."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    output: Path | None = None
    """Folder of the results. Default: runs/finetune/NAME of the recipe. If seeds are done there already, with the same
    settings, the command goes on with the others."""

    @classmethod
    @abstractmethod
    def recipe_class(cls) -> type[FinetuneRecipe]: ...

    @property
    @abstractmethod
    def sections(self) -> Any:
        """The settings: a recipe of `recipe_class`."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of the longest sequence: the model needs positions for them."""

    @abstractmethod
    def inputs(self) -> Sequence[Path]:
        """The files that the task reads: their content is part of the settings."""

    @abstractmethod
    def make_task(self, tokenizer: Tokenizer, cube: Cube) -> Task:
        """Reads the files, on every rank.

        Raises:
            ValueError: of a file, naming it and the place in it.
        """

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        """A command with the values of the recipe among the arguments; tyro says what is missing without one."""
        path = recipe_among(arguments)
        kind = cls.recipe_class()
        settings: Any = kind() if path is None else read_recipe(kind, path)
        options: dict[str, Any] = {"recipe": tyro.MISSING, "settings": settings}
        return cls(**options)

    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""
        _ = self.shape
        for path in self.inputs():
            if not path.is_file():
                raise ValueError(f"{path} is no file. Correct it in [data], or give it as --data.NAME.")
        there = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ValueError(f"results need a folder, and {there} is a file. Choose another --output.")

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube, self.data_parallel)

    @property
    def folder(self) -> Path:
        return self.output or Path("runs/finetune") / self.recipe.stem


def recipe_among(arguments: Sequence[str]) -> Path | None:
    return next((Path(argument) for argument in arguments if argument.endswith(".toml")), None)

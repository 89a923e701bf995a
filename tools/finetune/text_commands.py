"""`classify` and `regress` as commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from tensor3d import Cube
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.command import FinetuneCommand
from tools.finetune.recipe import FinetuneRecipe
from tools.finetune.task import Task
from tools.finetune.text_tasks import ClassifyTask, RegressTask
from tools.finetune.texts import TextData


@dataclass(frozen=True, kw_only=True)
class TextRecipe(FinetuneRecipe):
    """A recipe of classification or regression."""

    data: TextData = field(default_factory=TextData)


@dataclass(frozen=True, kw_only=True)
class _TextCommand(FinetuneCommand):
    settings: Annotated[TextRecipe, tyro.conf.arg(name="")] = field(default_factory=TextRecipe)
    """The recipe's values, each of which can be given here."""

    @classmethod
    def recipe_class(cls) -> type[FinetuneRecipe]:
        return TextRecipe

    @property
    def sections(self) -> TextRecipe:
        return self.settings

    @property
    def max_length(self) -> int:
        return self.settings.data.max_length

    def inputs(self) -> Sequence[Path]:
        return self.settings.data.files()


@dataclass(frozen=True, kw_only=True)
class ClassifyCommand(_TextCommand):
    """Learn classes of texts or pairs."""

    task = "classify"

    def make_task(self, tokenizer: Tokenizer, cube: Cube) -> Task:
        return ClassifyTask(self.settings.data, self.settings, tokenizer, cube)


@dataclass(frozen=True, kw_only=True)
class RegressCommand(_TextCommand):
    """Learn a number for each text or pair."""

    task = "regress"

    def make_task(self, tokenizer: Tokenizer, cube: Cube) -> Task:
        return RegressTask(self.settings.data, self.settings, tokenizer, cube)

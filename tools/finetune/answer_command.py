"""`answer` as a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from tensor3d import Cube
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.answer_data import AnswerData
from tools.finetune.answer_task import AnswerTask
from tools.finetune.command import FinetuneCommand
from tools.finetune.recipe import FinetuneRecipe
from tools.finetune.task import Task


@dataclass(frozen=True, kw_only=True)
class AnswerRecipe(FinetuneRecipe):
    """A recipe of question answering."""

    data: AnswerData = field(default_factory=AnswerData)


@dataclass(frozen=True, kw_only=True)
class AnswerCommand(FinetuneCommand):
    """Learn to find the answers to questions in texts."""

    task = "answer"

    settings: Annotated[AnswerRecipe, tyro.conf.arg(name="")] = field(default_factory=AnswerRecipe)
    """The recipe's values, each of which can be given here."""

    @classmethod
    def recipe_class(cls) -> type[FinetuneRecipe]:
        return AnswerRecipe

    @property
    def sections(self) -> AnswerRecipe:
        return self.settings

    @property
    def max_length(self) -> int:
        return self.settings.data.max_length

    def inputs(self) -> Sequence[Path]:
        return self.settings.data.files()

    def make_task(self, tokenizer: Tokenizer, cube: Cube) -> Task:
        return AnswerTask(self.settings.data, self.settings, tokenizer, cube)

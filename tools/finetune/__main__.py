"""`python -m tools.finetune TASK RECIPE.toml [--cube XxYxZ] [--output DIR] [--section.key V]`; tasks are `COMMANDS`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from models.bert.huggingface import open_weights
from tools.common.cli import check_started, cube_of, recipe_among, refuse_empty, run_main
from tools.common.log import lasting_streams, take_verbose
from tools.common.parse import parse_options
from tools.finetune.config import FinetuneConfig
from tools.finetune.data import TextData
from tools.finetune.embed_data import (
    MAX_LENGTH,
    EmbedData,
    encoder_folder,
    is_collection,
    settings_for,
    start_files,
    start_settings,
)
from tools.finetune.embed_task import embed_task
from tools.finetune.job import FinetuneCommand
from tools.finetune.labels_task import classify_task
from tools.finetune.qa_task import AnswerData, AnswerTask
from tools.finetune.rank_data import RankData
from tools.finetune.rank_task import RankTask
from tools.finetune.seed_sweep import finetune
from tools.finetune.tag_data import TagData
from tools.finetune.tag_task import TagTask
from tools.finetune.text_task import RegressTask
from tools.training.config import with_new_names
from tools.training.idle_settings import Rule

# --- `classify` and `regress` as commands -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextConfig(FinetuneConfig):
    """A recipe of classification or regression."""

    data: TextData = field(default_factory=TextData)


@dataclass(frozen=True, kw_only=True)
class _TextCommand(FinetuneCommand):
    settings: Annotated[TextConfig, tyro.conf.arg(name="")] = field(default_factory=TextConfig)
    """The recipe's values, each of which can be given here."""
    recipe_class = TextConfig

    def data_rules(self) -> Sequence[Rule]:
        data = self.settings.data
        of_test = ("test_text", "test_text_b", "test_id", "test_header", "test_labels")
        return [
            Rule("data", data, ("separator",), data.multi_label, "data.multi_label = true"),
            Rule("data", data, of_test, data.test is not None, "data.test"),
        ]


@dataclass(frozen=True, kw_only=True)
class ClassifyCommand(_TextCommand):
    """Learn classes of texts or pairs, one each or (data.multi_label) any number."""

    task, task_class = "classify", staticmethod(classify_task)


@dataclass(frozen=True, kw_only=True)
class RegressCommand(_TextCommand):
    """Learn a number for each text or pair."""

    task, task_class = "regress", RegressTask


# --- `answer` as a command --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(FinetuneConfig):
    """A recipe of question answering."""

    data: AnswerData = field(default_factory=AnswerData)


@dataclass(frozen=True, kw_only=True)
class AnswerCommand(FinetuneCommand):
    """Learn to find the answers to questions in texts."""

    task, task_class = "answer", AnswerTask
    recipe_class = AnswerConfig

    settings: Annotated[AnswerConfig, tyro.conf.arg(name="")] = field(default_factory=AnswerConfig)
    """The recipe's values, each of which can be given here."""


# --- `tag` as a command -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TagConfig(FinetuneConfig):
    """A recipe of tagging."""

    data: TagData = field(default_factory=TagData)


@dataclass(frozen=True, kw_only=True)
class TagCommand(FinetuneCommand):
    """Learn a tag for each word, such as those of names in texts."""

    task, task_class = "tag", TagTask
    recipe_class = TagConfig
    pairs = False

    settings: Annotated[TagConfig, tyro.conf.arg(name="")] = field(default_factory=TagConfig)
    """The recipe's values, each of which can be given here."""

    def data_rules(self) -> Sequence[Rule]:
        data = self.settings.data
        return [Rule("data", data, ("test_tags",), data.test is not None, "data.test")]


# --- `rank` as a command ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankConfig(FinetuneConfig):
    """A recipe of ranking."""

    data: RankData = field(default_factory=RankData)


@dataclass(frozen=True, kw_only=True)
class RankCommand(FinetuneCommand):
    """Learn a score for each passage of a query, by which they are put in order (a cross-encoder)."""

    task, task_class = "rank", RankTask
    recipe_class = RankConfig

    settings: Annotated[RankConfig, tyro.conf.arg(name="")] = field(default_factory=RankConfig)
    """The recipe's values, each of which can be given here."""

    def data_rules(self) -> Sequence[Rule]:
        data = self.settings.data
        return [
            Rule("data", data, ("margin",), data.loss == "margin", f"data.loss = 'margin', and it is {data.loss!r}"),
            Rule("data", data, ("bad",), data.loss != "pointwise", "a loss that compares the passages of a query"),
            Rule("data", data, ("test_grades",), data.test is not None, "data.test"),
        ]


# --- `embed` as a command ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(FinetuneConfig):
    """A recipe of sentence vectors."""

    data: EmbedData = field(default_factory=EmbedData)


@dataclass(frozen=True, kw_only=True)
class EmbedCommand(FinetuneCommand):
    """Learn vectors of texts, near to one another where the texts belong together."""

    task, task_class = "embed", staticmethod(embed_task)
    recipe_class = EmbedConfig
    pairs = False

    settings: Annotated[EmbedConfig, tyro.conf.arg(name="")] = field(default_factory=EmbedConfig)
    """The recipe's values, each of which can be given here."""

    @property
    def max_length(self) -> int:
        """As the folder to begin with has it, unless the recipe says otherwise."""
        return settings_for(self.settings.data, self.settings.model).max_length or MAX_LENGTH

    @property
    def start_folder(self) -> Path | None:
        return encoder_folder(self.settings.model)

    def inputs(self) -> Sequence[Path]:
        return [*super().inputs(), *start_files(self.settings.model)]

    def check(self) -> None:
        super().check()
        begun, folder = start_settings(self.settings.model), self.start_folder
        if begun is not None and folder is not None:
            begun.with_dense(open_weights(folder))

    def data_rules(self) -> Sequence[Rule]:
        data = self.settings.data
        named = {"dev": data.dev, "test": data.test}
        folders = {part: name is not None and is_collection(Path(name)) for part, name in named.items()}
        measured = any(name is not None and not folders[part] for part, name in named.items())
        of_files = ("eval_anchor", "eval_positive", "eval_score")
        return [
            Rule("data", data, ("temperature", "cache"), data.loss == "in-batch", "data.loss = 'in-batch'"),
            Rule("data", data, ("dense_activation",), bool(data.dense), "data.dense"),
            Rule("data", data, ("score",), data.loss == "cosine", "data.loss = 'cosine'"),
            Rule("data", data, ("top_score",), data.scored_by is not None, "scores, and no column of any is read"),
            Rule("data", data, of_files, measured, "data.dev or data.test as a file"),
            *(Rule("data", data, (f"{part}_split",), folders[part], f"data.{part} as a folder") for part in folders),
        ]


# --- The command ------------------------------------------------------------------------------------------------------

_PROG = "python -m tools.finetune"
COMMANDS: Mapping[str, type[FinetuneCommand]] = {
    kind.task: kind for kind in (ClassifyCommand, RegressCommand, AnswerCommand, TagCommand, RankCommand, EmbedCommand)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, recipe or file, or a loss that is not finite, 1 where another rank died (one
    message on standard error each), 130 after Ctrl-C."""
    words, verbose = take_verbose(arguments)

    def run() -> int:
        command = parse(words)
        command.check()
        check_started(command.shape, "tools.finetune", words)
        with lasting_streams(), cube_of(command.shape) as cube:
            finetune(command, cube)
        return 0

    options = COMMANDS.get(words[0]) if words else None
    return run_main("tools.finetune", run, verbose=verbose, options=options)


def parse(arguments: Sequence[str]) -> FinetuneCommand:
    """The command line, with the recipe's values as the defaults of its options."""
    refuse_empty(arguments, "--output")
    name, *rest = arguments or [""]
    command: FinetuneCommand
    if name in COMMANDS:
        # Alone, so that messages are about its own options.
        kind = COMMANDS[name]
        command = parse_options(kind, with_new_names(rest), f"{_PROG} {name}", default=kind.defaults(rest))
    else:
        kinds = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items()]
        union: Any = Union[tuple(kinds)]  # noqa: UP007 (its arms are known when it runs)
        description = (
            "Fine-tuning: a pre-trained BERT, or a small new one, learns classes, numbers, answers, tags, vectors, or "
            "the order of passages."
        )
        command = parse_options(union, with_new_names(arguments), _PROG, description=description)
    if command.recipe != recipe_among(arguments):
        raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {command.recipe}.")
    return command


if __name__ == "__main__":
    sys.exit(main())

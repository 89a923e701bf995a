"""Recipes of fine-tuning: what all tasks have in common, one dataclass a section."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from models.bert import PRESETS, BertConfig
from tools.training.config import OptimizerConfig, PrecisionConfig, from_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

R = TypeVar("R", bound="FinetuneConfig")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Where the model comes from: a folder, or a preset with random weights."""

    start_from: str | None = None
    """Folder with weights: one of Hugging Face (config.json, model.safetensors, tokenizer files), one that
    `tools.convert` or `tools.finetune` has written, or a run of `tools.pretrain`."""
    vocab: str | None = None
    """Tokenizer of a model without start_from: vocab.txt (WordPiece), tokenizer.json, a sentencepiece model *.model, a
    folder of `tools.corpus tokenizer`, or "embedded": pieces learnt from the text that comes with Python."""
    lowercase: bool = True
    """Whether a vocab.txt is one of lower-case text."""
    preset: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    """Sizes of a model without start_from."""
    std: float = 0.02
    """Standard deviation of the initial weights of a model without start_from."""
    dropout: float | None = None
    """Probability, of hidden states and of what the head reads. Default: that of start_from, else 0.1."""
    attention_dropout: float | None = None
    """Probability, of attention weights. Default: that of start_from, else 0.1."""
    recompute: Literal["none", "layer", "attention"] = "none"
    """What the backward pass computes again instead of keeping it."""
    reshard_after_forward: bool = True
    """Gather inputs and weights again in the backward pass; false keeps them: less traffic, more memory."""

    def __post_init__(self) -> None:
        if (self.start_from is None) == (self.vocab is None):
            raise ValueError(
                "model.start_from names a folder with weights and a tokenizer, model.vocab the tokenizer of a model "
                f"with random weights: give one of them. Got {self.start_from!r} and {self.vocab!r}."
            )
        self.changed(PRESETS[self.preset])  # checks the probabilities

    def changed(self, config: BertConfig) -> BertConfig:
        """The configuration with the dropout of this recipe."""
        given = {name: getattr(self, name) for name in ("dropout", "attention_dropout")}
        return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(OptimizerConfig):
    """The optimiser of pre-training, with a learning rate for weights that are good already."""

    lr: float = 5e-5
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """How long, how often, and what is compared."""

    epochs: int = 3
    """Times that each text is trained on."""
    batch: int = 32
    """Texts of a step, over all ranks: the same on any cube. The last step of an epoch has what is left."""
    tokens_per_rank: int = 4096
    """Token slots of a micro-batch, at most, for each rank; a batch with more is done in several."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One model is trained for each: it decides the head's weights, the order of the texts and dropout."""
    evaluate_every: int = 0
    """Steps between evaluations on dev; also at the end. 0: after each epoch."""
    metric: str = ""
    """By which the best evaluation is known. Default: the first one of the task."""
    patience: int = 0
    """Evaluations without a better one after which a seed ends. 0: never."""
    padding: Literal["packed", "padded"] = "packed"
    """"padded": a baseline, in which every text has the slots of the micro-batch's longest."""

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("batch", 1),
            ("tokens_per_rank", 1),
            ("evaluate_every", 0),
            ("patience", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"run.{name} must be at least {least}. Got {getattr(self, name)}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(
                f"run.seeds must be different whole numbers, at least one, none below 0. Got {self.seeds}."
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The sections that all tasks share; a task adds `data`.

    Raises:
        ValueError: a number out of its range.
    """

    model: ModelSection = field(default_factory=lambda: ModelSection(vocab="embedded"))
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip"):
            if not 0 < getattr(self.optimizer, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be above 0 and finite. Got {getattr(self.optimizer, name)}.")
        for name in ("warmup", "beta1", "beta2"):
            if not 0 <= getattr(self.optimizer, name) < 1:
                raise ValueError(
                    f"optimizer.{name} must be at least 0 and below 1. Got {getattr(self.optimizer, name)}."
                )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_recipe(kind: type[R], path: Path) -> R:
    """A recipe file; what it does not name has its default.

    Raises:
        ValueError: no such file, not TOML, an unknown key, a value of the wrong type or out of range; the message names
            the file and the key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"recipe {path} does not exist. Shipped ones lie in launch/recipes/finetune.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"recipe {path} is not valid TOML: {problem}.") from None
    try:
        return from_table(kind, table)
    except ValueError as problem:
        raise ValueError(f"recipe {path}: {problem}") from None

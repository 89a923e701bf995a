"""Recipes of fine-tuning: what all tasks have in common, one dataclass a section."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from models.bert import PRESETS, BertConfig
from tools.common.bounds import AtLeast, Positive, check_bounds
from tools.training.config import OptimizerConfig, PrecisionConfig, check_fp8, check_kept, check_reduce, check_schedule

SHIPPED = "launch/recipes/finetune"


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
    strip_accents: bool | None = None
    """Whether text loses its accents before it is looked up in a vocab.txt. Default: not where lowercase is false, nor
    where the vocabulary has pieces with accents."""
    preset: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    """Sizes of a model without start_from."""
    std: float = 0.02
    """Standard deviation of the initial weights of a model without start_from."""
    dropout: float | None = None
    """Probability, of hidden states, attention's output among them, and of what the head reads (not that of BERT's
    answers). Default: those of start_from, else 0.1."""
    attention_dropout: float | None = None
    """Probability, of attention weights. Default: that of start_from, else 0.1."""
    recompute: Literal["none", "layer", "attention"] = "none"
    """What the backward pass computes again instead of keeping it."""
    reshard_after_forward: bool = True
    """Gather inputs and weights again in the backward pass; false keeps them: less traffic, more memory."""
    keep_budget: Annotated[int, AtLeast(0)] = 0
    """MiB of each rank for gathered inputs and weights that stay for the backward pass of a micro-batch, those first
    that spare most for a byte. 0: none stay, or, with reshard_after_forward = false, all of them."""
    frozen_layers: Annotated[int, AtLeast(0)] = 0
    """Layers, from the first one, that stay as they are, and the embeddings with them. 0: everything is trained."""

    def __post_init__(self) -> None:
        if (self.start_from is None) == (self.vocab is None):
            way = " One that the recipe or the default has is left out by None: --model.vocab None, or "
            way = "" if self.vocab is None else f"{way}--model.start-from None."
            raise ValueError(
                "model.start_from names a folder with weights and a tokenizer, model.vocab the tokenizer of a model "
                f"with random weights: give one of them. Got {self.start_from!r} and {self.vocab!r}.{way}"
            )
        check_bounds(self, "model")
        check_kept(self.keep_budget, self.reshard_after_forward)
        self.changed(PRESETS[self.preset])  # checks the probabilities

    def changed(self, config: BertConfig) -> BertConfig:
        """The configuration with the dropout of this recipe."""
        if self.dropout is not None:
            config = dataclasses.replace(config, dropout=self.dropout, attention_out_dropout=None)
        if self.attention_dropout is not None:
            config = dataclasses.replace(config, attention_dropout=self.attention_dropout)
        return config


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(OptimizerConfig):
    """The optimiser of pre-training, with a learning rate for weights that are good already."""

    lr: Annotated[float, Positive()] = 5e-5
    """Peak learning rate."""
    layer_decay: float = 1.0
    """Factor from each layer's learning rate to that of the one below it: the head has `lr`, the last layer the factor
    times that, the embeddings least. 1: all have the same."""

    def __post_init__(self) -> None:
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optimizer.layer_decay must be above 0 and at most 1. Got {self.layer_decay}.")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """How long, how often, and what is compared."""

    epochs: Annotated[int, AtLeast(1)] = 3
    """Times that each text is trained on."""
    batch: Annotated[int, AtLeast(1)] = 32
    """Texts of a step, over all ranks: the same on any cube. The last step of an epoch has what is left."""
    tokens_per_rank: Annotated[int, AtLeast(1)] = 4096
    """Token slots of a micro-batch, at most, for each rank; a batch with more is done in several."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One model is trained for each: it decides the head's weights, the order of the texts and dropout."""
    evaluate_every: Annotated[int, AtLeast(0)] = 0
    """Steps between evaluations on dev; also at the end. 0: after each epoch."""
    metric: str = ""
    """By which the best evaluation is known. Default: the first one of the task."""
    patience: Annotated[int, AtLeast(0)] = 0
    """Evaluations without a better one after which a seed ends. 0: never."""
    padding: Literal["packed", "padded"] = "packed"
    """"padded": a baseline, in which every text has the slots of the micro-batch's longest."""

    def __post_init__(self) -> None:
        check_bounds(self, "run")
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
        check_bounds(self)
        check_fp8(self.precision)
        check_reduce(self.precision)
        check_schedule(self.optimizer)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

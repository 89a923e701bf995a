"""A recipe: everything that decides what a run computes, in one TOML file. The cube is no part of it."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from models.bert import PRESETS, BertConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where text comes from, and how it becomes packs."""

    source: str = "embedded"
    """"embedded", or a text file or a folder of *.txt files (UTF-8, a blank line between documents)."""
    vocab_size: int = 2048
    """Pieces of the tokenizer."""
    held_out: float = 0.02
    """Share of the words kept for evaluation, in whole documents. 0: none, and no evaluation."""
    capacity: int = 128
    """Token slots of a pack."""
    max_length: int = 128
    """Tokens of a sequence, at most."""
    max_sequences: int = 8
    """Sequences of a pack, at most."""
    masked_per_pack: int | None = None
    """Tokens to guess in a pack, at most. Default: 15 % of a full pack and two more."""
    short_probability: float = 0.1
    """Share of pairs that aim at a random shorter length."""
    packing: Literal["lp", "lpfhp", "spfhp", "nnlshp", "stream", "padded", "binned"] = "lp"
    """How sequences fill packs: by a planner, as they come ("stream"), or one sequence a pack, of full length
    ("padded") or of the length of its bin ("binned"); the last two are baselines."""
    bin_width: int = 64
    """Tokens: how much longer than another one a sequence of the same bin may be."""
    plans: str | None = None
    """Folder for plan files: made by --prepare-only for the epochs of the run, then read instead of planning again."""
    shards: int = 1
    """Parts that the training documents are cut into, pairs of each part drawn by itself; a multiple of the data ranks
    where each of these reads its own."""
    groups: int = 1
    """Consecutive shards form a group, and a pack has sequences of one group only; then an exchange can stay inside a
    node."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """A preset, and what is changed of it."""

    preset: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    """Layers, hidden size and heads of BERT's published sizes."""
    layers: int | None = None
    """Transformer layers, instead of the preset's."""
    hidden: int | None = None
    """Columns of a hidden state, instead of the preset's."""
    heads: int | None = None
    """Attention heads, instead of the preset's."""
    inner: int | None = None
    """Columns inside the MLP. Default: 4 * hidden."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual, as in BERT, or before each block."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.1
    """Probability, of attention weights."""
    std: float = 0.02
    """Standard deviation of initial weights."""

    def config(self, data: DataRecipe) -> BertConfig:
        """The model's sizes, with the vocabulary and the longest sequence of the data."""
        changed = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "inner")}
        return dataclasses.replace(
            PRESETS[self.preset],
            **{name: value for name, value in changed.items() if value is not None},
            vocab=data.vocab_size,
            positions=data.max_length,
            norm=self.norm,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            std=self.std,
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up and linear decay to 0."""

    lr: float = 1e-3
    """Peak learning rate."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    eps: float = 1e-6
    """Added to the root of the mean of squares."""
    weight_decay: float = 0.01
    """Of matrices; vectors (biases, LayerNorm) have none."""
    clip: float = 1.0
    """Largest norm of the gradient."""


@dataclass(frozen=True, kw_only=True)
class BatchRecipe:
    """How many packs make a step."""

    global_batch: int = 16
    """Packs of one step, over all ranks. The same packs on any cube."""
    packs_per_rank: int | None = None
    """Packs a rank takes at once; accumulation follows. Default: all of its share."""
    balance: bool = True
    """Deal a step's packs to the ranks so that all have equal work; the step has the same packs without it."""
    packing_rule: Literal["none", "sequences", "betas"] = "none"
    """What is done about a pack holding several sequences. "sequences": global_batch counts sequences, and a step takes
    global_batch / packing factor packs; "betas": beta1 and beta2 to the power of the packing factor (for LAMB)."""
    multiple_of: int = 8
    """Packs of a step are rounded to a multiple of this, by the rule "sequences"."""


@dataclass(frozen=True, kw_only=True)
class RunRecipe:
    """How long, and what is kept."""

    steps: int = 300
    """Steps of the optimiser."""
    seed: int = 0
    """Decides weights, packs, masks and dropout."""
    log_every: int = 1
    """Steps between two points in TensorBoard."""
    evaluate_every: int = 100
    """Steps between evaluations on the held-out documents; also at the end. 0: never."""
    checkpoint_every: int = 100
    """Steps between checkpoints; also at the end. 0: never."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole recipe, resolved.

    Raises:
        ValueError: a number out of its range.
    """

    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    batch: BatchRecipe = field(default_factory=BatchRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)

    def __post_init__(self) -> None:
        for section, name, least in _AT_LEAST:
            value = getattr(getattr(self, section), name)
            if value is not None and not value >= least:  # which NaN is not either
                raise ValueError(f"{section}.{name} must be at least {least}. Got {value}.")
        for section, name in (("optimizer", "lr"), ("optimizer", "clip"), ("model", "std")):
            value = getattr(getattr(self, section), name)
            if not 0 < value < math.inf:
                raise ValueError(f"{section}.{name} must be above 0 and finite. Got {value}.")
        for section, name in _SHARES:
            value = getattr(getattr(self, section), name)
            if not 0 <= value < 1:
                raise ValueError(f"{section}.{name} must be at least 0 and below 1. Got {value}.")
        if self.data.max_length > self.data.capacity:
            raise ValueError(
                f"data.max_length={self.data.max_length} is longer than a pack of data.capacity={self.data.capacity}. "
                "Raise the capacity or lower max_length."
            )
        if self.data.shards % self.data.groups or (self.data.packing == "binned" and self.data.groups > 1):
            raise ValueError(
                f"data.groups={self.data.groups} must divide data.shards={self.data.shards}, and be 1 when binned."
            )
        self.model.config(self.data)  # checks the sizes

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_AT_LEAST: tuple[tuple[str, str, float], ...] = (
    ("data", "vocab_size", 6),
    ("data", "capacity", 5),
    ("data", "max_length", 5),
    ("data", "max_sequences", 1),
    ("data", "masked_per_pack", 1),
    ("data", "bin_width", 1),
    ("data", "shards", 1),
    ("data", "groups", 1),
    ("optimizer", "eps", 0),
    ("optimizer", "weight_decay", 0),
    ("batch", "global_batch", 1),
    ("batch", "packs_per_rank", 1),
    ("batch", "multiple_of", 1),
    ("run", "steps", 1),
    ("run", "seed", 0),
    ("run", "log_every", 1),
    ("run", "evaluate_every", 0),
    ("run", "checkpoint_every", 0),
)
_SHARES: tuple[tuple[str, str], ...] = (
    ("data", "held_out"),
    ("data", "short_probability"),
    ("optimizer", "warmup"),
    ("optimizer", "beta1"),
    ("optimizer", "beta2"),
)


def read_recipe(path: Path) -> Recipe:
    """Reads a TOML recipe; what it does not name has its default.

    Raises:
        ValueError: a missing file, invalid TOML, an unknown key, a value of the wrong type or out of range; the message
            names the file and the key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"recipe {path} does not exist. Shipped ones lie in launch/recipes.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"recipe {path} is not valid TOML: {problem}.") from None
    try:
        return _from_table(Recipe, table, "")
    except ValueError as problem:
        raise ValueError(f"recipe {path}: {problem}") from None


def _from_table(kind: type[T], table: Any, where: str) -> T:
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table. Got {table!r}.")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        key = f"{where}.{name}" if where else name
        if name not in known:
            raise ValueError(f"unknown key {key}. Known here: {', '.join(known)}.")
        wanted = hints[name]
        section = isinstance(wanted, type) and is_dataclass(wanted)
        values[name] = _from_table(wanted, value, key) if section else _checked(value, wanted, key)
    return kind(**values)


def _checked(value: Any, wanted: Any, key: str) -> Any:
    """`value`, as float where a whole number stands for one. ValueError where it is not of the type `wanted`."""
    choices = get_args(wanted) if get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    for choice in choices:
        if get_origin(choice) is Literal:
            if value in get_args(choice):
                return value
        elif choice is float and type(value) is int:
            return float(value)
        elif type(value) is choice:
            return value
    names = " or ".join(
        str(get_args(c)) if get_origin(c) is Literal else c.__name__ for c in choices if c is not type(None)
    )
    raise ValueError(f"{key} must be of type {names}. Got {value!r}.")

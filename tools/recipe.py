"""A recipe: everything that decides what a run computes, in one TOML file. The cube is no part of it."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.recipe_sections import (
    BatchRecipe,
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PrecisionRecipe,
    RunRecipe,
    SpeedRecipe,
)
from tools.typed_table import from_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "BatchRecipe",
    "DataRecipe",
    "ModelRecipe",
    "OptimizerRecipe",
    "PrecisionRecipe",
    "Recipe",
    "RunRecipe",
    "SpeedRecipe",
    "read_recipe",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole recipe, resolved.

    Raises:
        ValueError: a number out of its range.
    """

    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    precision: PrecisionRecipe = field(default_factory=PrecisionRecipe)
    speed: SpeedRecipe = field(default_factory=SpeedRecipe)
    batch: BatchRecipe = field(default_factory=BatchRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)

    def __post_init__(self) -> None:
        for section, name, least in _AT_LEAST:
            value = getattr(getattr(self, section), name)
            if value is not None and not value >= least:  # which NaN is not either
                raise ValueError(f"{section}.{name} must be at least {least}. Got {value}.")
            if value == math.inf:
                raise ValueError(f"{section}.{name} must be finite. Got {value}.")
        for section, name in _POSITIVE:
            value = getattr(getattr(self, section), name)
            if not 0 < value < math.inf:
                raise ValueError(f"{section}.{name} must be above 0 and finite. Got {value}.")
        for section, name in _SHARES:
            value = getattr(getattr(self, section), name)
            if not 0 <= value < 1:
                raise ValueError(f"{section}.{name} must be at least 0 and below 1. Got {value}.")
        _check_data(self.data, self.model)
        _check_schedule(self.optimizer)
        _check_evaluations(self)
        self.model.config(self.data)  # checks the sizes

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _check_data(data: DataRecipe, model: ModelRecipe) -> None:
    if data.max_length > data.capacity:
        raise ValueError(
            f"data.max_length={data.max_length} is longer than a pack of data.capacity={data.capacity}. "
            "Raise the capacity or lower max_length."
        )
    if model.encoder == "classic" and model.positions is not None and model.positions < data.max_length:
        raise ValueError(
            f"model.positions={model.positions} has no rows for sequences of data.max_length={data.max_length} tokens. "
            "Raise positions or lower max_length."
        )
    if data.shards % data.groups or (data.packing == "binned" and data.groups > 1):
        raise ValueError(
            f"data.groups={data.groups} must divide data.shards={data.shards}, and be 1 when binned. (On samples, set "
            "data.shards to theirs.)"
        )


def _check_schedule(optimizer: OptimizerRecipe) -> None:
    if optimizer.schedule == "wsd" and optimizer.warmup + optimizer.decay > 1:
        raise ValueError(
            f"optimizer.warmup={optimizer.warmup} and optimizer.decay={optimizer.decay} are more than all steps "
            "together. Lower one."
        )


def _check_evaluations(recipe: Recipe) -> None:
    run = recipe.run
    if run.evaluate_every and run.evaluate_every_samples:
        raise ValueError(
            f"run.evaluate_every={run.evaluate_every} counts steps and run.evaluate_every_samples="
            f"{run.evaluate_every_samples} counts sequences. Set one of them to 0."
        )
    evaluates = (run.evaluate_every or run.evaluate_every_samples) and recipe.data.held_out > 0
    for name in ("target_accuracy", "patience"):
        if getattr(run, name) and not evaluates:
            raise ValueError(
                f"run.{name}={getattr(run, name)} needs evaluations. Set run.evaluate_every or "
                "run.evaluate_every_samples, and data.held_out, above 0."
            )


_AT_LEAST: tuple[tuple[str, str, float], ...] = (
    ("data", "vocab_size", 6),
    ("data", "capacity", 5),
    ("data", "max_length", 5),
    ("data", "max_sequences", 1),
    ("data", "masked_per_pack", 1),
    ("data", "bin_width", 1),
    ("data", "shards", 1),
    ("data", "groups", 1),
    ("optimizer", "weight_decay", 0),
    ("precision", "growth_interval", 1),
    ("batch", "global_batch", 1),
    ("batch", "packs_per_rank", 1),
    ("batch", "multiple_of", 1),
    ("run", "steps", 1),
    ("run", "seed", 0),
    ("run", "log_every", 1),
    ("run", "evaluate_every", 0),
    ("run", "evaluate_every_samples", 0),
    ("run", "patience", 0),
    ("run", "checkpoint_every", 0),
    ("run", "checkpoint_keep", 1),
    ("run", "checkpoint_keep_every", 0),
    ("run", "loss_spike", 0),
    ("run", "peak_tflops", 0),
)
_POSITIVE: tuple[tuple[str, str], ...] = (
    ("optimizer", "lr"),
    ("optimizer", "clip"),
    ("optimizer", "eps"),
    ("optimizer", "power"),
    ("optimizer", "decay"),
    ("model", "std"),
    ("model", "eps"),
    ("precision", "loss_scale"),
    ("run", "hang_after"),
    ("run", "stop_within"),
)
_SHARES: tuple[tuple[str, str], ...] = (
    ("data", "held_out"),
    ("data", "short_probability"),
    ("optimizer", "warmup"),
    ("optimizer", "decay"),
    ("optimizer", "floor"),
    ("optimizer", "beta1"),
    ("optimizer", "beta2"),
    ("run", "target_accuracy"),
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
        return from_table(Recipe, table)
    except ValueError as problem:
        raise ValueError(f"recipe {path}: {problem}") from None

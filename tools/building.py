"""What a recipe says, as the objects of a training run."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from tensor3d import Cube, Precision, Speed
from tensor3d.optim import AdamW, Lamb, LearningRate, LossScaler, decay_groups
from tools.peaks import Compute
from tools.recipe import OptimizerRecipe, PrecisionRecipe, SpeedRecipe

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Computes(Protocol):
    """A recipe of any kind of training."""

    @property
    def precision(self) -> PrecisionRecipe: ...


def precision(recipe: PrecisionRecipe) -> Precision:
    """The types of a cube. fp32 is what the parameters are, so nothing is converted for it."""
    compute, reduce = (None if name == "fp32" else TYPES[name] for name in (recipe.compute, recipe.reduce))
    return Precision(compute=compute, reduce=reduce)


def speed(recipe: SpeedRecipe) -> Speed:
    """How a cube's layers work."""
    return Speed(overlap=recipe.overlap, compile=recipe.compile)


def make_optimizer(model: nn.Module, recipe: OptimizerRecipe, cube: Cube, betas: tuple[float, float]) -> AdamW | Lamb:
    """The recipe's optimiser, without decay of vectors."""
    kind = {"adamw": AdamW, "lamb": Lamb}[recipe.kind]
    groups = decay_groups(model, recipe.weight_decay)
    return kind(groups, cube, lr=recipe.lr, betas=betas, eps=recipe.eps)


def make_scaler(recipe: _Computes, cube: Cube) -> LossScaler | None:
    """Only fp16 needs one: bf16 has the range of fp32."""
    precision = recipe.precision
    if precision.compute != "fp16":
        return None
    return LossScaler(cube, initial=precision.loss_scale, growth_interval=precision.growth_interval)


def learning_rate(recipe: OptimizerRecipe, steps: int) -> LearningRate:
    """By step of a run."""
    return LearningRate(
        kind=recipe.schedule,
        lr=recipe.lr,
        steps=steps,
        warmup_steps=max(1, round(recipe.warmup * steps)),
        power=recipe.power,
        decay=recipe.decay,
        floor=recipe.floor,
    )


def peak_type(recipe: PrecisionRecipe) -> Compute:
    """The type whose peak a step's FLOP/s are compared with."""
    return "tf32" if recipe.compute == "fp32" and recipe.tf32 else recipe.compute

"""What a recipe says, as the objects of a training run."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from models.bert.cost_model.saved_activations import Device
from tensor3d import Cube, Precision, Speed
from tensor3d.attention.backends import Facts, choose
from tensor3d.ops.compiled_regions import Regions
from tensor3d.optim import AdamW, Lamb, LearningRate, LossScaler, decay_groups
from tools.training.config import OptimizerRecipe, PrecisionRecipe, Recipe, SpeedRecipe
from tools.training.peak_flops import Compute

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


# ----------------------------------------------------------------------------------------------------------------------
# Whether the switches of `[speed]` can be had: what a layer would refuse in the first step, told before anything
# starts.


def planned_device(recipe: Recipe) -> Device:
    """What a dry run is for: who states a peak plans for GPUs, also on a machine that has none."""
    return "cuda" if torch.cuda.is_available() or recipe.run.peak_tflops else "cpu"


def check_attention(recipe: Recipe, device: Device, where: str = "") -> None:
    """Raises ValueError where `speed.attention` cannot serve a layer of the recipe's model in training.

    Args:
        device: a GPU that is not here is taken for one that can do all that any can.
        where: said behind the reason, if it is not plain which device that is.
    """
    try:
        for facts in asked_of_attention(recipe, device):
            choose(recipe.speed.attention, facts)
    except ValueError as problem:
        model, rows = recipe.model, ", speed.read_rows_only = true" if recipe.speed.read_rows_only else ""
        raise ValueError(
            f"speed.attention: {problem} The recipe has precision.compute = {recipe.precision.compute!r}, "
            f"model.attention_dropout = {model.attention_dropout:g}, model.window = {model.window}{rows}, and heads of "
            f"{model.config(recipe.data).head_dim} columns.{where}"
        ) from None


def check_compiler(recipe: Recipe, device: Device) -> None:
    """Raises ValueError where `speed.compile` is set and this machine has nothing to compile with for its device. Of a
    GPU that is not here nothing is known."""
    if recipe.speed.compile and (device == "cpu" or torch.cuda.is_available()):
        Regions(True, torch.device(device))


def asked_of_attention(recipe: Recipe, device: Device) -> list[Facts]:
    """What the layers of the recipe's model ask of attention in training: one for each kind of layer.

    Evaluation asks for less: no dropout, no backward pass.
    """
    config = recipe.model.config(recipe.data)
    capability = None
    if device == "cuda" and recipe.speed.attention != "auto" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    kinds = []
    for layer in range(config.layers):
        window, last = config.window_of(layer), layer == config.layers - 1
        # The unused tail of a pack is a sequence too, and may be longer than data.max_length.
        near, chosen = window is not None and window < recipe.data.capacity, last and recipe.speed.read_rows_only
        if (near, chosen) not in kinds:
            kinds.append((near, chosen))
    return [
        Facts(
            device=device,
            dtype=TYPES[recipe.precision.compute],
            head_dim=config.head_dim,
            capability=capability,
            dropout=config.attention_dropout > 0,
            window=near,
            queries=chosen,
        )
        for near, chosen in kinds
    ]

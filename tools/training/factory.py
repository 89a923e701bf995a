"""What a recipe says, as the objects of a training run."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from models.bert.cost_model.memory import Device
from tensor3d import Cube, ExecutionPolicy, Linear3D, MixedPrecisionPolicy
from tensor3d.attention.backends import SUPPORT, AttentionRequest, choose
from tensor3d.attention.flash_version import use_flash_attention
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.optim import AdamW, GradScaler, Lamb, LRSchedule, StableAdamW, decay_groups
from tensor3d.optim.adam import ShardedAdamBase
from tools.training.config import OptimizerConfig, PrecisionConfig, SpeedConfig, TrainConfig
from tools.training.peak_flops import Compute

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Computes(Protocol):
    """A recipe of any kind of training."""

    @property
    def precision(self) -> PrecisionConfig: ...


def precision(recipe: PrecisionConfig) -> MixedPrecisionPolicy:
    """The types of a cube. fp32 is what the parameters are, so nothing is converted for it."""
    compute, reduce = (None if name == "fp32" else TYPES[name] for name in (recipe.compute, recipe.reduce))
    fp8 = None if recipe.fp8 == "off" else recipe.fp8
    return MixedPrecisionPolicy(compute=compute, reduce=reduce, fp8=fp8, fp8_history=recipe.fp8_history)


def fp8_remarks(model: nn.Module, recipe: PrecisionConfig) -> list[str]:
    """How many of a model's linear layers compute in FP8, in words; nothing where none is to."""
    if recipe.fp8 == "off":
        return []
    layers = [module for module in model.modules() if isinstance(module, Linear3D)]
    inside = sum(layer.in_fp8 for layer in layers)
    others = f"; local sides of {len(layers) - inside} do not divide by 16" if inside < len(layers) else ""
    return [f"linear layers in FP8 ({recipe.fp8}): {inside} of {len(layers)}{others}"]


def fp8_cut(cube: Cube, told: int) -> tuple[int, list[str]]:
    """How many matrices delayed scaling has cut something off so far, and in words what is new since `told`. Waits for
    the device."""
    cut = cube.fp8_scales.cut
    if cut <= told:
        return cut, []
    return cut, [f"FP8: something was too large for its scale, and cut off, in {cut - told} more matrices of a pass"]


def set_matmul_precision(recipe: PrecisionConfig, cube: Cube) -> None:
    """Whether the GPU of this process uses TF32 for fp32 products."""
    if cube.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if recipe.tf32 else "highest")


def set_flash_attention(recipe: SpeedConfig, cube: Cube) -> None:
    """Which FlashAttention the GPU of this process attends by. Raises ValueError, on every rank, where the one that is
    asked for does not work on that of any."""
    version = recipe.flash_attention
    if version is not None:
        run_on_all_ranks(cube, lambda: use_flash_attention(version, cube.device))


def set_kernels(recipe: TrainConfig, cube: Cube) -> None:
    """What PyTorch has for a whole process, as the recipe says. Raises ValueError as of `set_flash_attention`."""
    set_matmul_precision(recipe.precision, cube)
    set_flash_attention(recipe.speed, cube)


def speed(recipe: SpeedConfig) -> ExecutionPolicy:
    """How a cube's layers work."""
    return ExecutionPolicy(
        overlap=recipe.overlap,
        compile=recipe.compile,
        weight_group_bytes=recipe.weight_group_bytes,
        keep_buckets=keep_buckets(recipe),
        shadow_weights=recipe.shadow_weights,
        symmetric_memory=recipe.symmetric_memory,
    )


def keep_buckets(recipe: SpeedConfig) -> bool | None:
    """As `ExecutionPolicy` has it."""
    return {"auto": None, "yes": True, "no": False}[recipe.keep_buckets]


def make_optimizer(
    model: nn.Module, recipe: OptimizerConfig, cube: Cube, betas: tuple[float, float]
) -> ShardedAdamBase:
    """The recipe's optimiser, without decay of vectors."""
    kinds: dict[str, type[ShardedAdamBase]] = {"adamw": AdamW, "lamb": Lamb, "stable_adamw": StableAdamW}
    groups = decay_groups(model, recipe.weight_decay)
    return kinds[recipe.kind](
        groups, cube, lr=recipe.lr, betas=betas, eps=recipe.eps, shard_over_data=recipe.shard_over_data
    )


def make_scaler(recipe: _Computes, cube: Cube) -> GradScaler | None:
    """Only fp16 needs one: bf16 has the range of fp32."""
    precision = recipe.precision
    if precision.compute != "fp16":
        return None
    return GradScaler(cube, initial=precision.loss_scale, growth_interval=precision.growth_interval)


def learning_rate(recipe: OptimizerConfig, steps: int) -> LRSchedule:
    """By step of a run."""
    return LRSchedule(
        kind=recipe.schedule,
        lr=recipe.lr,
        steps=steps,
        warmup_steps=max(1, round(recipe.warmup * steps)),
        power=recipe.power,
        decay=recipe.decay,
        decay_shape=recipe.decay_shape,
        floor=recipe.floor,
    )


def peak_type(recipe: PrecisionConfig) -> Compute:
    """The type whose peak a step's FLOP/s are compared with: bf16's also where some products are in FP8."""
    return "tf32" if recipe.compute == "fp32" and recipe.tf32 else recipe.compute


# ----------------------------------------------------------------------------------------------------------------------
# Whether the switches of `[speed]` can be had: what a layer would refuse in the first step, told before anything
# starts.


def planned_device(recipe: TrainConfig) -> Device:
    """What a dry run is for: who states a peak plans for GPUs, also on a machine that has none."""
    return "cuda" if torch.cuda.is_available() or recipe.run.peak_tflops else "cpu"


def check_attention(recipe: TrainConfig, device: Device, where: str = "") -> None:
    """Raises ValueError where `speed.attention` cannot serve a layer of the recipe's model in training, or would not be
    by `speed.flash_attention`, if that is set.

    Args:
        device: a GPU that is not here is taken for one that can do all that any can.
        where: said behind the reason, if it is not plain which device that is.
    """
    flash, setting = recipe.speed.flash_attention, "speed.attention"
    try:
        for facts in asked_of_attention(recipe, device):
            name = choose(recipe.speed.attention, facts)
            if flash is not None and name != "varlen":
                setting, refusals = "speed.flash_attention", SUPPORT["varlen"].refusals(facts)
                why = f"which {'; it '.join(refusals)}" if refusals else f"and speed.attention is {name!r}"
                raise ValueError(f"{flash} is for attention that is 'varlen', {why}. Leave it out, or change that.")
    except ValueError as problem:
        model, rows = recipe.model, ", speed.read_rows_only = true" if recipe.speed.read_rows_only else ""
        raise ValueError(
            f"{setting}: {problem} The recipe has precision.compute = {recipe.precision.compute!r}, "
            f"model.attention_dropout = {model.attention_dropout:g}, model.window = {model.window}{rows}, and heads of "
            f"{model.config(recipe.data).head_size} columns.{where}"
        ) from None


def check_compiler(recipe: TrainConfig, device: Device) -> None:
    """Raises ValueError where `speed.compile` is set and this machine has nothing to compile with for its device. Of a
    GPU that is not here nothing is known."""
    if recipe.speed.compile and (device == "cpu" or torch.cuda.is_available()):
        CompiledRegions(True, torch.device(device))


def check_graph(recipe: TrainConfig, ranks: int, device: Device, where: str = "") -> None:
    """Raises ValueError where `speed.cuda_graph` is set and a pass cannot be captured. Arguments as above."""
    if not recipe.speed.cuda_graph:
        return
    if ranks > 1 or device != "cuda":
        raise ValueError(f"speed.cuda_graph is for one GPU. Got {ranks} ranks on {device}. Leave it out.{where}")
    if recipe.model.recompute != "none":
        raise ValueError(
            "speed.cuda_graph and model.recompute exclude each other: computing again reads the state of random "
            f"numbers, which a graph cannot. Got model.recompute = {recipe.model.recompute!r}. Set one of them aside."
        )
    if recipe.speed.shadow_weights:
        raise ValueError(
            "speed.cuda_graph and speed.shadow_weights exclude each other: a graph converts weights in each replay, "
            "and copies would be held for nothing. Set one of them to false."
        )
    if recipe.precision.fp8 == "delayed":
        raise ValueError(
            "speed.cuda_graph and precision.fp8 = 'delayed' exclude each other: a graph would keep the scales of the "
            "pass that was captured. Take 'tensorwise', or leave the graph out."
        )
    if recipe.data.packing == "binned":
        raise ValueError(
            "speed.cuda_graph needs the same slots in every micro-batch, and with data.packing = 'binned' each bin has "
            "its own. Take another packing, or leave the graph out."
        )
    if recipe.speed.read_rows_only:
        raise ValueError(
            "speed.cuda_graph needs the same shapes in every micro-batch, and with speed.read_rows_only the last layer "
            "has others in each. Set one of them to false."
        )
    for facts in asked_of_attention(recipe, device):
        if (name := choose(recipe.speed.attention, facts)) != "varlen":
            raise ValueError(
                f"speed.cuda_graph needs attention that is varlen, which knows sequences by a tensor alone. Got "
                f"{name!r} for precision.compute = {recipe.precision.compute!r} and heads of {facts.head_dim} columns."
            )


def asked_of_attention(recipe: TrainConfig, device: Device) -> list[AttentionRequest]:
    """What the layers of the recipe's model ask of attention in training: one for each kind of layer.

    Evaluation asks for less: no dropout, no backward pass.
    """
    configs = [each for each in (recipe.model.config(recipe.data), recipe.generator) if each is not None]
    capability = None
    if device == "cuda" and recipe.speed.attention != "auto" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    kinds = []
    for config in configs:
        for layer in range(config.layers):
            window, last = config.window_of(layer), layer == config.layers - 1
            # The unused tail of a pack is a sequence too, and may be longer than data.max_length. Of a backend that is
            # named, no rank asks how long its sequences are.
            named = recipe.speed.attention != "auto"
            near = window is not None and (named or window < recipe.data.capacity)
            chosen = last and recipe.speed.read_rows_only
            kind = (near, chosen, config.head_size)
            if kind not in kinds:
                kinds.append(kind)
    return [
        AttentionRequest(
            device=device,
            dtype=TYPES[recipe.precision.compute],
            head_dim=head_dim,
            capability=capability,
            dropout=configs[0].attention_dropout > 0,
            window=near,
            queries=chosen,
            relative=configs[0].has_relative_positions,
            flash=recipe.speed.flash_attention,
        )
        for near, chosen, head_dim in kinds
    ]

"""What a run will be made of, known from its recipe, its cube and a few figures of its corpus, without any process."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from models.bert import BertConfig
from models.bert.cost_model.comm_volume import (
    STEP_NUMBERS,
    micro_batch_traffic,
    read_slots,
    scaled_weights,
    step_traffic,
)
from models.bert.cost_model.electra import electra_flops, electra_parameters
from models.bert.cost_model.flops import model_flops
from models.bert.cost_model.kept_operands import keepable_bytes, kept_products
from models.bert.cost_model.memory import Device, MicroBatchShape
from models.bert.cost_model.param_shapes import held, parameters
from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.cost_model.hardware import GPUS, cluster_of
from tensor3d.cost_model.step_cost import StepOptions
from tensor3d.cost_model.step_time import step_time
from tensor3d.data.dataset import default_masked_per_pack
from tensor3d.data.masking import masked_count, masked_counts
from tensor3d.data.packed_batch import check_rows, fit_packs_per_rank
from tensor3d.data.segments import SPECIAL_TOKENS, SPECIAL_TOKENS_OF_SINGLE
from tensor3d.ops.products import product
from tensor3d.packing import attended, lpfhp, packs_per_step
from tools.common.units import in_bytes, in_time
from tools.corpus.training_corpus import CorpusFacts
from tools.training.config import DataConfig, PrecisionConfig, RunConfig, SpeedConfig, TrainConfig
from tools.training.data import ramp
from tools.training.dry_step import StepMemory, counted_memory, counted_traffic
from tools.training.factory import TYPES, keep_buckets, planned_device
from tools.training.idle_settings import idle_settings
from tools.training.metrics import table
from tools.training.peak_flops import peak

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FILL = 0.99  # of packs, by a planner; the shipped recipes reach more
_DRAWN = 1_000_000  # sequences that are packed for that


@dataclass(frozen=True, kw_only=True)
class PackStats:
    """What packs are expected to hold. Estimated: packing tells it exactly."""

    mean_length: float
    """Tokens of a sequence."""
    packing_factor: float
    """Sequences of a pack."""
    fill: float
    """Share of a pack's slots that hold a token."""


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Of one step, where nothing else is said."""

    config: BertConfig
    parameters: int
    """Of the logical model."""
    contents: PackStats
    packs: int
    packs_per_rank: int
    """k: of a micro-batch, on each face-y row slice."""
    micro_batches: int
    load: MicroBatchShape
    """What a micro-batch gives rank 0."""
    surely_divides: bool
    """False where only packing can tell how many packs a step has, and whether the cube divides them."""
    tokens: int
    """In sequences."""
    sequences: int
    flops: int
    """Of the model, without what is computed again."""
    hardware_flops: int
    """With it."""
    traffic: Bytes
    """Bytes that rank 0 receives."""
    whole_steps: float
    """Steps of this size that have as many packs as the run: fewer than its steps, where its batch rises."""


def expect(recipe: TrainConfig, shape: CubeShape, corpus: CorpusFacts | None = None) -> RunEstimate:
    """Raises ValueError where the recipe's sizes or its batch do not divide on the cube, as the run would."""
    config, data, generator = recipe.model.config(recipe.data), recipe.data, recipe.generator
    config.check(shape)
    if (replaced := recipe.replaced_tokens) is not None:
        replaced.check(config, shape)
    contents = expected_contents(data, corpus)
    packs, surely = _packs(recipe, shape, contents)
    rise = ramp(recipe.batch)
    k = fit_packs_per_rank(rise.unit(packs), shape, recipe.batch.packs_per_rank)
    check_rows(shape, k, data.capacity)
    micro_batches = packs // (shape.planes * shape.z * k)
    wire = CommModel(
        shape=shape,
        compute=_BYTES[recipe.precision.compute],
        gradient=_BYTES[recipe.precision.reduce],
        parameter=4,
        weight_group_bytes=recipe.speed.weight_group_bytes,
    )
    load, tokens = _load(data, shape, k), round(packs * data.capacity * contents.fill)
    squares = tokens * data.max_length
    planned = parameters(config) if generator is None else electra_parameters(config, generator)
    near = tokens * int(attended(data.max_length, config.window)) // data.max_length
    sequences = round(packs * contents.packing_factor)
    masked = round(data.masking(recipe.run.steps).mean * tokens)
    counted: Callable[..., int] = partial(
        model_flops, config, masked=masked, sequences=sequences, read_rows_only=recipe.speed.read_rows_only
    )
    if generator is not None:
        counted = partial(_electra_flops, config, generator, masked)
    flops = counted(tokens=tokens, squares=squares, near=near)
    return RunEstimate(
        config=config,
        parameters=sum(parameter.elements for parameter in planned),
        contents=contents,
        packs=packs,
        packs_per_rank=k,
        micro_batches=micro_batches,
        load=load,
        surely_divides=surely,
        tokens=tokens,
        sequences=sequences,
        flops=flops,
        hardware_flops=flops + _again(recipe, counted, tokens, squares, near),
        traffic=_expected_traffic(recipe, config, wire, load, micro_batches, _read_slots(data, wire, k)),
        whole_steps=rise.before(recipe.run.steps, packs) / packs,
    )


def _electra_flops(config: BertConfig, generator: BertConfig, masked: int, tokens: int, squares: int, near: int) -> int:
    return electra_flops(config, generator, tokens, squares, masked)  # no layer has a window


def expected_memory(recipe: TrainConfig, shape: CubeShape, expected: RunEstimate, device: Device) -> StepMemory:
    """Of rank 0, which has the largest blocks; counted in dry steps of few layers.

    What is kept and the peak are those of attention that serves sequence by sequence, with all
    rows in the last layer: an upper bound with `speed.read_rows_only`, far too low with `attention = "reference"`.
    """
    return counted_memory(
        expected.config,
        shape,
        expected.load,
        micro_batches=expected.micro_batches,
        types=recipe.precision,
        optimizer=recipe.optimizer.kind,
        shard_over_data=recipe.optimizer.shard_over_data,
        recompute=recipe.model.recompute,
        reshard_after_forward=recipe.model.reshard_after_forward,
        keep_budget=recipe.model.keep_bytes,
        replaced=recipe.replaced_tokens,
        device=device,
        wire_buffers=device == "cpu",  # which gloo connects
        keep_buckets=keep_buckets(recipe.speed),
        weight_group_bytes=recipe.speed.weight_group_bytes,
        shadow_weights=recipe.speed.shadow_weights,
        compile=recipe.speed.compile,
    )


def expected_contents(data: DataConfig, corpus: CorpusFacts | None) -> PackStats:
    """From the recipe's lengths, and from those of the corpus if there is one."""
    if corpus is not None:
        mean = corpus.mean_length(data.max_length, data.short_probability, single=data.single)
    else:
        special = SPECIAL_TOKENS_OF_SINGLE if data.single else SPECIAL_TOKENS
        mean = (data.max_length - special) * (1 - data.short_probability / 2) + special
    if data.packing in ("padded", "binned"):
        return PackStats(mean_length=mean, packing_factor=1.0, fill=mean / data.capacity)
    factor = max(1.0, min(_FILL * data.capacity / mean, _packed(data, mean)))
    return PackStats(mean_length=mean, packing_factor=factor, fill=min(1.0, factor * mean / data.capacity))


def _packed(data: DataConfig, mean: float) -> float:
    """Sequences of a pack, packed within the recipe's limits: as many as give the mean are of the longest length, and
    the others of all lengths alike, as `short_probability` draws them. So packs in which two of the longest have no
    room are not taken for full."""
    longest = data.max_length if 2 * mean > data.max_length else max(1, round(2 * mean))
    share = min(1.0, max(0.0, 2 * mean / longest - 1))
    histogram = np.full(longest + 1, round((1 - share) * _DRAWN / longest))
    histogram[0], histogram[-1] = 0, histogram[-1] + round(share * _DRAWN)
    costs = masked_counts(np.arange(data.capacity + 1), data.masking(1).most)
    budget = max(_budgets(data)[0], int(costs[longest]))  # less than that training refuses
    plan = lpfhp(histogram, data.capacity, data.max_sequences, budget=budget, costs=costs)
    return float(histogram.sum() / plan.packs)


def _packs(recipe: TrainConfig, shape: CubeShape, contents: PackStats) -> tuple[int, bool]:
    """Packs of a step, and whether their number is sure to divide on the cube."""
    batch = recipe.batch
    if batch.packing_rule != "sequences":
        return batch.global_batch, True
    unit = shape.planes * shape.z * (batch.packs_per_rank or 1)
    unit *= batch.ramp_stages
    packs = packs_per_step(batch.global_batch, contents.packing_factor, batch.multiple_of)
    return max(unit, round(packs / unit) * unit), batch.multiple_of % unit == 0


def _expected_traffic(
    recipe: TrainConfig, config: BertConfig, wire: CommModel, load: MicroBatchShape, micro_batches: int, slots: int
) -> Bytes:
    """Of a step of any number of micro-batches, all of which receive the same: in closed form, and of an ELECTRA, for
    which there is none, counted in dry steps."""
    if recipe.replaced_tokens is not None:
        return counted_traffic(
            config,
            wire.shape,
            load,
            micro_batches=micro_batches,
            types=recipe.precision,
            optimizer=recipe.optimizer.kind,
            shard_over_data=recipe.optimizer.shard_over_data,
            recompute=recipe.model.recompute,
            reshard_after_forward=recipe.model.reshard_after_forward,
            keep_budget=recipe.model.keep_bytes,
            replaced=recipe.replaced_tokens,
        )
    read = slots if recipe.speed.read_rows_only else None
    rows, of_backward = (load.rows, load.masked, load.first), recipe.model
    made: dict[str, Any] = {
        "reshard_after_forward": of_backward.reshard_after_forward,
        "keep_budget": of_backward.keep_bytes,
        "recompute": of_backward.recompute,
        "read": read,
        "reduce_loss": False,
    }
    total = step_traffic(
        config,
        wire,
        *rows,
        norm=STEP_NUMBERS,
        summed=held(config, wire.shape).summed(recipe.optimizer.kind),
        scaled=scaled_weights(config, wire.shape, None if recipe.precision.fp8 == "off" else recipe.precision.fp8),
        shard_over_data=recipe.optimizer.shard_over_data,
        **made,
    )
    further = micro_batch_traffic(config, wire, *rows, **made)
    for key, count in further.items():
        total[key] += (micro_batches - 1) * count
    return total


def _budgets(data: DataConfig) -> tuple[int, int]:
    """Tokens to guess and sequences of a pack, at most."""
    most = 1 if data.packing in ("padded", "binned") else data.max_sequences
    masked, share = data.masked_per_pack, data.masking(1).most
    if masked is None:
        masked = max(default_masked_per_pack(data.capacity, most, share), masked_count(data.max_length, share))
    return masked, most


def _read_slots(data: DataConfig, wire: CommModel, k: int) -> int:
    return read_slots(k * wire.size("z"), sum(_budgets(data)), wire)


def _load(data: DataConfig, shape: CubeShape, k: int) -> MicroBatchShape:
    """A micro-batch whose packs are full of the longest sequences: attention has the most to keep then."""
    packs, multiple = k * shape.z, math.lcm(shape.y, shape.z)
    masked, most = _budgets(data)
    whole, tail = divmod(data.capacity, data.max_length)
    return MicroBatchShape(
        rows=packs * data.capacity,
        masked=-(-packs * masked // multiple) * multiple,
        first=-(-packs * most // multiple) * multiple,
        lengths=tuple([data.max_length] * whole + ([tail] if tail else [])) * k,
    )


def _again(recipe: TrainConfig, counted: Callable[..., int], tokens: int, squares: int, near: int) -> int:
    """FLOPs of what the backward pass computes again: a forward pass, a third of both passes, of a part.

    Args:
        counted: FLOPs of model and heads, by tokens, squares of lengths and pairs in windows.
    """
    if recipe.model.recompute == "none":
        return 0
    kept = 0 if recipe.model.recompute == "layer" else tokens  # the heads; or all but attention
    return (counted(tokens=tokens, squares=squares, near=near) - counted(tokens=kept, squares=0, near=0)) // 3


def costs_of(
    recipe: TrainConfig, shape: CubeShape, expected: RunEstimate, device: Device
) -> tuple[BertCosts, StepOptions]:
    """The recipe's step as the planner asks for it, in packs of the longest sequences. Not of an ELECTRA."""
    packs_of_a_plane = expected.packs // (shape.planes * expected.micro_batches)
    costs = BertCosts(
        config=expected.config,
        batch=Batch(
            packs=expected.packs,
            capacity=recipe.data.capacity,
            length=min(recipe.data.max_length, recipe.data.capacity),
            masked_per_pack=max(1, expected.load.masked // packs_of_a_plane),
        ),
        compute=recipe.precision.compute,
        reduce=recipe.precision.reduce,
        fp8=None if recipe.precision.fp8 == "off" else recipe.precision.fp8,
        fp8_history=recipe.precision.fp8_history,
        optimizer=recipe.optimizer.kind,
        shard_over_data=recipe.optimizer.shard_over_data,
        shadow_weights=recipe.speed.shadow_weights,
        compile=recipe.speed.compile,
        device=device,
    )
    choice = StepOptions(
        micro_batches=expected.micro_batches,
        recompute=recipe.model.recompute,
        reshard_after_forward=recipe.model.reshard_after_forward,
        keep_budget=recipe.model.keep_bytes,
    )
    return costs, choice


# --- How fast a device can be expected to train, before it has trained anything ---------------------------------------

SHARE_OF_PEAK = 0.4
"""Of a GPU's peak. NVIDIA's BERT-large reaches 0.44 at length 128 on A100s (4,591 sequences/s on eight of them), larger
models more; a model split over slow wires reaches less."""
SHARE_OF_MEASURED = 0.5
"""Of a measured product's speed on a CPU: the quickstart reaches it on one process."""
_SIDE = 1024  # rows and columns of the measured product
_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What is assumed of the machine."""

    flops: float
    """FLOP/s expected of all ranks together, of eager steps without FP8 and shadow weights."""
    words: str
    """Where that comes from."""
    peak: float | None = None
    """Of one GPU, in the type of products; None: of a CPU."""


def expected_speed(run: RunConfig, precision: PrecisionConfig, ranks: int) -> Throughput:
    """From the recipe's peak, else from the GPU's known one, else from a product measured on this machine.

    The measured one is that of the whole machine, which its ranks share: it holds for a run on this machine alone.
    """
    compute = precision.compute
    if run.peak_tflops:
        source, top = "run.peak_tflops", run.peak_tflops * 1e12
    else:
        found = _known_peak(precision)
        source, top = f"this machine's {found[0]}" if found else "", found[1] if found else 0.0
    if top:
        words = f"{SHARE_OF_PEAK:.0%} of {top / 1e12:,.1f} TFLOP/s in {compute} ({source}) on each of {ranks} ranks"
        return Throughput(flops=SHARE_OF_PEAK * top * ranks, words=f"assumed: {words}", peak=top)
    measured = measured_flops(TYPES[compute])
    words = f"{SHARE_OF_MEASURED:.0%} of {measured / 1e9:,.0f} GFLOP/s, measured for a product in {compute}"
    return Throughput(
        flops=SHARE_OF_MEASURED * measured, words=f"assumed: {words} on this machine, for all ranks together"
    )


@dataclass(frozen=True, kw_only=True)
class TimeAsMade:
    """Of a step with the recipe's FP8, shadow weights and compiled regions."""

    ratio: float
    """Over the time without any of them."""
    words: str
    """What the recipe has of them, and the GPU for which it is planned."""


def time_as_made(recipe: TrainConfig, shape: CubeShape, expected: RunEstimate, speed: Throughput) -> TimeAsMade | None:
    """By the planner's formulas of computing, of the GPU among its presets whose peak is the nearest.

    None: the recipe has none of them, or is for CPUs; or the planner has no costs of its model, or no peak of FP8.
    """
    precision, switches = recipe.precision, recipe.speed
    parts = {
        f"FP8 ({precision.fp8})": precision.fp8 != "off",
        "shadow weights": switches.shadow_weights,
        "compiled regions": switches.compile,
    }
    if speed.peak is None or not any(parts.values()) or recipe.replaced_tokens is not None:
        return None
    near, compute = speed.peak, precision.compute
    known = [each for each in GPUS.values() if compute in each.flops]
    found = min(known, key=lambda each: abs(each.flops[compute] - near))
    if precision.fp8 != "off" and "fp8" not in found.flops:
        return None
    costs, choice = costs_of(recipe, shape, expected, "cuda")
    plain = replace(costs, fp8=None, shadow_weights=False, compile=False)
    cluster = cluster_of(found.name, per_node=shape.ranks)
    made, eager = (step_time(each.cost(shape, choice), cluster, compute) for each in (costs, plain))
    words = ", ".join(name for name, there in parts.items() if there)
    return TimeAsMade(ratio=made.computing / eager.computing, words=f"{words}, planned for {found.name}")


def measured_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a square product on this machine's CPU, the fastest of some: the machine may have other work."""
    side = _SIDE // 4 if dtype == torch.float16 else _SIDE  # fp16 is very slow on CPUs
    a = torch.randn(side, side).to(dtype)
    product(a, a)  # the first one sets up threads
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while (begin := time.perf_counter()) < end:
        product(a, a)
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best


def _known_peak(precision: PrecisionConfig) -> tuple[str, float] | None:
    if not torch.cuda.is_available():
        return None
    tensor_cores = precision.compute == "fp32" and precision.tf32
    found = peak(torch.device("cuda"), "tf32" if tensor_cores else precision.compute)
    return None if found is None else (torch.cuda.get_device_name(), found)


# --- The dry run: sizes, memory, traffic and the time to expect, before anything starts -------------------------------

Rows = list[tuple[str, str]]


def report(recipe: TrainConfig, shape: CubeShape, corpus_info: CorpusFacts | None = None) -> str:
    """Of a run of `recipe` on a cube, as text. One process makes it; nothing is started, read or written.

    Args:
        corpus_info: of the prepared corpus, if it is there: without one the lengths of sequences are guessed from the
            recipe alone.

    Raises:
        ValueError: sizes or a batch that do not divide, as the run would refuse them.
    """
    device = planned_device(recipe)
    expected = expect(recipe, shape, corpus_info)
    speed = expected_speed(recipe.run, recipe.precision, shape.ranks)
    made = time_as_made(recipe, shape, expected, speed)
    parts = {
        "model and cube": _model(recipe, shape, expected),
        "a step": _step(recipe, expected),
        "memory of rank 0, the fullest": _memory(recipe, shape, expected, device),
        "received by rank 0 in a step": _traffic_rows(expected),
        "the run": _run(recipe, corpus_info, expected, speed, made),
    }
    lines = ["dry run: nothing was started"]
    for title, rows in parts.items():
        lines += ["", f"{title}:", *table(rows)]
    return "\n".join([*lines, "", *_remarks(recipe, shape, corpus_info, expected, device, made)])


def _model(recipe: TrainConfig, shape: CubeShape, expected: RunEstimate) -> Rows:
    config = expected.config
    return [
        ("parameters", f"{expected.parameters:,} ({expected.parameters / 1e6:,.1f} M)"),
        (
            "sizes",
            f"{config.layers} layers, hidden {config.hidden}, inner {config.inner_size}, {config.heads} heads, "
            f"vocabulary {config.vocab:,}" + ("" if config.has_rotary else f", positions {config.positions}"),
        ),
        ("encoder", _encoder(config)),
        *([] if (generator := recipe.generator) is None else [("generator", _generator(generator))]),
        ("objective", _objective(recipe)),
        ("cube", f"{shape} = {shape.ranks} ranks"),
        ("types", _types(recipe.precision)),
    ]


def _types(precision: PrecisionConfig) -> str:
    fp8 = "" if precision.fp8 == "off" else f", linear layers in FP8 ({precision.fp8})"
    return f"compute {precision.compute}{fp8}, sums of gradients {precision.reduce}, weights fp32"


def _objective(recipe: TrainConfig) -> str:
    masking = recipe.data.masking(recipe.run.steps)
    share = f"{masking.share:.3g}" + ("" if masking.end_share is None else f" to {masking.end_share:.3g}")
    told = "" if recipe.data.single else "; next sentences"
    if (replaced := recipe.replaced_tokens) is not None:
        told = f"; of all tokens, whether they are replaced, times {replaced.weight:g}"
    return f"{share} of the tokens, masked{told}"


def _generator(config: BertConfig) -> str:
    return f"{config.layers} layers, hidden {config.hidden}, inner {config.inner_size}, {config.heads} heads"


def _encoder(config: BertConfig) -> str:
    if config.encoder == "classic":
        positions = "rotary positions" if config.has_rotary else "position table"
        if config.distance_buckets is not None:
            positions = "distances of queries and keys"
        if config.conv_kernel is not None:
            positions += f", a convolution of {config.conv_kernel} tokens beside the first layer"
        mlp = f"a gate of {config.activation.upper()}" if config.has_gate else "GELU"
        return f"classic: {positions}, {mlp}, LayerNorm {'after' if config.norm == 'post' else 'before'} each block"
    traits, gate = config.traits, {"silu": "SwiGLU", "gelu_tanh": "GeGLU by tanh"}.get(config.activation, "GeGLU")
    norm = f"{'RMSNorm' if traits.rms_norm else 'LayerNorm'} before{' and after' * traits.out_norms} each block"
    more = ", and of queries and keys" if traits.qk_norm else ""
    told = f"modern: rotary positions, {gate}, {norm}{more}, no bias"
    if not config.local_layers:
        return told
    return f"{told}; {config.local_layers} of {config.layers} layers see less than {config.window} tokens far"


def _step(recipe: TrainConfig, expected: RunEstimate) -> Rows:
    contents, micro = expected.contents, expected.micro_batches
    return [
        (
            "packs",
            f"{expected.packs:,} of {recipe.data.capacity} slots: {micro:,} micro-batch{'es' if micro > 1 else ''} of "
            f"{expected.packs // micro:,}, {expected.packs_per_rank} on a rank",
        ),
        (
            "sequences",
            f"about {expected.sequences:,} of {contents.mean_length:.0f} tokens: {contents.packing_factor:.2f} a pack",
        ),
        ("tokens", f"about {expected.tokens:,}, {contents.fill:.1%} of the slots"),
        ("model FLOPs", f"about {_counted(expected.flops)}, {_counted(expected.flops / expected.tokens)} a token"),
    ]


def _memory(recipe: TrainConfig, shape: CubeShape, expected: RunEstimate, device: Device) -> Rows:
    memory = expected_memory(recipe, shape, expected, device)
    before = "embeddings" if recipe.generator is None else "embeddings and generator"
    rows = [
        ("counted as on a", "GPU" if device == "cuda" else "CPU"),
        ("weights", in_bytes(memory.weights)),
        *([("their copies", f"{in_bytes(memory.shadows)} (speed.shadow_weights)")] if memory.shadows else []),
        *([("scales", f"{in_bytes(memory.scales)} (histories of precision.fp8)")] if memory.scales else []),
        ("gradients", in_bytes(memory.gradients)),
        (f"optimiser ({recipe.optimizer.kind})", in_bytes(memory.optimizer)),
    ]
    if recipe.speed.attention == "reference":
        return [*rows, ("kept for backward", "not told, of a backend that keeps all pairs of a rank's rows")]
    rows += [
        (
            "kept for backward",
            f"{in_bytes(memory.saved)}: {before} {in_bytes(memory.embeddings)}, {expected.config.layers} layers "
            f"{in_bytes(memory.layers)}, heads {in_bytes(memory.heads)}",
        ),
        *_kept(recipe, shape, expected),
        ("most at once", in_bytes(memory.peak)),
    ]
    what, available = _available(shape.ranks)
    if available:
        fits = "fits" if memory.peak < 0.9 * available else "hardly fits" if memory.peak < available else "does not fit"
        rows.append(("there is", f"{in_bytes(available)} {what}: {fits} here"))
    return rows


def _kept(recipe: TrainConfig, shape: CubeShape, expected: RunEstimate) -> Rows:
    """What the budget is spent on; there is no closed form of an ELECTRA's two models."""
    budget, model = recipe.model.keep_bytes, recipe.model
    if not budget or recipe.replaced_tokens is not None:
        return []
    element = _BYTES[recipe.precision.compute]
    kept = kept_products(
        expected.config,
        shape,
        expected.load.rows,
        element,
        budget=budget,
        recompute=model.recompute,
        weight_group_bytes=recipe.speed.weight_group_bytes,
    )
    whole = keepable_bytes(expected.config, shape, expected.load.rows, element, model.recompute)
    return [
        ("of it gathered operands", f"at most {in_bytes(kept.held_bytes)} of {in_bytes(whole)} (model.keep_budget)")
    ]


def _traffic_rows(expected: RunEstimate) -> Rows:
    by_axis: Counter[str] = Counter()
    for (axis, _), count in expected.traffic.items():
        by_axis[axis] += count
    rows = [(f"over {axis}", in_bytes(count)) for axis, count in by_axis.items() if count]
    return [*rows, ("together", in_bytes(sum(by_axis.values())))] if rows else [("nothing", "one rank, no wire")]


def _run(
    recipe: TrainConfig,
    corpus: CorpusFacts | None,
    expected: RunEstimate,
    speed: Throughput,
    made: TimeAsMade | None,
) -> Rows:
    steps, run = recipe.run.steps, recipe.run
    seconds = expected.hardware_flops / speed.flops
    seconds *= 1.0 if made is None else made.ratio
    tokens = round(expected.whole_steps * expected.tokens)
    sequences = round(expected.whole_steps * expected.sequences)
    epochs = f", {tokens / corpus.train_tokens:,.2f} times the corpus" if corpus is not None else ""
    rows = [
        ("steps", f"{steps:,}, {sequences:,} sequences, {_counted(tokens)} tokens{epochs}"),
        *([("batch rises", _rise(recipe, expected))] if recipe.batch.ramp_stages > 1 else []),
        ("time of a step", f"about {in_time(seconds)} of computing"),
        ("time of all steps", f"about {in_time(seconds * expected.whole_steps)}"),
        ("speed", speed.words),
        *([] if made is None else [("of it", f"{made.ratio:.2f} of the time of eager steps, for {made.words}")]),
    ]
    if run.checkpoint_every:
        size = 12 * expected.parameters
        kept = f"the newest {run.checkpoint_keep} are kept"
        kept += f", and every {run.checkpoint_keep_every:,}th step's" if run.checkpoint_keep_every else ""
        rows.append(("checkpoints", f"{in_bytes(size)} each, every {run.checkpoint_every:,} steps; {kept}"))
    return rows


def _rise(recipe: TrainConfig, expected: RunEstimate) -> str:
    batch = recipe.batch
    least = expected.packs // batch.ramp_stages
    return f"from {least:,} packs by {least:,} to {expected.packs:,} in the first {batch.ramp_steps:,} steps"


def _remarks(
    recipe: TrainConfig,
    shape: CubeShape,
    corpus: CorpusFacts | None,
    expected: RunEstimate,
    device: Device,
    made: TimeAsMade | None,
) -> list[str]:
    """What the figures are worth, and which settings have no part in them."""
    remarks = [
        *idle_settings(recipe),
        *_worth_of_memory(recipe.speed, shape, device),
        "Left out of the time: evaluations, checkpoints, and what computing does not hide of the wire.",
    ]
    if recipe.precision.fp8 != "off":
        time_of = "" if made is not None else " The time is that of products in bf16."
        remarks.append(f"FP8 keeps nothing more for backward.{time_of}")
    if corpus is None:
        remarks.append(
            "Guessed from the recipe: lengths of sequences, and what follows from them. No corpus is prepared."
        )
    else:
        remarks.append("Estimated from the corpus' mean lengths: how packs are filled. Packing tells it exactly.")
    if not expected.surely_divides:
        unit = shape.planes * shape.z * (recipe.batch.packs_per_rank or 1)
        remarks.append(
            f"Unknown until packing: whether a step's packs divide. They surely do with batch.multiple_of = {unit}."
        )
    return remarks


def _worth_of_memory(speed: SpeedConfig, shape: CubeShape, device: Device) -> list[str]:
    exact = "Exact: sizes, weights, gradients, optimiser, traffic"
    kept = "what is kept for packs of the longest sequences"
    if speed.attention == "reference":
        return [
            f"{exact}.",
            'Not told: memory beyond that. attention = "reference" keeps all pairs of rows, and its time is longer.',
        ]
    if speed.read_rows_only:
        remarks = [f"{exact}.", f"An upper bound: {kept}, as if the last layer computed all rows."]
    elif device == "cuda":
        remarks = [f"{exact}.", f"Nearly: {kept}; it is checked to the byte on CPUs."]
    else:
        remarks = [f"{exact}, and {kept}."]
    if shape.x == 1:
        within = "At most a few % more" if speed.read_rows_only else "Within a few %"
        beside = "without what allocator and communication library take beside it"
        return [*remarks, f"{within}: what comes and goes, {beside}."]
    ahead = "weights gathered ahead and " if speed.overlap else ""
    return [
        *remarks,
        f"Rather low: what comes and goes, without {ahead}what allocator and communication library take.",
        "In small models on cubes long in x the most at once was measured 15 to 40 % higher.",
    ]


def _available(ranks: int) -> tuple[str, int]:
    """What this machine has for one rank: what it is, and bytes. 0 where the system does not tell."""
    if torch.cuda.is_available():
        return "on this machine's GPU", torch.cuda.get_device_properties(0).total_memory
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return "", 0
    return f"for each of {ranks} rank{'s' if ranks > 1 else ''} on this machine alone", memory // ranks


def _counted(number: float) -> str:
    """3.1e12 as "3.10 * 10^12"."""
    power = 0
    while number >= 1000:
        number, power = number / 1000, power + 3
    return f"{number:.3g} * 10^{power}" if power else f"{number:.3g}"

"""What a run will be made of, known from its recipe, its cube and a few figures of its corpus, without any process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from models.bert import BertConfig
from models.bert.flops import model_flops
from models.bert.inventory import parameters
from models.bert.memory import StepMemory, step_memory
from models.bert.saved import Device, Load
from models.bert.traffic import micro_batch_traffic, read_slots, step_traffic
from tensor3d import CubeShape
from tensor3d.data.layout import check_rows, fit_packs_per_rank
from tensor3d.data.masking import MASKED_SHARE, masked_count
from tensor3d.data.pretraining import default_masked_per_pack
from tensor3d.packing import attended, packs_per_step
from tensor3d.planning.traffic import Bytes, Wire
from tools.corpus.training import CorpusFacts
from tools.recipe import DataRecipe, Recipe

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SPECIAL = 3  # [CLS] and two [SEP] in a pair
_FILL = 0.99  # of packs, by a planner; the shipped recipes reach more


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What packs are expected to hold. Estimated: packing tells it exactly."""

    mean_length: float
    """Tokens of a sequence."""
    packing_factor: float
    """Sequences of a pack."""
    fill: float
    """Share of a pack's slots that hold a token."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Of one step, where nothing else is said."""

    config: BertConfig
    parameters: int
    """Of the logical model."""
    contents: Contents
    packs: int
    packs_per_rank: int
    """k: of a micro-batch, on each face-y row slice."""
    micro_batches: int
    load: Load
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
    memory: StepMemory
    """Of rank 0, which has the largest blocks. What is kept and the peak are those of eager operators and of
    attention that serves sequence by sequence, with all rows in the last layer: an upper bound with
    `speed.read_rows_only`, nearly right with `speed.compile`, far too low with `attention = "reference"`."""
    traffic: Bytes
    """Bytes that rank 0 receives."""


def expect(recipe: Recipe, shape: CubeShape, corpus: CorpusFacts | None = None, device: Device = "cpu") -> Expectation:
    """Raises ValueError where the recipe's sizes or its batch do not divide on the cube, as the run would."""
    config, data = recipe.model.config(recipe.data), recipe.data
    config.check(shape)
    contents = expected_contents(data, corpus)
    packs, surely = _packs(recipe, shape, contents)
    sizes = (shape.data, shape.x, shape.y, shape.z)
    k = fit_packs_per_rank(packs, sizes, recipe.batch.packs_per_rank)
    check_rows(packs_per_rank=k, z=shape.z, capacity=data.capacity, y=shape.y)
    micro_batches = packs // (shape.planes * shape.z * k)
    wire = Wire(
        shape=shape, compute=_BYTES[recipe.precision.compute], gradient=_BYTES[recipe.precision.reduce], parameter=4
    )
    load, tokens = _load(data, shape, k), round(packs * data.capacity * contents.fill)
    squares, planned, choice = tokens * data.max_length, parameters(config), recipe.model
    near = tokens * int(attended(data.max_length, config.window)) // data.max_length
    sequences = round(packs * contents.packing_factor)
    counted = partial(
        model_flops,
        config,
        masked=round(MASKED_SHARE * tokens),
        sequences=sequences,
        read_rows_only=recipe.speed.read_rows_only,
    )
    flops = counted(tokens=tokens, squares=squares, near=near)
    return Expectation(
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
        memory=step_memory(
            config,
            wire,
            load,
            micro_batches=micro_batches,
            recompute=choice.recompute,
            keep_gathered=choice.keep_gathered,
            optimizer=recipe.optimizer.kind,
            device=device,
            wire_buffers=device == "cpu",  # which gloo connects
        ),
        traffic=_traffic(recipe, config, wire, load, micro_batches, _read_slots(data, wire, k)),
    )


def expected_contents(data: DataRecipe, corpus: CorpusFacts | None) -> Contents:
    """From the recipe's lengths, and from those of the corpus if there is one."""
    if corpus is not None:
        mean = corpus.mean_length(data.max_length, data.short_probability)
    else:
        mean = (data.max_length - _SPECIAL) * (1 - data.short_probability / 2) + _SPECIAL
    if data.packing in ("padded", "binned"):
        return Contents(mean_length=mean, packing_factor=1.0, fill=mean / data.capacity)
    factor = max(1.0, min(_FILL * data.capacity / mean, float(data.max_sequences)))
    return Contents(mean_length=mean, packing_factor=factor, fill=min(1.0, factor * mean / data.capacity))


def _packs(recipe: Recipe, shape: CubeShape, contents: Contents) -> tuple[int, bool]:
    """Packs of a step, and whether their number is sure to divide on the cube."""
    batch = recipe.batch
    if batch.packing_rule != "sequences":
        return batch.global_batch, True
    unit = shape.planes * shape.z * (batch.packs_per_rank or 1)
    packs = packs_per_step(batch.global_batch, contents.packing_factor, batch.multiple_of)
    return max(unit, round(packs / unit) * unit), batch.multiple_of % unit == 0


def _traffic(recipe: Recipe, config: BertConfig, wire: Wire, load: Load, micro_batches: int, slots: int) -> Bytes:
    """Of a step of any number of micro-batches, all of which receive the same."""
    read = slots if recipe.speed.read_rows_only else None
    speed, lamb = recipe.model, recipe.optimizer.kind == "lamb"
    rows, recompute, keep_gathered = (load.rows, load.masked, load.first), speed.recompute, speed.keep_gathered
    total = step_traffic(
        config,
        wire,
        *rows,
        norm=3,  # the gradients', the ranks that a signal has asked to stop, and those whose loss is not finite
        keep_gathered=keep_gathered,
        recompute=recompute,
        read=read,
        lamb=sum(len(parameter.shape) > 1 for parameter in parameters(config)) if lamb else 0,
    )
    further = micro_batch_traffic(config, wire, *rows, keep_gathered=keep_gathered, recompute=recompute, read=read)
    for key, count in further.items():
        total[key] += (micro_batches - 1) * count
    return total


def _budgets(data: DataRecipe) -> tuple[int, int]:
    """Tokens to guess and sequences of a pack, at most."""
    most = 1 if data.packing in ("padded", "binned") else data.max_sequences
    masked = data.masked_per_pack
    if masked is None:
        masked = max(default_masked_per_pack(data.capacity, most), masked_count(data.max_length))
    return masked, most


def _read_slots(data: DataRecipe, wire: Wire, k: int) -> int:
    return read_slots(k * wire.size("z"), sum(_budgets(data)), wire)


def _load(data: DataRecipe, shape: CubeShape, k: int) -> Load:
    """A micro-batch whose packs are full of the longest sequences: attention has the most to keep then."""
    packs, multiple = k * shape.z, math.lcm(shape.y, shape.z)
    masked, most = _budgets(data)
    whole, tail = divmod(data.capacity, data.max_length)
    return Load(
        rows=packs * data.capacity,
        masked=-(-packs * masked // multiple) * multiple,
        first=-(-packs * most // multiple) * multiple,
        lengths=tuple([data.max_length] * whole + ([tail] if tail else [])) * k,
    )


def _again(recipe: Recipe, counted: Callable[..., int], tokens: int, squares: int, near: int) -> int:
    """FLOPs of what the backward pass computes again: a forward pass, a third of both passes, of a part.

    Args:
        counted: FLOPs of model and heads, by tokens, squares of lengths and pairs in windows.
    """
    if recipe.model.recompute == "none":
        return 0
    kept = 0 if recipe.model.recompute == "layer" else tokens  # the heads; or all but attention
    return (counted(tokens=tokens, squares=squares, near=near) - counted(tokens=kept, squares=0, near=0)) // 3

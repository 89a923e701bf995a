"""A dry step: the real model and the real training step of one rank, of a cube of any size, in one process.

Nothing is computed, sent or kept: tensors are fake (they have sizes and no memory), and so are the other ranks. What
is counted is what the code does, not what a formula says of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # tells fake tensors how collectives behave
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.bert import BertConfig, BertForPreTraining
from models.bert.saved import Load
from tensor3d import Cube, CubeShape, Sequences, TrafficCount, local
from tensor3d.data import PackedBatch, Step
from tensor3d.layers.attention import Recompute
from tensor3d.optim import AdamW, Lamb, LossScaler
from tensor3d.planning.traffic import Bytes
from tools.building import make_optimizer, precision
from tools.plan.live import LiveBytes
from tools.recipe_sections import OptimizerRecipe, PrecisionRecipe
from tools.training_step import TrainingStep

_RUN_AT_MOST = 2  # micro-batches: the first finds no gradients of another, all further ones are alike


@dataclass(frozen=True, kw_only=True)
class Dry:
    """What one rank does and holds in one step. All of it counted."""

    received: Bytes
    """Bytes received, by axis and kind."""
    calls: Bytes
    """Collectives, by axis and kind."""
    weights: int
    """Bytes; so are the next ones."""
    gradients: int
    optimizer: int
    saved: int
    """Kept for the backward pass of one micro-batch, without weights."""
    peak: int
    """The most at once of all that torch's operators allocate, weights and the batch included."""


def dry_step(
    config: BertConfig,
    shape: CubeShape,
    load: Load,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionRecipe = PrecisionRecipe(),  # noqa: B008  # frozen
    optimizer: Literal["adamw", "lamb"] = "adamw",
    recompute: Recompute = "none",
    keep_gathered: bool = False,
) -> Dry:
    """One step of `rank` of a cube of any size: all micro-batches, clipping, the optimiser.

    All ranks but this one are left out, by torch's "fake" process group; the process is afterwards as it was. Counted
    as on a CPU: GPUs keep other things of attention.

    Args:
        load: what a micro-batch gives the rank.
        micro_batches: of a step. Two are run; what further ones receive follows, and the peak stays.
        types, optimizer: as a recipe has them.
        recompute, keep_gathered: as in `BertModel`.

    Raises:
        ValueError: this process is in a process group, a rank that the cube does not have, no micro-batch, or sizes or
            rows that do not divide on the cube.
    """
    if not 0 <= rank < shape.ranks:
        raise ValueError(f"{shape} has the ranks 0 to {shape.ranks - 1}. Got {rank}.")
    if micro_batches < 1:
        raise ValueError(f"a step needs at least 1 micro-batch. Got {micro_batches}.")
    config.check(shape)
    with _alone(shape, rank), torch.random.fork_rng(devices=[]):
        cube = Cube(x=shape.x, y=shape.y, z=shape.z, data=shape.data, wire=shape.wire, precision=precision(types))
        cube.manual_seed(0)
        # Their places are computed from their lengths, on the host. Real tensors become fake where they meet fake ones.
        sequences = Sequences.from_lengths(load.lengths)
        places = list(_places(sequences, config))
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            with cube.blank():
                model = BertForPreTraining(config, cube, recompute=recompute, keep_gathered=keep_gathered)
            stepping = make_optimizer(model, OptimizerRecipe(kind=optimizer), cube, betas=(0.9, 0.999))
            for place in places:
                live.follow(place)
            scaler = LossScaler(cube) if types.compute == "fp16" else None
            step = TrainingStep(model, stepping, scaler, cube, clip=1.0)
            batch = _batch(load, sequences)
            with cube.traffic.counting() as count:
                noted = _Noted(model, stepping, count)
                _take(step, [batch] * min(micro_batches, _RUN_AT_MOST))
        further = max(0, micro_batches - _RUN_AT_MOST)
        return Dry(
            received=_grown(count.received, [received for received, _ in noted.before], further),
            calls=_grown(count.calls, [calls for _, calls in noted.before], further),
            weights=sum(map(_bytes, model.parameters())),
            gradients=noted.gradients,
            optimizer=sum(_bytes(each) for state in stepping.state.values() for each in state.values()),
            saved=noted.saved,
            peak=live.peak,
        )


@contextmanager
def _alone(shape: CubeShape, rank: int) -> Iterator[None]:
    """One rank of a world in which the others do not exist; none at all for a cube of one rank."""
    if dist.is_initialized():
        raise ValueError(
            "a dry step makes a process group of its own, and this process is already in one. Take the step in a "
            "process that trains nothing, or before the process group is initialised."
        )
    excepthook = sys.excepthook  # init_process_group sets one that puts the rank before every line
    if shape.ranks > 1:
        dist.init_process_group("fake", rank=rank, world_size=shape.ranks, store=FakeStore())
    try:
        yield
    finally:
        if shape.ranks > 1:
            dist.destroy_process_group()
        sys.excepthook = excepthook


def _places(sequences: Sequences, config: BertConfig) -> Iterator[Tensor]:
    """Made once for all layers."""
    yield sequences.cu_seqlens
    grouping = sequences.grouping
    if grouping.gather is not None and grouping.restore is not None:
        yield from (grouping.gather, grouping.restore)
    if config.encoder == "modern":
        yield sequences.positions


def _batch(load: Load, sequences: Sequences) -> PackedBatch:
    """Of these sizes; what stands in it, nobody can read."""

    def numbers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64)

    return PackedBatch(
        ids=numbers(load.rows),
        positions=numbers(load.rows),
        types=numbers(load.rows),
        sequences=sequences,
        masked=numbers(load.masked),
        masked_labels=numbers(load.masked),
        first=numbers(load.first),
        next_labels=numbers(load.first),
    )


def _take(step: TrainingStep, batches: list[PackedBatch]) -> None:
    step.stopwatch.begin()
    lengths = np.zeros(1, dtype=np.int64)
    one = Step(index=0, batches=batches, targets=1, sequences=1, tokens=1, squares=1, lengths=lengths, fill=1.0)
    step.take(one, learning_rate=1e-3, stall=0.0)


class _Noted:
    """Hooks on a model and its optimiser that note what can be seen only in the middle of a step."""

    def __init__(self, model: nn.Module, optimizer: AdamW | Lamb, count: TrafficCount) -> None:
        self.before: list[tuple[Bytes, Bytes]] = []
        """Bytes and collectives so far, at the begin of each micro-batch."""
        self.gradients = 0
        self.saved = 0
        self._weights = {local(parameter).untyped_storage()._cdata for parameter in model.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used twice
        self._keeping = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        model.register_forward_pre_hook(lambda *_: self._begin(count))
        model.register_forward_hook(lambda *_: self._end(), always_call=True)  # hooks of autograd must not stay
        optimizer.register_step_pre_hook(lambda *_: self._note_gradients(model))

    def _begin(self, count: TrafficCount) -> None:
        self.before.append((Counter(count.received), Counter(count.calls)))
        if len(self.before) == 1:
            self._keeping.__enter__()

    def _end(self) -> None:
        if len(self.before) == 1:
            self._keeping.__exit__()
            self.saved = sum(storage.nbytes() for storage in self._kept.values())
            self._kept.clear()

    def _keep(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            storage = local(tensor).untyped_storage()
        if storage._cdata not in self._weights:
            self._kept[storage._cdata] = storage
        return tensor

    def _note_gradients(self, model: nn.Module) -> None:
        self.gradients = sum(_bytes(each.grad) for each in model.parameters() if each.grad is not None)


def _grown(counted: Bytes, before: list[Bytes], further: int) -> Bytes:
    """Of a step with so many more micro-batches, which are all like the first."""
    return Counter(
        {
            key: count + further * (before[1][key] - before[0][key] if further else 0)
            for key, count in counted.items()
            if count
        }
    )


def _bytes(tensor: Tensor) -> int:
    own = local(tensor)
    return own.numel() * own.element_size()

"""A dry step: the real model and the real training step of one rank, of a cube of any size, in one process.

Nothing is computed, sent or kept: tensors are fake (they have sizes and no memory), and so are the other ranks. What
is counted is what the code does, not what a formula says of it.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # tells fake tensors how collectives behave
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.bert import PRESETS, BertConfig, BertForPreTraining
from models.bert.cost_model.comm_volume import step_traffic
from models.bert.cost_model.param_shapes import held, parameters
from models.bert.cost_model.peak_memory import StepMemory, step_memory
from models.bert.cost_model.saved_activations import MicroBatchShape
from tensor3d import CommStats, Cube, CubeShape, Sequences, local
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.data import PackedBatch, TrainBatch
from tensor3d.layers.attention import Recompute
from tensor3d.optim import AdamW, GradScaler, Lamb
from tools.training.config import OptimizerConfig, PrecisionConfig
from tools.training.factory import TYPES, make_optimizer, precision
from tools.training.pretraining import PretrainObjective
from tools.training.step import TrainingStep

# --- Counts the bytes of all tensors that are alive, and the most at once ---------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Inside, follows every storage that an operator makes until nothing refers to it any more.

    Fake tensors count with the sizes that they pretend to have. What a kernel needs inside of itself is not seen.

    torch's own `torch.distributed._tools.mem_tracker.MemTracker` also sorts tensors by kind. It hooks modules,
    parameters and optimisers for that and takes gradients from the parameters' own hooks, which those that come by the
    cube's ledger do not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """The most so far."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            # A DTensor claims the whole of what it has a block of; on "meta" there are sizes and never any memory.
            if isinstance(each, Tensor) and not isinstance(each, DTensor) and each.device.type != "meta":
                self._follow(each.untyped_storage())
        return result

    def follow(self, tensor: Tensor) -> None:
        """Counts a tensor that was made before."""
        self._follow(tensor.untyped_storage())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[address]
            self.now -= size

        self._alive[address] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


# --- A dry step -------------------------------------------------------------------------------------------------------

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
    load: MicroBatchShape,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionConfig = PrecisionConfig(),  # noqa: B008  # frozen
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
        recompute: as in `BertModel`.
        keep_gathered: whether the model is made with `reshard_after_forward=False`.

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
            with cube.skip_init():
                model = BertForPreTraining(config, cube, recompute=recompute, reshard_after_forward=not keep_gathered)
            stepping = make_optimizer(model, OptimizerConfig(kind=optimizer), cube, betas=(0.9, 0.999))
            for place in places:
                live.follow(place)
            scaler = GradScaler(cube) if types.compute == "fp16" else None
            step = TrainingStep(model, stepping, scaler, cube, PretrainObjective(model), clip=1.0)
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


def _batch(load: MicroBatchShape, sequences: Sequences) -> PackedBatch:
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


def _take(step: TrainingStep[TrainBatch], batches: list[PackedBatch]) -> None:
    step.stopwatch.begin()
    lengths = np.zeros(1, dtype=np.int64)
    one = TrainBatch(index=0, batches=batches, targets=1, sequences=1, tokens=1, squares=1, lengths=lengths, fill=1.0)
    step.take(one, learning_rate=1e-3, stall=0.0)


class _Noted:
    """Hooks on a model and its optimiser that note what can be seen only in the middle of a step."""

    def __init__(self, model: nn.Module, optimizer: AdamW | Lamb, count: CommStats) -> None:
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

    def _begin(self, count: CommStats) -> None:
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


# --- A dry step beside what the closed forms say of it ----------------------------------------------------------------

_NORM = 3  # numbers in the norm's sum: the square, the ranks that want to stop, the losses that are not finite


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a step, bytes unless it counts calls."""

    what: str
    predicted: int
    counted: int

    @property
    def ratio(self) -> float:
        """Predicted over counted; 1 where both are 0."""
        if self.predicted == self.counted:
            return 1.0
        return self.predicted / self.counted if self.counted else float("inf")


def dry_beside_prediction(
    config: BertConfig,
    shape: CubeShape,
    load: MicroBatchShape,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionConfig = PrecisionConfig(),  # noqa: B008  # frozen
    optimizer: Literal["adamw", "lamb"] = "adamw",
    recompute: Recompute = "none",
    keep_gathered: bool = False,
) -> list[Comparison]:
    """Every figure of one step of `rank`, counted in a dry step and predicted without. Args, Raises: see `dry_step`."""
    dry = dry_step(
        config,
        shape,
        load,
        rank=rank,
        micro_batches=micro_batches,
        types=types,
        optimizer=optimizer,
        recompute=recompute,
        keep_gathered=keep_gathered,
    )
    wire = CommModel(
        shape=shape, rank=rank, compute=TYPES[types.compute].itemsize, gradient=TYPES[types.reduce].itemsize
    )
    memory = step_memory(
        config,
        wire,
        load,
        micro_batches=micro_batches,
        recompute=recompute,
        keep_gathered=keep_gathered,
        optimizer=optimizer,
    )
    received, calls = (
        step_traffic(
            config,
            each,
            load.rows,
            load.masked,
            load.first,
            micro_batches=micro_batches,
            norm=_NORM,
            keep_gathered=keep_gathered,
            recompute=recompute,
            lamb=sum(len(p.shape) > 1 for p in parameters(config)) if optimizer == "lamb" else 0,
        )
        for each in (wire, replace(wire, unit="calls"))
    )
    return [*_traffic("bytes", received, dry.received), *_traffic("calls", calls, dry.calls), *_memory(memory, dry)]


def _traffic(unit: str, predicted: Bytes, counted: Bytes) -> Iterator[Comparison]:
    for axis, kind in sorted({*+predicted, *+counted}):
        yield Comparison(what=f"{unit} {axis} {kind}", predicted=predicted[axis, kind], counted=counted[axis, kind])


def _memory(predicted: StepMemory, counted: Dry) -> Iterator[Comparison]:
    for name in ("weights", "gradients", "optimizer", "peak"):
        yield Comparison(what=name, predicted=getattr(predicted, name), counted=getattr(counted, name))
    yield Comparison(what="saved", predicted=predicted.saved.total, counted=counted.saved)


# --- The models that the planner knows by name: BERT's presets, and encoders that nobody trains on one GPU ------------

MODELS: Mapping[str, BertConfig] = MappingProxyType(
    {
        **PRESETS,
        # 12 L h² weights in L layers of h columns, with heads of 128.
        "10b": BertConfig(layers=50, hidden=4096, heads=32),
        "100b": BertConfig(layers=80, hidden=10240, heads=80),
    }
)
_MOST_LAYERS = 10_000  # each is gone through, for every box
_MOST = 10**15  # parameters: more than any cluster has memory for, and a slip of the finger


def model_of(
    name: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    positions: int | None = None,
) -> BertConfig:
    """A preset with other sizes, where any are given.

    Raises:
        ValueError: an unknown preset, a size that cannot be, more parameters than anybody can hold.
    """
    if name not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, with sizes of your own beside it. Got {name!r}.")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "inner": inner, "vocab": vocab, "positions": positions}
    given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    for key, value in given.items():
        most = _MOST_LAYERS if key == "layers" else 10**9
        if not 1 <= value <= most:
            raise ValueError(f"--{key} must be a whole number from 1 to {most:,}. Got {value:,}.")
    config = dataclasses.replace(MODELS[name], **given)
    parameters = parameters_of(config)
    if parameters > _MOST:
        raise ValueError(f"the model has {parameters:.2g} parameters, and the planner stops at {_MOST:.0e}.")
    return config


def parameters_of(config: BertConfig) -> int:
    """Elements of all of them."""
    return held(config, CubeShape()).total

"""A dry step: the real model and the real training step of one rank, of a cube of any size, in one process.

Nothing is computed, sent or kept: tensors are fake (they have sizes and no memory), and so are the other ranks. What
is counted is what the code does, not what a formula says of it.
"""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.bert import BertConfig, BertForPreTraining, ElectraForPreTraining, ReplacedTokens
from models.bert.cost_model.memory import Device, MicroBatchShape
from models.bert.cost_model.param_shapes import OptimizerName
from tensor3d import CommStats, Cube, CubeShape, ExecutionPolicy, Sequences, keep_gathered, local
from tensor3d.cost_model.comm_volume import Bytes
from tensor3d.cost_model.step_cost import check_keep_budget
from tensor3d.data import PackedBatch, TrainBatch
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.distributed.fp8_scales import kept_bytes
from tensor3d.distributed.shadow_weights import shadow_of
from tensor3d.layers.attention import Recompute
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.optim import GradScaler
from tensor3d.optim.adam import ShardedAdamBase
from tensor3d.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    fake_collectives,
    fake_process_groups,
    is_fused_sgd,
    is_storage_resize,
    storage_id,
    tree_leaves,
)
from tools.common.workers import begin_worker
from tools.training.config import OptimizerConfig, PrecisionConfig
from tools.training.dry_gpu import stand_in_device, stand_in_gpu
from tools.training.factory import make_optimizer, precision
from tools.training.pretraining import PretrainObjective, ReplacedTokensObjective
from tools.training.step import TrainingStep

K = TypeVar("K")
R = TypeVar("R")
_COLLECTIVES, _FAKE_GROUPS = fake_collectives(), fake_process_groups()

# --- Counts the bytes of all tensors that are alive, and the most at once ---------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Inside, follows every storage that an operator makes until nothing refers to it any more.

    Fake tensors count with the sizes that they pretend to have. What a kernel needs inside of itself is not seen.

    torch's own `torch.distributed._tools.mem_tracker.MemTracker` also sorts tensors by kind. It hooks modules,
    parameters and optimisers for that and takes gradients from the parameters' own hooks, which those that come by the
    cube's ledger do not run.

    Args:
        wire_buffers: also count what gloo needs while it sends: a copy of what is gathered or summed.
    """

    def __init__(self, wire_buffers: bool = False) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self.peaks: dict[str, int] = {}
        """The most so far, in each part of the step."""
        self._part = "building"
        self._wire_buffers = wire_buffers
        self._inside = False
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def begin(self, part: str) -> None:
        """Here a part of the step begins, and another one ends."""
        self._part = part
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_fused_sgd(func):
            return None  # in place, and without a rule for fake tensors: torch would run it on real zeros
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        if is_storage_resize(func):
            self._resize(args[0].untyped_storage())
        for each in tree_leaves(result):
            # A DTensor claims the whole of what it has a block of; on "meta" there are sizes and never any memory.
            if isinstance(each, Tensor) and not isinstance(each, DTensor) and each.device.type != "meta":
                self._follow(each.untyped_storage())
        if self._wire_buffers and func in _COLLECTIVES.collective_ops - _COLLECTIVES.sync_ops:
            self._note(_COLLECTIVES.CollectiveOp.get_comm_tensor_size(func, result, args, kwargs))
        return result

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """Inside, operators are one kernel: what they make is not in memory, but for what is then told to `follow`."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def follow(self, tensor: Tensor) -> None:
        """Counts a tensor that was made before."""
        self._follow(tensor.untyped_storage())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address = storage_id(storage)
        if address in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[address]
            self.now -= self._sizes.pop(address)

        self._alive[address] = weakref.ref(storage, gone)
        self._sizes[address] = 0
        self._resize(storage)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size than before."""
        address, size = storage_id(storage), storage.nbytes()
        if address in self._alive:
            self.now += size - self._sizes[address]
            self._sizes[address] = size
            self._note()

    def _note(self, more: int = 0) -> None:
        self.peaks[self._part] = max(self.peaks.get(self._part, 0), self.now + more)


class _RegionsAsKernels(CompiledRegions):
    """A region is one kernel (`ExecutionPolicy.compile`), of which memory sees what it returns. Nothing is compiled.

    That the compiler makes two kernels of some, between which statistics lie, is left out.
    """

    def __init__(self, device: torch.device, live: LiveBytes) -> None:
        super().__init__(False, device)
        self._live = live

    def __call__(self, region: Callable[..., R], *inputs: Any) -> R:
        with torch.no_grad(), self._live.kernel():
            result = region(*inputs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._live.follow(each)
        return result

    def can_write_to(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous()


# --- A dry step -------------------------------------------------------------------------------------------------------

_BEFORE = "before"  # in the place of a part: what the step does not count
_RUN_AT_MOST = 2  # micro-batches: the first finds no gradients of another, all further ones are alike


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one rank. All of it counted."""

    weights: int
    gradients: int
    optimizer: int
    embeddings: int
    """What they keep for the backward pass of one micro-batch, without weights; so do the next ones."""
    layers: int
    heads: int
    shadows: int
    """Copies of weights in the type of products (`ExecutionPolicy.shadow_weights`), which stay."""
    scales: int
    """Histories and scales of products in FP8 with delayed scaling, which stay."""
    peaks: dict[str, int]
    """The most at once of all that torch's operators allocate, weights and the batch included, by part of the step:
    building, forward, backward through heads, layers and embeddings, sums of gradients, update. Each grows with the
    layers by its own measure."""

    @property
    def saved(self) -> int:
        """Kept for the backward pass of one micro-batch, without weights."""
        return self.embeddings + self.layers + self.heads

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


@dataclass(frozen=True, kw_only=True)
class DryStep:
    """What one rank does and holds in one step. All of it counted."""

    received: Bytes
    """Bytes received, by axis and kind."""
    calls: Bytes
    """Collectives, by axis and kind."""
    memory: StepMemory


def dry_step(
    config: BertConfig,
    shape: CubeShape,
    load: MicroBatchShape,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionConfig = PrecisionConfig(),  # noqa: B008  # frozen
    optimizer: OptimizerName = "adamw",
    shard_over_data: ShardOverData = False,
    recompute: Recompute = "none",
    reshard_after_forward: bool = True,
    keep_budget: int = 0,
    replaced: ReplacedTokens | None = None,
    device: Device = "cpu",
    wire_buffers: bool = False,
    keep_buckets: bool | None = None,
    weight_group_bytes: int | None = None,
    shadow_weights: bool = False,
    compile: bool = False,
) -> DryStep:
    """One step of `rank` of a cube of any size: all micro-batches, clipping, the optimiser.

    Where the memory of gradients stays from step to step, it is one that finds it there, and delayed scales.

    All ranks but this one are left out, by torch's "fake" process group; the process is afterwards as it was.

    Args:
        load: what a micro-batch gives the rank.
        micro_batches: of a step. Two are run; what further ones receive follows, and the peak stays.
        types, optimizer, shard_over_data: as a recipe has them. What FP8 holds while it multiplies is on a GPU what its
            kernels read, on a CPU that of the emulation.
        recompute, reshard_after_forward: as in `BertModel`.
        keep_budget: bytes for gathered operands that stay for backward (`tensor3d.keep_gathered`).
        replaced: of an ELECTRA, whose generator is counted as part of the embeddings. None: a BERT.
        device: whose memory. Of a GPU it is that of attention by length classes, in fused kernels. Without a GPU here,
            only a process that has not run autograd before can say: see `counted_step`.
        wire_buffers: see `LiveBytes`.
        keep_buckets, weight_group_bytes, shadow_weights, compile: as of `ExecutionPolicy`. There need be no compiler:
            each region counts as the kernel that it would be.

    Raises:
        ValueError: this process is in a process group, a rank that the cube does not have, no micro-batch, a budget
            where everything stays, or sizes or rows that do not divide on the cube.
    """
    if not 0 <= rank < shape.ranks:
        raise ValueError(f"{shape} has the ranks 0 to {shape.ranks - 1}. Got {rank}.")
    if micro_batches < 1:
        raise ValueError(f"a step needs at least 1 micro-batch. Got {micro_batches}.")
    check_keep_budget(keep_budget, reshard_after_forward)
    config.check(shape)
    place = stand_in_device() if device == "cuda" else torch.device("cpu")
    with alone(shape, rank), torch.random.fork_rng(devices=[]):
        cube = Cube(
            x=shape.x,
            y=shape.y,
            z=shape.z,
            data=shape.data,
            device=place,
            wire=shape.wire,
            precision=precision(types),
            speed=ExecutionPolicy(
                keep_buckets=keep_buckets, weight_group_bytes=weight_group_bytes, shadow_weights=shadow_weights
            ),
        )
        cube.manual_seed(0)
        # Their places are computed from their lengths, on the host. Real tensors become fake where they meet fake ones.
        on_host = Sequences.from_lengths(load.lengths)
        if config.has_rotary:
            on_host.positions  # noqa: B018  # made and kept
        gpu = stand_in_gpu() if device == "cuda" else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes(wire_buffers) as live, gpu:
            if compile:
                cube.speed, cube.regions = replace(cube.speed, compile=True), _RegionsAsKernels(place, live)
            with cube.skip_init():
                model, objective = _model(
                    config, replaced, cube, recompute=recompute, reshard_after_forward=reshard_after_forward
                )
            if keep_budget:
                keep_gathered(model, cube, load.rows * shape.planes, keep_budget)
            recipe = OptimizerConfig(kind=optimizer, shard_over_data=shard_over_data)
            stepping = make_optimizer(model, recipe, cube, betas=(0.9, 0.999))
            sequences = _moved(on_host, place)
            for each in _places(sequences, config):
                live.follow(each)
            scaler = GradScaler(cube) if types.compute == "fp16" else None
            step = TrainingStep(model, stepping, scaler, cube, objective, clip=1.0)
            batch = _batch(load, sequences, with_draws=replaced is not None)
            if shape.data > 1 and micro_batches == 1 and cube.ledger.keeps_buckets:
                live.begin(_BEFORE)
                objective.loss(_step_of([batch]), batch)[0].backward()  # in what order gradients come
                model.zero_grad()
                cube.ahead.forget()
                cube.ledger.take_buckets()
                live.begin("building")
                del live.peaks[_BEFORE]
            with cube.traffic.counting() as count:
                notes = _Notes(model, stepping, count, live)
                cube.ledger.observer = notes.sums
                _take(step, [batch] * min(micro_batches, _RUN_AT_MOST))
        further, scales = max(0, micro_batches - _RUN_AT_MOST), kept_bytes(model.parameters())
        return DryStep(
            received=_grown(count.received, [received for received, _ in notes.before], further),
            calls=_grown(count.calls, [calls for _, calls in notes.before], further),
            memory=StepMemory(
                weights=sum(map(_bytes, model.parameters())),
                gradients=notes.gradients,
                optimizer=sum(_bytes(each) for state in stepping.state.values() for each in state.values()),
                embeddings=notes.saved[0],
                layers=notes.saved[1] - notes.saved[0],
                heads=notes.saved[2] - notes.saved[1],
                shadows=cube.shadows.kept_bytes,
                scales=scales,
                # The first step makes them at its end, and later ones find them from their begin on.
                peaks={part: most + scales * (part != "update") for part, most in live.peaks.items()},
            ),
        )


def _model(
    config: BertConfig, replaced: ReplacedTokens | None, cube: Cube, **made: Any
) -> tuple[BertForPreTraining | ElectraForPreTraining, PretrainObjective | ReplacedTokensObjective]:
    """And what it learns."""
    if replaced is None:
        bert = BertForPreTraining(config, cube, **made)
        return bert, PretrainObjective(bert)
    electra = ElectraForPreTraining(config, replaced, cube, **made)
    return electra, ReplacedTokensObjective(electra)


@contextmanager
def alone(shape: CubeShape, rank: int) -> Iterator[None]:
    """One rank of a world in which the others do not exist; none at all for a cube of one rank."""
    if dist.is_initialized():
        raise ValueError(
            "a dry step makes a process group of its own, and this process is already in one. Take the step in a "
            "process that trains nothing, or before the process group is initialised."
        )
    excepthook = sys.excepthook  # init_process_group sets one that puts the rank before every line
    if shape.ranks > 1:
        dist.init_process_group("fake", rank=rank, world_size=shape.ranks, store=_FAKE_GROUPS.FakeStore())
    try:
        yield
    finally:
        if shape.ranks > 1:
            dist.destroy_process_group()
        sys.excepthook = excepthook


def _moved(on_host: Sequences, device: torch.device) -> Sequences:
    """The sequences on a device, with the places that have been made of them; on the CPU they are there."""
    if device.type == "cpu":
        return on_host
    moved = on_host.to(device)
    if "positions" in vars(on_host):
        vars(moved)["positions"] = on_host.positions.to(device)
    return moved


def _places(sequences: Sequences, config: BertConfig) -> Iterator[Tensor]:
    """Made once for all layers."""
    yield sequences.cu_seqlens
    grouping = sequences.grouping
    if grouping.gather is not None and grouping.restore is not None:
        yield from (grouping.gather, grouping.restore)
    if config.has_rotary:
        yield sequences.positions


def _batch(load: MicroBatchShape, sequences: Sequences, *, with_draws: bool) -> PackedBatch:
    """Of these sizes; what stands in it, nobody can read."""

    def numbers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=sequences.device)

    return PackedBatch(
        ids=numbers(load.rows),
        positions=numbers(load.rows),
        types=numbers(load.rows),
        sequences=sequences,
        masked=numbers(load.masked),
        masked_labels=numbers(load.masked),
        first=numbers(load.first),
        next_labels=numbers(load.first),
        draws=numbers(load.masked) if with_draws else None,
        planes_alike=True,
    )


def _take(step: TrainingStep[TrainBatch], batches: list[PackedBatch]) -> None:
    step.stopwatch.begin()
    step.take(_step_of(batches), learning_rate=1e-3, stall=0.0)


def _step_of(batches: list[PackedBatch]) -> TrainBatch:
    lengths = np.zeros(1, dtype=np.int64)
    return TrainBatch(index=0, batches=batches, targets=1, sequences=1, tokens=1, squares=1, lengths=lengths, fill=1.0)


class _Notes:
    """Hooks on a model and its optimiser that note what can be seen only in the middle of a step."""

    def __init__(
        self,
        model: BertForPreTraining | ElectraForPreTraining,
        optimizer: ShardedAdamBase,
        count: CommStats,
        live: LiveBytes,
    ) -> None:
        self.before: list[tuple[Bytes, Bytes]] = []
        """Bytes and collectives so far, at the begin of each micro-batch."""
        self.gradients = 0
        self.saved: list[int] = []
        """What is kept so far, behind embeddings, layers and heads of the first micro-batch."""
        self._live, self._forward, self._parameters = live, False, list(model.parameters())
        self._weights = {storage_id(local(parameter)) for parameter in model.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used twice
        self._keeping = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        model.register_forward_pre_hook(lambda *_: self._begin(count))
        model.bert.embeddings.register_forward_hook(lambda *found: self._between(found[-1], "embeddings"))
        model.bert.layers[-1].register_forward_hook(lambda *found: self._between(found[-1], "layers"))
        model.register_forward_hook(lambda *_: self._end(), always_call=True)  # hooks of autograd must not stay
        optimizer.register_step_pre_hook(lambda *_: self._note_gradients(model))

    def _begin(self, count: CommStats) -> None:
        self.before.append((Counter(count.received), Counter(count.calls)))
        self._live.begin("forward")
        self._forward = True
        if len(self.before) == 1:
            self._keeping.__enter__()

    def _between(self, state: Tensor, before: str) -> None:
        """Behind a part of the model, whose backward pass begins with the gradient of its `state`."""
        if self._forward:  # and not where backward computes a layer again
            self._note_saved()
            state.register_hook(lambda _: self._live.begin(before))

    def _end(self) -> None:
        self._live.begin("heads")
        self._forward = False
        if len(self.before) == 1:
            self._keeping.__exit__()
            self._note_saved()
            self._kept.clear()

    def _note_saved(self) -> None:
        if len(self.before) == 1:
            copies = (shadow_of(parameter) for parameter in self._parameters)
            stay = {storage_id(copy) for copy in copies if copy is not None}
            self.saved.append(sum(storage.nbytes() for key, storage in self._kept.items() if key not in stay))

    def _keep(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            storage = local(tensor).untyped_storage()
        if storage_id(storage) not in self._weights:
            self._kept[storage_id(storage)] = storage
        return tensor

    def sums(self, moment: Literal["sum", "summed"]) -> None:
        """For `GradReducer.observer`."""
        if moment == "sum":
            self._live.begin("sums")

    def _note_gradients(self, model: nn.Module) -> None:
        self._live.begin("update")
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


# --- Dry steps in processes of their own ------------------------------------------------------------------------------


_WORKERS = 2  # of a model's two depths, one each
_DEPTH = 3  # layers of the shallower: the first and the last of a model may differ from those between
_GLOBAL_EVERY = 3  # as `BertConfig.window_of` has it


@cache
def _workers(device: Device) -> ProcessPoolExecutor:
    """Started when first asked for, and kept: each has torch to import.

    A process whose autograd has run before it knew of the stand-in device never serves it; and one may be in a process
    group.
    """
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(_WORKERS, mp_context=context, initializer=_begin, initargs=(device,))


def _begin(device: Device) -> None:
    begin_worker()
    if device == "cuda":
        stand_in_device()


def counted_step(config: BertConfig, shape: CubeShape, load: MicroBatchShape, **step: Any) -> DryStep:
    """`dry_step` in a process of its own, whatever this one does.

    Raises:
        OSError: that process is gone.
    """
    return _counted([config], shape, load, **step)[0]


def _counted(configs: Sequence[BertConfig], shape: CubeShape, load: MicroBatchShape, **step: Any) -> list[DryStep]:
    """Dry steps beside one another."""
    pool = _workers(step.get("device", "cpu"))
    try:
        return [done.result() for done in [pool.submit(dry_step, each, shape, load, **step) for each in configs]]
    except BrokenProcessPool:
        _workers.cache_clear()  # the next one starts others
        raise OSError(
            "a process that counts a step has died, perhaps for want of memory. Try again with less beside it, or "
            "count nothing (tools.plan --quick)."
        ) from None


def counted_memory(
    config: BertConfig, shape: CubeShape, load: MicroBatchShape, *, rank: int = 0, **step: Any
) -> StepMemory:
    """That of a dry step (arguments as of `dry_step`), which takes seconds however many layers the model has.

    Layers alike add alike: two dry steps, of 3 and 4 layers, are extended to the depth of the model. Where windows come
    in turns, the two are one turn apart. With a budget for gathered operands layers are not alike, and all are run,
    which takes longer. Copies of the box beyond the second need nothing, unless they share the optimiser's state, but
    to set up groups of so many ranks takes long: they are left out. Kept by box: asking again costs nothing.
    """
    if shape.data > 2 and not step.get("shard_over_data"):  # copies of the box follow each other in the order of ranks
        rank, shape = rank % (shape.ranks // shape.data), replace(shape, data=2)
    return _memory_of_box(config, shape, load, rank=rank, **step)


@lru_cache(maxsize=256)
def counted_traffic(config: BertConfig, shape: CubeShape, load: MicroBatchShape, **step: Any) -> Bytes:
    """Bytes that a rank receives in a dry step, by axis and kind (arguments as of `dry_step`): for models of which no
    closed form says it. Of deep models two shallow ones are extended, as in `counted_memory`."""
    deeper = _DEPTH + 1
    if config.layers <= deeper or config.window is not None or step.get("keep_budget"):
        return counted_step(config, shape, load, **step).received
    low, high = (
        each.received
        for each in _counted([replace(config, layers=layers) for layers in (_DEPTH, deeper)], shape, load, **step)
    )
    return Counter(_extended({key: low[key] for key in high}, high, config.layers - deeper))


@lru_cache(maxsize=256)
def _memory_of_box(config: BertConfig, shape: CubeShape, load: MicroBatchShape, **step: Any) -> StepMemory:
    turn = 1 if config.window is None else config.global_every or _GLOBAL_EVERY
    deeper = _DEPTH + turn + (config.layers - _DEPTH) % turn
    if config.layers <= deeper or step.get("keep_budget"):
        return counted_step(config, shape, load, **step).memory
    depths = [replace(config, layers=layers) for layers in (deeper - turn, deeper)]
    low, high = (asdict(each.memory) for each in _counted(depths, shape, load, **step))
    turns = (config.layers - deeper) // turn
    peaks = _extended(low.pop("peaks"), high.pop("peaks"), turns)
    return StepMemory(**_extended(low, high, turns), peaks=peaks)


def _extended(low: dict[K, int], high: dict[K, int], turns: int) -> dict[K, int]:
    return {name: count + turns * (count - low[name]) for name, count in high.items()}

"""What a rank does for `bench rivals`: all contenders live in the same processes and work in turns."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.multiprocessing.reductions import StorageWeakRef

from models.bert import BertForPreTraining
from tensor3d import Cube, CubeShape, MixedPrecisionPolicy, TransformerLayer3D, clip_grad_norm_, keep_gathered, local
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.optim import AdamW, decay_groups
from tensor3d.torch_private import merge_dims, storage_id
from tools.bench.harness.memory import PeakMemory, peak_on
from tools.bench.harness.processes import Trial
from tools.bench.vs_pytorch.plain_bert import PlainBert, PlainLayer, copy_weights
from tools.bench.vs_pytorch.strategies import (
    CollectiveCount,
    fully_sharded,
    prefetch_explicitly,
    replicated,
    sum_partial_gradients,
    tensor_parallel,
    zero_adamw,
)
from tools.bench.vs_pytorch.work import Work, packed_batch, packed_hidden, plain_batch, whole_hidden

# --- Who competes in `bench rivals`: a model that is split somehow, with its share of the work ------------------------

RIVALS = ("tp", "fsdp2", "fsdp2-prefetch", "tp+fsdp2", "ddp", "ddp+zero")
_OWN = re.compile(r"(?P<cube>[^+]*)(?P<kept>\+kept(?P<budget>\d+)?)?(?P<zero>\+zero2?)?")


class OwnName(NamedTuple):
    """A cube of ours as it is named: XxYxZ, and behind it perhaps +kept or +keptN, and +zero or +zero2."""

    cube: str
    kept: bool
    """Whether layers keep gathered operands for backward."""
    budget: int | None
    """MiB of them; None: all."""
    zero: ShardOverData
    """What copies over data share out: AdamW's state, or gradients too."""

    @classmethod
    def parse(cls, text: str) -> OwnName:
        """Raises ValueError for what is not written so."""
        found = _OWN.fullmatch(text)
        if found is None:
            raise ValueError(
                f"a cube is written XxYxZ, and behind it there may be +kept or +keptN (MiB), and +zero or "
                f"+zero2. Got {text}."
            )
        budget = found["budget"]
        zero: ShardOverData = "gradients" if found["zero"] == "+zero2" else found["zero"] is not None
        return cls(found["cube"], found["kept"] is not None, None if budget is None else int(budget), zero)


# The same for all. Epsilon is BERT's; PyTorch's own default is another one.
_LR, _BETAS, _EPS, _DECAY, _MAX_NORM = 1e-4, (0.9, 0.999), 1e-6, 0.01, 1.0
_PEAKS = 3


def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class Implementation:
    """One model on one rank."""

    model: nn.Module
    forward: Callable[[], Tensor]
    """What backward begins with."""
    gradient: Tensor | None = None
    """Of what `forward` returns; None: it is a loss."""
    given: Tensor | None = None
    """What gets a gradient and is no parameter: the input of a layer."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What forward and backward run in."""
    complete: Callable[[], None] = _nothing
    """Makes gradients whole after backward, where that is not done by itself."""
    clip: Callable[[], object] = _nothing
    optimizer: torch.optim.Optimizer | None = None
    """None: forward and backward are all."""
    copies_of_loss: int | None = None
    """Ranks that have the same part of the loss, of which the others' add up to that of the batch. None: each rank has
    a mean over its share, or over the whole."""

    def step(self) -> Tensor:
        """All of it. The loss of this rank, a scalar; of a layer, the sum of squares of the gradient of its input."""
        shown = self.passes()
        self.update()
        self.forget()
        return shown

    def passes(self) -> Tensor:
        """Forward and backward."""
        with self.around():
            result = self.forward()
            result.backward(self.gradient)
        self.complete()
        if self.given is None or self.given.grad is None:
            return result.detach()
        return torch.linalg.vector_norm(self.given.grad).square()

    def update(self) -> None:
        if self.optimizer is not None:
            self.clip()
            self.optimizer.step()

    def forget(self) -> None:
        """Drops all gradients."""
        self.model.zero_grad(set_to_none=True)
        if self.given is not None:
            self.given.grad = None


def make_ours(work: Work, cube: Cube, name: OwnName | None = None) -> Implementation:
    """`models.bert` on a cube, with the options of its name, if it has one."""
    name = OwnName("", False, None, False) if name is None else name
    model = _ours(work, cube, name.kept and name.budget is None)
    if name.budget is not None:
        keep_gathered(model, cube, work.tokens, name.budget * 2**20)
    if work.what == "layer":
        x, gradient, sequences = packed_hidden(work, cube)
        x.requires_grad_()
        return Implementation(model=model, forward=lambda: model(x, sequences), gradient=gradient, given=x)
    batch, targets = packed_batch(work, cube), work.sequences * work.masked
    parameters = list(model.parameters())
    return Implementation(
        model=model,
        # As of the others, nobody asks what the loss of all ranks is.
        forward=lambda: model(batch, targets, work.sequences, reduce_loss=False).loss,
        copies_of_loss=cube.shape.y,
        clip=lambda: clip_grad_norm_(parameters, _MAX_NORM, cube),
        optimizer=AdamW(decay_groups(model, _DECAY), cube, lr=_LR, betas=_BETAS, eps=_EPS, shard_over_data=name.zero),
    )


def make_rival(name: str, work: Work, device: torch.device, tensor_size: int) -> Implementation:
    """The plain model, split by PyTorch's own means over all processes, with the weights of ours.

    Args:
        name: one of `RIVALS`.
        tensor_size: ranks of the tensor-parallel dimension of "tp+fsdp2".
    """
    plain = PlainLayer(work.config) if work.what == "layer" else PlainBert(work.config)
    copy_weights(plain, _ours(work, Cube.single()))
    plain.to(device)
    mesh = _mesh(name, device, tensor_size)
    groups, members = mesh.shape
    if members > 1:
        tensor_parallel(plain, mesh["tensor"])
    is_sharded = "fsdp2" in name
    begin: Callable[[], object] = _nothing
    if is_sharded:
        fully_sharded(plain, mesh["data"], work.compute)
    if name == "fsdp2-prefetch":
        begin = prefetch_explicitly(plain)
    model: nn.Module = replicated(plain) if name.startswith("ddp") else plain
    parameters = list(model.parameters())
    share = work.sequences // groups
    first = mesh.get_local_rank("data") * share
    complete = (lambda: sum_partial_gradients(parameters)) if members > 1 else _nothing
    if work.what == "layer":
        place = mesh.get_local_rank("tensor")
        own = (whole[first : first + share].chunk(members, 1)[place] for whole in whole_hidden(work))
        x, gradient = (part.to(device, copy=True) for part in own)
        x.requires_grad_()
        return Implementation(
            model=model,
            forward=lambda: model(x),
            gradient=gradient,
            given=x,
            around=lambda: _around(begin, None if is_sharded else work.compute, device, splits_loss=False),
            complete=complete,
        )
    batch = plain_batch(work, first, first + share, device)
    groups_of_decay = decay_groups(model, _DECAY)
    settings: dict[str, Any] = {"lr": _LR, "betas": _BETAS, "eps": _EPS, "fused": True}
    return Implementation(
        model=model,
        forward=lambda: model(*batch),
        around=lambda: _around(begin, None if is_sharded else work.compute, device, splits_loss=members > 1),
        complete=complete,
        clip=lambda: nn.utils.clip_grad_norm_(parameters, _MAX_NORM),
        optimizer=(zero_adamw if name == "ddp+zero" else torch.optim.AdamW)(groups_of_decay, **settings),
    )


def _around(
    begin: Callable[[], object], autocast: torch.dtype | None, device: torch.device, *, splits_loss: bool
) -> AbstractContextManager[object]:
    """What forward and backward of a rival run in, once `begin` was called."""
    begin()
    with ExitStack() as stack:
        if splits_loss:
            stack.enter_context(loss_parallel())
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, autocast))
        return stack.pop_all()


def _mesh(name: str, device: torch.device, tensor_size: int) -> DeviceMesh:
    """Dimensions "data", whose ranks have different sequences, and "tensor", whose ranks share theirs."""
    world = dist.get_world_size()
    tensor = {"tp": world, "tp+fsdp2": tensor_size}.get(name, 1)
    mesh = init_device_mesh(device.type, (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if 1 < tensor < world:
        merge_dims(mesh, "all")  # norms over both dimensions are then summed at once
    return mesh


def _ours(work: Work, cube: Cube, kept: bool = False) -> nn.Module:
    """The model on a cube. From the same seed its weights are the same on every one."""
    cube.manual_seed(work.seed)
    c = work.config
    if work.what == "step":
        return BertForPreTraining(c, cube, reshard_after_forward=not kept)
    return TransformerLayer3D(
        c.hidden,
        c.heads,
        cube,
        c.inner_size,
        activation=c.activation,
        eps=c.eps,
        std=c.std,
        reshard_after_forward=not kept,
    )


# --- What a rank does for `bench rivals` ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What does not change from step to step, as one rank knows it."""

    device: str
    threads: int
    losses: tuple[float, ...]
    """Of the first steps, over all ranks, nats. Of a layer: sums of squares of the gradient of its input."""
    received: dict[str, int]
    """Bytes received by this rank in a step, by kind of collective."""
    calls: dict[str, int]
    """Collectives of a step, by kind."""
    counted_by_cube: int | None
    """Bytes received, as the cube itself counts them. None: this is no cube."""
    rest: int
    """Bytes of tensors between two steps: parameters, optimiser state, inputs of a layer, and buckets that stay."""
    peak: int
    """The most bytes of tensors at once in a step, `rest` among them: the median of so many steps as `_PEAKS` says,
    since gloo's threads free their buffers when they get to it."""
    resident: int | None
    """Growth of the process from before the model to after the warm-up. Contenders that were made before have left
    it pages to use again."""


class RivalsTrial(Trial):
    """All contenders on one rank, halted between calls.

    Args:
        cube: of all processes; its device is used, and that they are connected.
        names: those of `RIVALS`, and cubes as `OwnName` has them, in the order in which they are made.
        tensor_size: ranks of the tensor-parallel dimension of "tp+fsdp2".
        warmup: steps of each before the timed ones, at least 1.
    """

    def __init__(self, cube: Cube, work: Work, names: Sequence[str], tensor_size: int, warmup: int) -> None:
        # Of tp+fsdp2, whose layers return the local view of a DTensor. Nobody changes it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._work, self._device = work, cube.device
        self._contenders: dict[str, Implementation] = {}
        self.facts: dict[str, RankFacts] = {}
        for name in names:
            memory = PeakMemory(cube.device)
            own = None if name in RIVALS else _cube(name, work, cube.device)
            if own is None:
                contender = make_rival(name, work, cube.device, tensor_size)
            else:
                contender = make_ours(work, own, OwnName.parse(name))
            gc.collect()  # what splitting has left, such as whole weights
            losses = tuple(self._over_all(contender.step(), contender.copies_of_loss) for _ in range(warmup))
            self._contenders[name] = contender
            self.facts[name] = self._observe(contender, own, losses, memory.growth())
        # No contender's steps are to pay for garbage collections that look through the objects of all others.
        gc.collect()
        gc.freeze()

    def sample(self, name: str) -> float:
        """Seconds of a step."""
        dist.barrier()
        begin = perf_counter()
        self._contenders[name].step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter() - begin

    def _over_all(self, loss: Tensor, copies: int | None) -> float:
        """Of the whole batch."""
        total = loss.to(torch.float64)
        dist.all_reduce(total)
        return total.item() / (1 if self._work.what == "layer" else copies or dist.get_world_size())

    def _observe(
        self, contender: Implementation, cube: Cube | None, losses: tuple[float, ...], resident: int | None
    ) -> RankFacts:
        with CollectiveCount() as count, nullcontext() if cube is None else cube.traffic.counting() as own_count:
            contender.step()
        rest = resting_bytes(contender)
        return RankFacts(
            device=self._device.type,
            threads=torch.get_num_threads(),
            losses=losses,
            received=dict(count.received),
            calls=dict(count.calls),
            counted_by_cube=None if own_count is None else own_count.total_bytes,
            rest=rest,
            peak=rest + median_low(peak_on(self._device, contender.step) for _ in range(_PEAKS)),
            resident=resident,
        )


def resting_bytes(contender: Implementation) -> int:
    """Bytes of this rank's tensors that stay between two steps. Takes a step to find out which memory of gradients
    does, as buckets do."""
    contender.passes()
    parameters = list(contender.model.parameters())
    storages = [local(p.grad).untyped_storage() for p in parameters if p.grad is not None]
    gradients = {StorageWeakRef(storage): storage.nbytes() for storage in storages}
    del storages
    contender.update()
    contender.forget()
    sizes = {reference.cdata: size for reference, size in gradients.items() if not reference.expired()}
    stay: list[Tensor] = [*parameters]
    stay += [tensor for tensor in (contender.given, contender.gradient) if tensor is not None]
    if contender.optimizer is not None:
        # ZeroRedundancyOptimizer has one inside, of this rank's part.
        states = getattr(contender.optimizer, "optim", contender.optimizer).state.values()
        stay += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    for tensor in stay:
        storage = local(tensor.detach()).untyped_storage()
        sizes[storage_id(storage)] = storage.nbytes()
    return sum(sizes.values())


def _cube(name: str, work: Work, device: torch.device) -> Cube:
    shape, types = copied_cube(name, dist.get_world_size()), MixedPrecisionPolicy(compute=work.compute)
    return Cube(shape.x, shape.y, shape.z, shape.data, device=device, precision=types)


def copied_cube(text: str, processes: int) -> CubeShape:
    """A cube as `OwnName` has it, as often as there are processes for it.

    Raises:
        ValueError: they do not divide by its ranks, or it is written in another way.
    """
    text = OwnName.parse(text).cube
    ranks = CubeShape.parse(text).ranks
    if processes % ranks:
        raise ValueError(
            f"cube {text} has {ranks} ranks, and --processes is {processes}. Name cubes of that size or a divisor of "
            "it, or other --processes."
        )
    return CubeShape.parse(text, processes // ranks)

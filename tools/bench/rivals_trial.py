"""What a rank does for `bench rivals`: all contenders live in the same processes and work in turns."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tensor3d import Cube, CubeShape, local
from tools.bench.memory import PeakMemory
from tools.bench.peak import peak_on
from tools.bench.rivals_contender import RIVALS, Contender, make_ours, make_rival
from tools.bench.rivals_traffic import CollectiveCount
from tools.bench.rivals_work import Work


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
    """The most bytes of tensors at once in a step, `rest` among them."""
    resident: int | None
    """Growth of the process from before the model to after the warm-up. Contenders that were made before have left
    it pages to use again."""


class RivalsTrial:
    """All contenders on one rank, halted between calls.

    Args:
        cube: of all processes; its device is used, and that they are connected.
        names: those of `RIVALS`, and cubes as XxYxZ, in the order in which they are made.
        tensor_size: ranks of the tensor-parallel dimension of "tp+fsdp2".
        warmup: steps of each before the timed ones, at least 1.
    """

    def __init__(self, cube: Cube, work: Work, names: Sequence[str], tensor_size: int, warmup: int) -> None:
        # Of tp+fsdp2, whose layers return the local view of a DTensor. Nobody changes it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._work, self._device = work, cube.device
        self._contenders: dict[str, Contender] = {}
        self._facts: dict[str, RankFacts] = {}
        for name in names:
            memory = PeakMemory(cube.device)
            own = None if name in RIVALS else _cube(name, cube.device)
            contender = make_rival(name, work, cube.device, tensor_size) if own is None else make_ours(work, own)
            gc.collect()  # what splitting has left, such as whole weights
            losses = tuple(self._over_all(contender.step()) for _ in range(warmup))
            self._contenders[name] = contender
            self._facts[name] = self._observe(contender, own, losses, memory.growth())

    def turn(self, name: str, steps: int) -> list[float]:
        """Seconds of each step. One more goes first and counts for nothing: others had the caches in between."""
        contender = self._contenders[name]
        return [self._seconds(contender) for _ in range(1 + steps)][1:]

    def get_facts(self) -> dict[str, RankFacts]:
        return self._facts

    def close(self) -> None:
        """Nothing is open."""

    def _seconds(self, contender: Contender) -> float:
        dist.barrier()
        begin = perf_counter()
        contender.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter() - begin

    def _over_all(self, loss: Tensor) -> float:
        """Of the whole batch: a rank's loss is a mean over its share, or over the whole already."""
        total = loss.to(torch.float64)
        dist.all_reduce(total)
        return total.item() / (1 if self._work.what == "layer" else dist.get_world_size())

    def _observe(
        self, contender: Contender, cube: Cube | None, losses: tuple[float, ...], resident: int | None
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
            peak=rest + peak_on(self._device, contender.step),
            resident=resident,
        )


def resting_bytes(contender: Contender) -> int:
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
        states = contender.optimizer.state.values()
        stay += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    for tensor in stay:
        storage = local(tensor.detach()).untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _cube(name: str, device: torch.device) -> Cube:
    shape = CubeShape.parse(name)
    return Cube(shape.x, shape.y, shape.z, device=device)

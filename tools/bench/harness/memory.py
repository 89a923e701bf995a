"""The highest growth of a process's memory, where the system can tell."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from models.bert.cost_model.memory import held_bytes, kept_buckets, shadow_bytes
from tensor3d import Cube, local
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.data import PackedBatch
from tensor3d.distributed.shadow_weights import shadow_of
from tools.training.metrics.records import peak_resident
from tools.training.pretraining import PretrainTrainer

# --- The most tensor memory that a piece of code holds at once --------------------------------------------------------

_STANDARD_ERROR = 2


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that `run` holds at once of what it takes from torch's allocator of the CPU, above what was held
    before.

    Exact, and the same each time, where one thread allocates. Gloo's threads free their buffers when they get to it, so
    that with collectives it differs a little from run to run. It slows `run` down: time another one.
    """
    with without_notes(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def peak_on(device: torch.device, run: Callable[[], object]) -> int:
    """The same on any device; on a GPU by the counters of its allocator, at no cost."""
    if device.type != "cuda":
        return peak_bytes(run)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def without_notes() -> Iterator[None]:
    """Leaves out what the profiler of torch 2.13 writes to standard error about its own start and end, and that there
    was memory before; an environment variable alone could stop it. Whatever else is written meanwhile comes at the end.
    """
    sys.stderr.flush()
    before = os.dup(_STANDARD_ERROR)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, _STANDARD_ERROR)
            os.close(before)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:") and b"before the profiling started" not in line:
                    os.write(_STANDARD_ERROR, line)


# --- What autograd keeps for the backward passes of a model while it trains, counted ----------------------------------


class SavedTensors:
    """Counts what autograd keeps for backward of all that runs inside `hooks`: bytes of all storages, each counted once
    and whole, without those of the parameters and of their copies."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._saved: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def take(self) -> int:
        """The bytes, which are then forgotten."""
        copies = [copy for parameter in self._parameters if (copy := shadow_of(parameter)) is not None]
        stay = {each.untyped_storage().data_ptr() for each in (*map(local, self._parameters), *copies)}
        kept = (tensor for place, tensor in self._saved.items() if place not in stay)
        total = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        self._saved.clear()
        return total

    def _note(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            own = local(tensor).detach()
        self._saved[own.untyped_storage().data_ptr()] = own
        return tensor


@dataclass(frozen=True, kw_only=True)
class KeptPass:
    """One forward pass."""

    kept: int
    """Bytes that its backward will need (`SavedTensors`)."""
    batch: PackedBatch
    """What went in first."""


@contextmanager
def counting_kept(model: nn.Module) -> Iterator[list[KeptPass]]:
    """Inside, every forward pass of `model` adds its count to the list.

    What is made of the model's output, such as the product with a loss scale, is not in it.
    """
    passes: list[KeptPass] = []
    saved = SavedTensors(model.parameters())

    def begin(module: nn.Module, args: Any) -> None:
        saved.hooks.__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        saved.hooks.__exit__()
        total = saved.take()
        if output is not None:  # else it failed
            passes.append(KeptPass(kept=total, batch=args[0]))

    # Always: an exception would leave the hooks of autograd behind.
    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def wire_of(cube: Cube, parameter: torch.dtype) -> CommModel:
    """This rank, for the closed forms of what it receives.

    Args:
        parameter: type of the weights.
    """
    return CommModel(
        shape=cube.shape,
        rank=cube.rank,
        compute=cube.precision.computed(parameter).itemsize,
        gradient=cube.precision.reduced(parameter).itemsize,
        parameter=parameter.itemsize,
        weight_group_bytes=cube.speed.weight_group_bytes,
    )


def nonzero(count: Bytes) -> Bytes:
    """Without what is zero, so that counts compare equal."""
    return Counter({key: number for key, number in count.items() if number})


# --- Tensor memory of one rank in training, counted in a step ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes."""

    held: int
    """Weights and the optimiser's state, memory of gradients that stays (`ExecutionPolicy.keep_buckets`), and copies of
    weights (`ExecutionPolicy.shadow_weights`)."""
    held_closed_form: int | None
    """None: of this model no formula says it."""
    saved: int
    """What autograd keeps for backward, beside parameters, of the micro-batch that needs most."""
    peak: int | None
    """The most at once in the step, with what is held and the step's batches. On CPUs it differs a little from run to
    run: gloo's buffers are in it. None: it was not asked for."""


def count_memory(
    trainer: PretrainTrainer, wire: CommModel, step: Callable[[], object], *, peaks: bool = True
) -> RankMemory:
    """Counts in one step of the trainer, which takes longer than others.

    Args:
        wire: the rank and the sizes of its types.
        step: does a step of all ranks; the optimiser has done one before.
        peaks: also follow every allocation, which on a CPU takes a profiler.
    """

    def run() -> None:
        step()

    growth: int | None = None
    ledger = trainer.cube.ledger
    ledger.take_buckets()
    before = ledger.kept_bytes  # what comes only now is in the growth
    with counting_kept(trainer.model) as passes:
        if peaks:
            growth = peak_on(trainer.cube.device, run)
        else:
            run()
    own, stay = _held(trainer), ledger.kept_bytes
    formula = sum(held_bytes(trainer.model.config, wire, trainer.recipe.optimizer.shard_over_data))
    if ledger.keeps_buckets and len(passes) == 1:
        formula += kept_buckets(trainer.model.config, wire)
    if trainer.cube.speed.shadow_weights:
        formula += shadow_bytes(trainer.model.config, wire)
    batches = sum(_size(each.batch) for each in passes)
    return RankMemory(
        held=own + stay,
        held_closed_form=formula if trainer.recipe.replaced_tokens is None else None,
        saved=max(each.kept for each in passes),
        peak=None if growth is None else own + before + batches + growth,
    )


def _held(trainer: PretrainTrainer) -> int:
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return trainer.cube.shadows.kept_bytes + sum(
        local(tensor).nbytes for tensor in [*trainer.model.parameters(), *states] if isinstance(tensor, Tensor)
    )


def _size(batch: PackedBatch) -> int:
    """Bytes of its tensors, which the loader has made before the step; not of what layers have kept with it since."""
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)] + [batch.sequences.cu_seqlens]
    if batch.read is not None:
        tensors += [batch.read.rows, batch.read.plane_rows, *batch.read.heads]
    return sum(tensor.nbytes for tensor in tensors)


# --- The memory of a process and all that it has started, read while they run (Linux) ---------------------------------

_PROC = Path("/proc")


class TreeMemory:
    """Watches a process and its descendants from another thread, in a `with` block.

    A page that several processes share counts once in all (the proportional set size), so what they have in common,
    such as libraries, is not counted for each. Files that are mapped and read count while they are in memory.
    """

    def __init__(self, pid: int, every: float = 0.1) -> None:
        """
        Args:
            pid: the process.
            every: seconds between two readings; a peak between them is missed.
        """
        self.peak = 0
        """Bytes, at the highest reading."""
        self._pid, self._every = pid, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self.peak = max(self.peak, sum(proportional_set(pid) for pid in descendants(self._pid)))


def proportional_set(pid: int) -> int:
    """Bytes; 0 for a process that is gone or not ours."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def descendants(pid: int) -> list[int]:
    """The process, its children, theirs, and so on."""
    found = [pid]
    for parent in found:
        for tasks in (_PROC / str(parent) / "task").glob("*/children"):
            with suppress(OSError):
                found += [int(child) for child in tasks.read_text().split()]
    return found


# --- The highest growth of a process's memory, where the system can tell ----------------------------------------------

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures from construction on: tensors on a GPU, else the resident set of the process (Linux).

    The resident set also grows by the pages of libraries when they are first used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            self._before = peak_resident() if _reset_peak_resident() else None

    def growth(self) -> int | None:
        """Bytes at the highest point above those at construction. None where the system does not tell."""
        if self._before is None:
            return None
        cuda = self._device.type == "cuda"
        return (torch.cuda.max_memory_allocated(self._device) if cuda else peak_resident()) - self._before


def _reset_peak_resident() -> bool:
    """Sets the peak to what is resident now (Linux 4.0, Documentation/filesystems/proc.rst)."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:  # another system, or not allowed in this container
        return False
    return True

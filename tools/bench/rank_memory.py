"""Tensor memory of one rank in training: counted in a step, and by the closed forms for the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.bert.memory import StepMemory, step_memory
from tensor3d import local
from tensor3d.data import PackedBatch
from tensor3d.planning.traffic import Wire
from tools.bench.kept import KeptPass, counting_kept, load_of
from tools.bench.peak import peak_on
from tools.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes."""

    held: int
    """Weights and the optimiser's state."""
    held_closed_form: int
    saved: int
    """What autograd keeps for backward, beside parameters, of the micro-batch that needs most."""
    saved_closed_form: int
    """For the lengths of that one's sequences."""
    saved_equal: bool
    """Whether count and formulas agree on every micro-batch of the step."""
    peak: int | None
    """The most at once in the step, with what is held and the step's batches. On CPUs it differs a little from run to
    run: gloo's buffers are in it. None: it was not asked for."""
    peak_closed_form: int


def count_memory(trainer: Trainer, wire: Wire, step: Callable[[], object], *, peaks: bool = True) -> RankMemory:
    """Counts in one step of the trainer, which takes longer than others.

    Args:
        wire: the rank and the sizes of its types.
        step: does a step of all ranks; the optimiser has done one before.
        peaks: also follow every allocation, which on a CPU takes a profiler.
    """

    def run() -> None:
        step()

    growth: int | None = None
    with counting_kept(trainer.model) as passes:
        if peaks:
            growth = peak_on(trainer.cube.device, run)
        else:
            run()
    expected = [_expected(trainer, wire, each, len(passes)) for each in passes]
    most = max(range(len(passes)), key=lambda number: passes[number].kept)
    held = _held(trainer)
    batches = sum(_size(each.batch) for each in passes)
    return RankMemory(
        held=held,
        held_closed_form=expected[0].weights + expected[0].optimizer,
        saved=passes[most].kept,
        saved_closed_form=expected[most].saved.total,
        saved_equal=all(e.saved.total == p.kept for e, p in zip(expected, passes, strict=True)),
        peak=None if growth is None else held + batches + growth,
        peak_closed_form=max(each.peak for each in expected),
    )


def _held(trainer: Trainer) -> int:
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return sum(local(tensor).nbytes for tensor in [*trainer.model.parameters(), *states] if isinstance(tensor, Tensor))


def _size(batch: PackedBatch) -> int:
    """Bytes of its tensors, which the loader has made before the step; not of what layers have kept with it since."""
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)] + [batch.sequences.cu_seqlens]
    if batch.read is not None:
        chosen = batch.read.chosen
        tensors += [batch.read.masked, batch.read.first, chosen.rows, chosen.own.rows]
    return sum(tensor.nbytes for tensor in tensors)


def _expected(trainer: Trainer, wire: Wire, each: KeptPass, micro_batches: int) -> StepMemory:
    recipe, cuda = trainer.recipe, trainer.cube.device.type == "cuda"
    return step_memory(
        trainer.model.config,
        wire,
        load_of(each.batch),
        micro_batches=micro_batches,
        recompute=recipe.model.recompute,
        keep_gathered=recipe.model.keep_gathered,
        optimizer=recipe.optimizer.kind,
        device="cuda" if cuda else "cpu",
        wire_buffers=not cuda,
    )

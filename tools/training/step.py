"""One step of the optimiser, whatever is learnt. The host never waits for the device in it: its numbers are read when
they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tensor3d import CommStats, Cube, GradientNorm, clip_gradients
from tensor3d.distributed.watchdog import Watchdog
from tensor3d.optim import GradScaler
from tensor3d.optim.adam import ShardedAdamBase
from tools.training.profiling import PhaseTimer, StepTimes

# --- What is learnt, and from what ------------------------------------------------------------------------------------


class Batch(Protocol):
    """What a step is taken with; the same on every rank, or this rank's part of it."""

    @property
    def index(self) -> int:
        """The step's, from 0."""

    @property
    def sequences(self) -> int:
        """Over all ranks."""


B = TypeVar("B", bound=Batch)
T = TypeVar("T", bound=Batch, contravariant=True)


class Objective(Protocol[T]):
    """What a model learns from a batch."""

    sums: int
    """Numbers that `loss` returns beside the loss."""
    are_parts: bool
    """Whether these, and the loss, are this rank's part, of which those along data, x and z add up to that of all
    ranks, while members of y hold copies. They are summed with the norm; else they are the same on every rank."""

    def parts(self, batch: T) -> Sequence[Any]:
        """The micro-batches."""

    def loss(self, batch: T, part: Any) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch as its part of the step's, and (sums,) numbers to be added up over the parts, of
        which the first is the loss."""


# --- What a step has found out ----------------------------------------------------------------------------------------


class StepScalars(NamedTuple):
    """What the device has found out about a step; the same on every rank."""

    sums: tuple[float, ...]
    """Those of the objective."""
    gradient_norm: float
    """Before clipping, without the loss scale."""
    found_inf: float
    """1 if the step was skipped, else 0."""
    loss_scale: float
    stop_flags: float
    """Ranks that a signal has asked to stop."""

    @property
    def loss(self) -> float:
        """Nats."""
        return self.sums[0]


class AsyncScalars:
    """Numbers on their way from the device: those of the objective, then those of every step."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> StepScalars:
        """Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        *sums, norm, found_inf, scale, stop = self._host.tolist()
        return StepScalars(tuple(sums), norm, found_inf, scale, stop)


@dataclass(frozen=True, kw_only=True)
class PendingStep(Generic[B]):
    """A step that the device may still be at."""

    step: B
    learning_rate: float
    lap: StepTimes
    """Its times; to be read when `numbers` has come."""
    traffic: CommStats
    norm: GradientNorm
    """For whoever looks for what is not finite."""
    numbers: AsyncScalars
    stall: float
    """Seconds before the step that a checkpoint took."""


class TrainingStep(Generic[B]):
    """Forward and backward over the micro-batches, one norm of all gradients, the update.

    Args:
        scaler: multiplies the loss, for fp16. None: nothing does.
        clip: largest norm of the gradient.
        watch: is told what this rank does, and knows whether a signal asks it to stop.
        passes: forward and backward of a micro-batch as one (a batch, a part, what the loss is multiplied by), which
            gives the objective's sums. None: one after the other.
        skips: a step changes nothing where loss or gradient is not finite. With a scaler it never does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedAdamBase,
        scaler: GradScaler | None,
        cube: Cube,
        objective: Objective[B],
        *,
        clip: float,
        watch: Watchdog | None = None,
        passes: Callable[[B, Any, Tensor | None], Tensor] | None = None,
        skips: bool = True,
    ) -> None:
        self._passes = passes
        self._model, self._optimizer, self._scaler, self._cube = model, optimizer, scaler, cube
        self._objective, self._clip, self._watch, self._skips = objective, clip, watch, skips or scaler is not None
        self.stopwatch = PhaseTimer(cube.device)
        cube.ledger.observer = self.stopwatch.observe

    def take(self, step: B, learning_rate: float, stall: float) -> PendingStep[B]:
        """Does a step; its stopwatch has begun before, where the data was waited for."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        with self._cube.traffic.counting() as traffic:
            sums = self._forward_backward(step)
            self._at(step, "optimizer")
            stop = torch.full((1,), self._watch.stop_flag if self._watch else 0.0, device=self._cube.device)
            # A loss that is not finite is a step that went wrong, whatever its gradients are, and whoever sees it: the
            # members of y each have computed their own copy.
            flags = torch.cat([stop, (~sums[:1].isfinite()).to(stop.dtype)])
            norm, flags, sums = self._clipped(flags, sums)
            found_inf = torch.maximum(norm.found_inf, flags[1].clamp(max=1.0).to(norm.found_inf.dtype))
            scale = torch.ones_like(norm.found_inf) if self._scaler is None else self._scaler.scale.clone()
            self._update(found_inf)
        numbers = torch.stack([n.to(sums.dtype) for n in (norm.total, found_inf, scale)])
        return PendingStep(
            step=step,
            learning_rate=learning_rate,
            lap=self.stopwatch.end(),
            traffic=traffic,
            norm=norm,
            numbers=AsyncScalars(torch.cat([sums, numbers, flags[:1].to(sums.dtype)])),
            stall=stall,
        )

    def _forward_backward(self, step: B) -> Tensor:
        """All micro-batches; the sums of their losses and counts."""
        dtype = torch.promote_types(next(self._model.parameters()).dtype, torch.float32)
        total = torch.zeros(self._objective.sums, dtype=dtype, device=self._cube.device)
        parts = self._objective.parts(step)
        for number, part in enumerate(parts, start=1):
            self._at(step, "forward")
            if self._passes is not None:
                total += self._passes(step, part, None if self._scaler is None else self._scaler.scale)
                continue
            loss, sums = self._objective.loss(step, part)
            loss = loss if self._scaler is None else self._scaler.scaled(loss)
            self._at(step, "backward")
            with nullcontext() if number == len(parts) else self._cube.no_sync():
                loss.backward()
            total += sums
        return total

    def _clipped(self, flags: Tensor, sums: Tensor) -> tuple[GradientNorm, Tensor, Tensor]:
        """The norm, and the flags and the objective's sums of all ranks, which travel together."""
        along = flags
        if self._objective.are_parts:
            # Copies add nothing, unless they are not finite.
            own = sums if self._cube.axis("y").index == 0 else sums * 0.0
            along = torch.cat([flags.to(sums.dtype), own])
        scale = None if self._scaler is None else self._scaler.scale
        norm = clip_gradients(self._model.parameters(), self._clip, self._cube, loss_scale=scale, along=along)
        return norm, along[: len(flags)].to(flags.dtype), along[len(flags) :] if self._objective.are_parts else sums

    def _update(self, found_inf: Tensor) -> None:
        if self._skips:
            self._optimizer.found_inf = found_inf
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update(found_inf)

    def _at(self, step: B, phase: str) -> None:
        self.stopwatch.mark(phase)  # type: ignore[arg-type]
        if self._watch is not None:
            self._watch.at(step.index + 1, phase)

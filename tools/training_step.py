"""One step of the optimiser. The host never waits for the device in it: its numbers are read when they are there."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.bert import BertForPreTraining, PreTrainingOutput
from tensor3d import Cube, GradientNorm, TrafficCount, clip_gradients
from tensor3d.data import Step
from tensor3d.optim import AdamW, Lamb, LossScaler
from tensor3d.watch import Watch
from tools.stopwatch import Lap, Stopwatch


class Numbers(NamedTuple):
    """What the device has found out about a step, in the order in which `TrainingStep` puts it together; the same on
    every rank."""

    loss: float
    """Nats; so are the next two."""
    masked_lm_loss: float
    next_sentence_loss: float
    masked_lm_correct: float
    """Positions predicted right; the next are sentence pairs."""
    next_sentence_correct: float
    gradient_norm: float
    """Before clipping, without the loss scale."""
    found_inf: float
    """1 if the step was skipped, else 0."""
    loss_scale: float
    stop_flags: float
    """Ranks that a signal has asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step that the device may still be at."""

    step: Step
    learning_rate: float
    lap: Lap
    """Its times; to be read when `numbers` has come."""
    traffic: TrafficCount
    norm: GradientNorm
    """For whoever looks for what is not finite."""
    numbers: OnItsWay
    stall: float
    """Seconds before the step that a checkpoint took."""


class OnItsWay:
    """Numbers on their way from the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Numbers:
        """Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return Numbers(*self._host.tolist())


class TrainingStep:
    """Forward and backward over the micro-batches, one norm of all gradients, the update.

    Args:
        scaler: multiplies the loss, for fp16. None: nothing does.
        clip: largest norm of the gradient.
        watch: is told what this rank does, and knows whether a signal asks it to stop.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        optimizer: AdamW | Lamb,
        scaler: LossScaler | None,
        cube: Cube,
        *,
        clip: float,
        watch: Watch | None = None,
    ) -> None:
        self._model, self._optimizer, self._scaler, self._cube = model, optimizer, scaler, cube
        self._clip, self._watch = clip, watch
        self.stopwatch = Stopwatch(cube.device)
        cube.ledger.observer = self.stopwatch.observe

    def take(self, step: Step, learning_rate: float, stall: float) -> Taken:
        """Does a step; its stopwatch has begun before, where the data was waited for."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with self._cube.traffic.counting() as traffic:
            sums = self._forward_backward(step)
            self._at(step, "optimizer")
            stop = torch.full((1,), self._watch.stop_flag if self._watch else 0.0, device=self._cube.device)
            # A loss that is not finite is a step that went wrong, whatever its gradients are, and whoever sees it: the
            # members of y each have computed their own copy.
            flags = torch.cat([stop, (~sums[:1].isfinite()).to(stop.dtype)])
            norm = self._clipped(flags)
            found_inf = torch.maximum(norm.found_inf, flags[1].clamp(max=1.0).to(norm.found_inf.dtype))
            scale = torch.ones_like(norm.found_inf) if self._scaler is None else self._scaler.scale.clone()
            self._update(found_inf)
        numbers = torch.stack([n.to(sums.dtype) for n in (norm.total, found_inf, scale)])
        return Taken(
            step=step,
            learning_rate=learning_rate,
            lap=self.stopwatch.end(),
            traffic=traffic,
            norm=norm,
            numbers=OnItsWay(torch.cat([sums, numbers, flags[:1].to(sums.dtype)])),
            stall=stall,
        )

    def _forward_backward(self, step: Step) -> Tensor:
        """All micro-batches; the sums of their losses and counts."""
        dtype = torch.promote_types(next(self._model.parameters()).dtype, torch.float32)
        sums = torch.zeros(5, dtype=dtype, device=self._cube.device)
        for number, batch in enumerate(step.batches, start=1):
            last = number == len(step.batches)
            self._at(step, "forward")
            output: PreTrainingOutput = self._model(batch, step.targets, step.sequences)
            loss = output.loss if self._scaler is None else self._scaler.scaled(output.loss)
            self._at(step, "backward")
            with nullcontext() if last else self._cube.accumulating():
                loss.backward()
            sums += output.sums
        return sums

    def _clipped(self, flags: Tensor) -> GradientNorm:
        scale = None if self._scaler is None else self._scaler.scale
        return clip_gradients(self._model.parameters(), self._clip, self._cube, loss_scale=scale, along=flags)

    def _update(self, found_inf: Tensor) -> None:
        self._optimizer.found_inf = found_inf
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update(found_inf)

    def _at(self, step: Step, phase: str) -> None:
        self.stopwatch.mark(phase)  # type: ignore[arg-type]
        if self._watch is not None:
            self._watch.at(step.index + 1, phase)

"""A model on its way through the steps, whatever it learns, and how far it has come."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch

from tensor3d import Cube
from tensor3d.checkpoint import Checkpoints
from tensor3d.distributed.object_collectives import check_copies
from tensor3d.distributed.watchdog import Watchdog
from tensor3d.optim import GradScaler, LRSchedule
from tensor3d.optim.adam import ShardedAdamBase
from tools.training.factory import fp8_cut
from tools.training.metrics import EarlyStopping, EvaluationRecord, StepRecord
from tools.training.profiling import StepProfiler
from tools.training.step import B, Objective, PendingStep, StepScalars, TrainingStep

# --- How far a run has come, beside its weights -----------------------------------------------------------------------

Ending = Literal["steps", "target", "patience", "signal"]
"""Why a run ended: all steps done, accuracy reached, no better evaluation for too long, a signal."""
_SAVED = {"saved": True}
_COPIES_COMPARED_EVERY = 1000  # steps between comparisons of what ranks hold copies of; each save makes one too


@dataclass(kw_only=True)
class TrainState:
    """How far a run has come, beside its weights: the one record of it, for trainer and loop."""

    step: int = field(default=0, metadata=_SAVED)
    """Steps begun; of the last one the device may still be computing."""
    samples: int = field(default=0, metadata=_SAVED)
    """Sequences trained on."""
    skipped_steps: int = field(default=0, metadata=_SAVED)
    skipped_in_a_row: int = field(default=0, metadata=_SAVED)
    """Up to now."""
    evaluation_due: bool = field(default=False, metadata=_SAVED)
    """Whether an evaluation is still to be done before the next step; a signal may have kept it from being done."""
    seconds: float = field(default=0.0, metadata=_SAVED)
    """Of training up to the last checkpoint, or the end, evaluations and checkpoints included, restarts not."""
    ending: Ending | None = field(default=None, metadata=_SAVED)
    """Why the run ended, if it did."""
    best: EarlyStopping = field(default_factory=lambda: EarlyStopping(0))
    """The best evaluation. In checkpoints, under a name of its own."""
    stopping: bool = False
    """Whether the ranks are agreed to save and leave. This and what follows is of this process alone."""
    stall: float = 0.0
    """Seconds since the last step that a checkpoint took."""
    began: float = field(default_factory=time.monotonic)
    """Begin of the training, less what was done before."""
    remarks: list[str] = field(default_factory=list)
    """What is to be said of the latest steps; whoever shows them empties it."""

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        standing = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.metadata == _SAVED}
        return {"standing": standing, "best": self.best.to_dict()}

    @classmethod
    def of(cls, progress: Mapping[str, Any], patience: int) -> TrainState:
        """That of a checkpoint, from which a run goes on. Raises ValueError for what is no best evaluation."""
        known = {each.name for each in dataclasses.fields(cls) if each.metadata == _SAVED}
        told = {name: value for name, value in progress.get("standing", {}).items() if name in known}
        best = EarlyStopping(patience, progress.get("best"))
        return cls(**(told | {"step": progress["step"], "ending": None}), best=best)


# --- Step after step --------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=StepRecord)


class Trainer(ABC, Generic[B, M]):
    """A model, its optimiser and its state on one cube. Every rank makes one at the same time. Subclasses say what is
    learnt, from which batches, and what there is to tell of it.

    Arguments are those of `TrainingStep`, and:

    Args:
        rate: the learning rate by step.
        patience: evaluations in a row without a better one, after which to stop. 0: never.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: ShardedAdamBase,
        scaler: GradScaler | None,
        cube: Cube,
        objective: Objective[B],
        *,
        rate: LRSchedule,
        clip: float,
        patience: int = 0,
        watch: Watchdog | None = None,
        passes: Callable[[B, Any, torch.Tensor | None], torch.Tensor] | None = None,
        skips: bool = True,
    ) -> None:
        self.optimizer, self.scaler, self.cube, self.watch = optimizer, scaler, cube, watch
        self.learning_rate, self._model = rate, model
        self._cut_off = cube.fp8_scales.cut  # as was told; a cube may have trained another model before
        self.state = TrainState(best=EarlyStopping(patience))
        self._step = TrainingStep(
            model, optimizer, scaler, cube, objective, clip=clip, watch=watch, passes=passes, skips=skips
        )

    # --- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def batches(self) -> AbstractContextManager[Iterable[B]]:
        """Those of this rank, from the state's step to the end of the run."""

    @abstractmethod
    def metrics(self, taken: PendingStep[B], numbers: StepScalars) -> M:
        """What there is to tell of a step. Raises FloatingPointError, on every rank, where a run has diverged."""

    @abstractmethod
    def evaluate(self) -> EvaluationRecord | None:
        """How good the model is, the same on every rank; None where a signal has broken it off."""

    @abstractmethod
    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        """Begins a checkpoint of the steps done so far."""

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return True

    def reached(self, evaluation: Any) -> bool:
        """Whether the run has come to what it was to reach."""
        return False

    def before(self, step: B) -> None:
        """Called with every batch before its step."""

    # --- steps ----------------------------------------------------------------------------------------------------

    def steps(
        self,
        batches: Iterable[B],
        *,
        at_once: Callable[[int], bool] = lambda _: True,
        tracer: StepProfiler | None = None,
    ) -> Iterator[M]:
        """Trains on what is given. What the caller does between two steps is no step's time.

        Args:
            at_once: whether the numbers of a step are waited for before the next one is begun. Where they are not, the
                device has work while the host reads the numbers of the step before.
        """
        last: PendingStep[B] | None = None
        waiting = iter(batches)
        while True:
            self._step.stopwatch.begin()
            self._step.stopwatch.mark("data")
            self.at("data")
            step = next(waiting, None)
            if step is None:
                break
            taken = self._take(step, tracer)
            if last is not None:
                yield self._read(last)
            last = taken
            if at_once(step.index + 1):
                yield self._read(last)
                last = None
        if last is not None:
            yield self._read(last)

    def _take(self, step: B, tracer: StepProfiler | None) -> PendingStep[B]:
        self.before(step)
        if tracer is not None:
            tracer.begin(step.index + 1)
        stall, self.state.stall = self.state.stall, 0.0
        taken = self._step.take(step, self.learning_rate.at(step.index), stall)
        if tracer is not None:
            tracer.end(step.index + 1)
        self.state.step = step.index + 1
        self.state.samples += step.sequences
        if self.state.step % _COPIES_COMPARED_EVERY == 0:
            check_copies(dict(self._model.named_parameters()), self.cube)
        return taken

    def _read(self, taken: PendingStep[B]) -> M:
        """The numbers of a step, as soon as they are there."""
        numbers = taken.numbers.read()
        self.state.skipped_steps += int(numbers.found_inf)
        self.stop_if(numbers.stop_flags > 0)
        return self.metrics(taken, numbers)

    def stop_if(self, asked: bool) -> None:
        """`asked` is the same on every rank: from here on they are agreed to save and leave."""
        if asked and not self.state.stopping:
            self.state.stopping = True
            if self.watch is not None:
                self.watch.agreed()

    def note_what_was_cut_off(self) -> None:
        """Adds a remark where delayed scaling has cut something off since the last call. Waits for the device."""
        self._cut_off, told = fp8_cut(self.cube, self._cut_off)
        self.state.remarks += told

    def at(self, doing: str) -> None:
        """Tells the watch."""
        if self.watch is not None:
            self.watch.at(self.state.step + 1, doing)

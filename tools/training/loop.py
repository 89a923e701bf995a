"""A run, whatever is learnt: steps, and what comes between them: evaluations, checkpoints, ends."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from tensor3d.checkpoint import Checkpoints
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tools.training.metrics import RunLog
from tools.training.profiling import StepProfiler
from tools.training.trainer import Ending, Trainer


@dataclass(frozen=True, kw_only=True)
class LoopSchedule:
    """When what is done between the steps of a run."""

    steps: int
    evaluate_every: int = 0
    """Steps between evaluations; also at the end. 0: only when the trainer says that one is due."""
    checkpoint_every: int = 0
    """Steps between checkpoints; also at the end. 0: none."""
    keep_best: Literal["no", "marked", "alone"] = "no"
    """Whether the best evaluation's weights are saved: marked among the checkpoints, or as the only one."""
    must_save: bool = False
    """A checkpoint that cannot be written ends the run."""


class TrainLoop:
    """Trains until there is a reason to end. Every rank makes one, and all decide alike."""

    def __init__(
        self,
        trainer: Trainer[Any, Any],
        log: RunLog[Any, Any],
        checkpoints: Checkpoints,
        schedule: LoopSchedule,
        *,
        tracer: StepProfiler | None = None,
    ) -> None:
        self._trainer, self._log, self._checkpoints, self._tracer = trainer, log, checkpoints, tracer
        self._schedule = schedule
        self.unsaved = False
        """Whether the run has ended and its last checkpoint could not be written."""

    def to_the_end(self) -> Ending:
        """Trains from the state's step on; why it ended.

        Raises:
            ValueError: a checkpoint that must be saved was not; on every rank.
        """
        trainer, state = self._trainer, self._trainer.state
        state.began = time.monotonic() - state.seconds
        self._log.ready(state.samples)
        with trainer.batches() as batches:
            if state.evaluation_due and (ending := self._boundary()) is not None:
                return ending
            # A CPU has done a step when the host has: to read later would only delay what follows from its numbers.
            at_once = self._is_boundary if trainer.cube.device.type == "cuda" else lambda _: True
            for metrics in trainer.steps(batches, at_once=at_once, tracer=self._tracer):
                self._log.step(metrics)
                self._tell()
                if metrics.step < state.step or not self._is_boundary(metrics.step):
                    continue
                if (ending := self._boundary()) is not None:
                    return ending
        raise AssertionError("the batches ended before the run")

    def _is_boundary(self, done: int) -> bool:
        """Whether something has to be done after this step, so that its numbers are waited for."""
        state, schedule = self._trainer.state, self._schedule
        return (
            state.stopping
            or state.evaluation_due
            or done >= schedule.steps
            or self._is_due(done, schedule.evaluate_every)
            or self._is_due(done, schedule.checkpoint_every)
        )

    def _boundary(self) -> Ending | None:
        """Evaluation, checkpoint; why the run ends here, if it does."""
        trainer, schedule, state = self._trainer, self._schedule, self._trainer.state
        trainer.note_what_was_cut_off()
        self._tell()
        ending: Ending | None = "steps" if state.step >= schedule.steps else None
        improved = False
        due = state.evaluation_due or self._is_due(state.step, schedule.evaluate_every)
        state.evaluation_due = due and trainer.evaluates
        if state.evaluation_due and not state.stopping:
            self._log.evaluating(state.samples)
            evaluation = trainer.evaluate()
            if evaluation is not None:
                state.evaluation_due = False
                improved, patience_ended = state.best.update(evaluation)
                if trainer.reached(evaluation):
                    ending = "target"
                elif patience_ended and ending is None:
                    ending = "patience"
                self._log.evaluation(evaluation, best=improved, goes_on=ending is None)
        if state.stopping and (ending is None or state.evaluation_due):
            ending = "signal"
        state.ending = ending
        self._save_if_due(keep_best=improved and schedule.keep_best != "no")
        self._log.boundary(state.step, trainer.cube)
        if ending is not None:
            self._checkpoints.wait()
            state.seconds = time.monotonic() - state.began  # where no checkpoint is written, too
        self._report()
        if ending is not None:
            self._log.stopped(state.samples, reached=ending == "target")
        return ending

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self._schedule.steps)

    def _save_if_due(self, *, keep_best: bool) -> None:
        """A signal is followed by a checkpoint even where the recipe wants none: nothing is lost by it."""
        trainer, every = self._trainer, self._schedule.checkpoint_every
        ending, done = trainer.state.ending, trainer.state.step
        ends_early = ending in ("target", "patience") and every > 0
        if not (self._is_due(done, every) or ends_early or ending == "signal" or keep_best):
            return
        self._log.flush()  # first, so that a run that resumes from the checkpoint has no gap
        if keep_best and self._schedule.keep_best == "marked":
            self._checkpoints.mark_best(done)
        trainer.save(self._checkpoints, wait=ending is not None)
        if self._schedule.must_save or ending is None:
            return
        if not self._saved():
            trainer.save(self._checkpoints, wait=True)
            self.unsaved = not self._saved()

    def _saved(self) -> bool:
        """Whether the save that was waited for has succeeded; the same on every rank."""
        outcomes = self._checkpoints.finished()
        for outcome in outcomes:
            self._log.checkpoint(outcome)
        return outcomes[-1].path is not None

    def _tell(self) -> None:
        for remark in self._trainer.state.remarks:
            self._log.say(remark)
            self._log.event("remark", text=remark)
        self._trainer.state.remarks.clear()

    def _report(self) -> None:
        outcomes = self._checkpoints.finished()
        for outcome in outcomes:
            self._log.checkpoint(outcome)

        def check() -> None:
            for outcome in outcomes:
                if outcome.path is None:
                    raise OSError(outcome.error)

        if self._schedule.must_save:
            run_on_all_ranks(self._trainer.cube, check)

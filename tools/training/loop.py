"""A run: steps, and what comes between them: evaluations, checkpoints, ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from models.bert import BertForPreTraining
from tensor3d import Cube
from tensor3d.checkpoint import Checkpoints
from tensor3d.data import PretrainingData, evaluation_batches
from tensor3d.distributed.collectives import all_reduce
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.training.data import held_out_data
from tools.training.metrics import ConsoleLogger, EvaluationMetrics, MemoryMetrics, next_sentence_accuracy, peak_memory
from tools.training.mlperf_log import MLPerfLog
from tools.training.profiling import StepProfiler
from tools.training.trainer import Ending, Trainer

# --- Evaluation on the held-out documents -----------------------------------------------------------------------------


@torch.no_grad()
def held_out_means(
    model: BertForPreTraining, data: PretrainingData, cube: Cube, packs_per_rank: int, goes_on: Callable[[int], bool]
) -> dict[str, float] | None:
    """Means over all packs of `data`, under the names of `EvaluationMetrics`, as far as there are any. Every rank calls
    it.

    Args:
        goes_on: asked before each batch, from 1, with the same answer on every rank; where it is no, None is returned.
    """
    model.eval()
    sums, targets, sequences = torch.zeros(5, dtype=torch.float64), 0, 0
    batches = evaluation_batches(
        data,
        shape=cube.shape,
        rank=cube.rank,
        packs_per_rank=packs_per_rank,
        device=cube.device,
        with_read_rows=model.bert.read_rows_only,
    )
    for number, batch in enumerate(batches, start=1):
        if not goes_on(number):
            model.train()
            return None
        output = model(batch.batches[0], 1, 1)  # sums, to be divided by what all batches have together
        sums += output.sums.double().cpu()
        targets, sequences = targets + batch.targets, sequences + batch.sequences
    model.train()
    _, mlm, nsp, correct, pairs = sums.tolist()
    means = {
        "loss": mlm / targets + nsp / sequences,
        "masked_lm_loss": mlm / targets,
        "masked_lm_accuracy": correct / targets,
    }
    accuracy = next_sentence_accuracy(pairs, nsp, sequences)
    return means if accuracy is None else means | {"next_sentence_accuracy": accuracy}


# --- A run ------------------------------------------------------------------------------------------------------------


class TrainLoop:
    """Trains until there is a reason to end. Every rank makes one, and all decide alike.

    Args:
        trainer: made with a corpus.
    """

    def __init__(
        self,
        trainer: Trainer,
        display: ConsoleLogger,
        checkpoints: Checkpoints,
        *,
        mllog: MLPerfLog | None = None,
        tracer: StepProfiler | None = None,
    ) -> None:
        self._trainer, self._display, self._checkpoints, self._tracer = trainer, display, checkpoints, tracer
        self._mllog = mllog or MLPerfLog(shown=False)
        self._held_out: PretrainingData | None = None
        self.unsaved = False
        """Whether the run has ended and its last checkpoint could not be written."""

    def to_the_end(self) -> Ending:
        """Trains from the first step on; why it ended."""
        trainer, run = self._trainer, self._trainer.recipe.run
        trainer.began = time.monotonic() - trainer.standing.seconds
        self._mllog.ready(trainer.standing.samples)
        with trainer.feed.loader(trainer.standing.step, run.steps) as loader:
            packs = loader.layout.packs_per_rank
            if trainer.standing.evaluation_due and (ending := self._boundary(packs)) is not None:
                return ending
            # A CPU has done a step when the host has: to read later would only delay what follows from its numbers.
            at_once = self._is_boundary if trainer.cube.device.type == "cuda" else lambda _: True
            for metrics in trainer.steps(loader, at_once=at_once, tracer=self._tracer):
                self._display.step(metrics)
                self._tell()
                if metrics.step < trainer.taken or not self._is_boundary(metrics.step):
                    continue
                if (ending := self._boundary(packs)) is not None:
                    return ending
        raise AssertionError("the loader ended before the run")

    def _is_boundary(self, done: int) -> bool:
        """Whether something has to be done after this step, so that its numbers are waited for."""
        trainer, run = self._trainer, self._trainer.recipe.run
        return (
            trainer.stopping
            or trainer.samples_due
            or done >= run.steps
            or _is_due(done, run.evaluate_every, run.steps)
            or _is_due(done, run.checkpoint_every, run.steps)
        )

    def _boundary(self, packs_per_rank: int) -> Ending | None:
        """Evaluation, checkpoint; why the run ends here, if it does."""
        trainer, run, standing = self._trainer, self._trainer.recipe.run, self._trainer.standing
        ending: Ending | None = "steps" if standing.step >= run.steps else None
        improved = False
        standing.evaluation_due = standing.evaluation_due or self._evaluates(standing.step)
        if standing.evaluation_due and not trainer.stopping:
            self._mllog.evaluating(standing.samples)
            evaluation = self.evaluate(packs_per_rank)
            if evaluation is not None:
                standing.evaluation_due = False
                self._display.evaluation(evaluation)
                improved, patience_ended = trainer.best.update(evaluation)
                if run.target_accuracy and evaluation.masked_lm_accuracy >= run.target_accuracy:
                    ending = "target"
                elif patience_ended and ending is None:
                    ending = "patience"
                self._mllog.evaluated(standing.samples, evaluation.masked_lm_accuracy, goes_on=ending is None)
        if trainer.stopping and (ending is None or standing.evaluation_due):
            ending = "signal"
        standing.ending = ending
        self._save_if_due(keep_best=improved and run.patience > 0)
        self._display.memory(MemoryMetrics(step=standing.step, peak_bytes=peak_memory(trainer.cube)))
        if ending is not None:
            self._checkpoints.wait()
        self._report()
        if ending is not None:
            self._mllog.stopped(standing.samples, reached=ending == "target")
        return ending

    def _evaluates(self, done: int) -> bool:
        trainer, run = self._trainer, self._trainer.recipe.run
        last = done >= run.steps and run.evaluate_every_samples > 0
        due = trainer.samples_due or last or _is_due(done, run.evaluate_every, run.steps)
        trainer.samples_due = False
        return due and trainer.needed_corpus.info.has_held_out

    def _save_if_due(self, *, keep_best: bool) -> None:
        """A signal is followed by a checkpoint even where the recipe wants none: nothing is lost by it."""
        trainer, run = self._trainer, self._trainer.recipe.run
        ending, done = trainer.standing.ending, trainer.standing.step
        ends_early = ending in ("target", "patience") and run.checkpoint_every > 0
        if not (_is_due(done, run.checkpoint_every, run.steps) or ends_early or ending == "signal" or keep_best):
            return
        self._display.flush()  # first, so that a run that resumes from the checkpoint has no gap
        if keep_best:
            self._checkpoints.mark_best(done)
        trainer.save(self._checkpoints, wait=ending is not None)
        if ending is not None and not self._saved():
            trainer.save(self._checkpoints, wait=True)
            self.unsaved = not self._saved()

    def _saved(self) -> bool:
        """Whether the save that was waited for has succeeded; the same on every rank."""
        outcomes = self._checkpoints.finished()
        for outcome in outcomes:
            self._display.checkpoint(outcome)
        return outcomes[-1].path is not None

    def _tell(self) -> None:
        for remark in self._trainer.remarks:
            self._display.say(remark)
            self._display.event("remark", text=remark)
        self._trainer.remarks.clear()

    def _report(self) -> None:
        for outcome in self._checkpoints.finished():
            self._display.checkpoint(outcome)

    def evaluate(self, packs_per_rank: int) -> EvaluationMetrics | None:
        """The means over all held-out packs; None where a signal has broken it off."""
        trainer, cube = self._trainer, self._trainer.cube
        if self._held_out is None:
            self._held_out = held_out_data(trainer.recipe, trainer.needed_corpus)

        def goes_on(batch: int) -> bool:
            trainer.at(f"evaluation, batch {batch}")
            flag = torch.full((1,), trainer.watch.stop_flag if trainer.watch else 0.0, device=cube.device)
            trainer.stop_if(float(all_reduce(flag, cube.over("data", "x", "y", "z")).wait()) > 0)
            return not trainer.stopping

        own = held_out_means(trainer.model, self._held_out, cube, packs_per_rank, goes_on)
        if own is None:
            return None
        # Those of one rank: what follows from them must be the same on all, and a last bit may differ between copies.
        means = run_on_rank0(cube, lambda: own)
        return EvaluationMetrics(step=trainer.standing.step, samples=trainer.standing.samples, **means)


def _is_due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)

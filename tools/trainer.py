"""Pre-training: the loop, without command line or files of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from models.bert import BertForPreTraining
from models.bert.flops import model_flops
from tensor3d import Cube, check_parameters, checkpoint
from tensor3d.checkpoint import Checkpoints
from tensor3d.data import Loader, PretrainingData, Step
from tensor3d.watch import Watch
from tools.agree import check_equal
from tools.building import learning_rate, make_optimizer, make_scaler, peak_type, precision
from tools.corpus.info import Corpus
from tools.divergence import LossWatch, first_non_finite
from tools.feed import Feed, held_out_data
from tools.held_out import held_out_means
from tools.metrics import Best, Display, EvaluationMetrics, MemoryMetrics, StepMetrics, by_axis, peak_memory
from tools.mllog import MLPerfLog
from tools.peaks import peak
from tools.profiler import Tracer
from tools.recipe import Recipe
from tools.resume import check_resume, check_start, facts_of
from tools.training_step import Numbers, Taken, TrainingStep

Ending = Literal["steps", "target", "patience", "signal"]
"""Why a run ended: all steps done, accuracy reached, no better evaluation for too long, a signal."""

POSITIONS = "bert.embeddings.positions.weight"
_SKIPPED_IN_A_ROW = 25  # as often as a loss scale of 2**16 can be halved and still mean something


@dataclass(kw_only=True)
class Standing:
    """How far a run has come, beside its weights; kept in its checkpoints."""

    step: int = 0
    """Steps done."""
    samples: int = 0
    """Sequences trained on."""
    skipped_steps: int = 0
    seconds: float = 0.0
    """Of training so far, evaluations and checkpoints included, restarts not."""


class Trainer:
    """A model, its optimiser and its data on one cube. Every rank makes one at the same time.

    Args:
        feed: what it trains on; whoever made it closes it.
        corpus: where that comes from, for evaluation and checkpoints. None: there is neither.
        watch: is told where this rank is, and knows of signals.
        mllog: gets MLPerf's lines.

    Raises:
        ValueError: sizes or a batch that do not divide on this cube.
    """

    def __init__(
        self,
        recipe: Recipe,
        cube: Cube,
        feed: Feed,
        corpus: Corpus | None,
        *,
        watch: Watch | None = None,
        mllog: MLPerfLog | None = None,
    ) -> None:
        cube = cube.computing(precision(recipe.precision))
        self.recipe, self.cube, self.feed, self.corpus = recipe, cube, feed, corpus
        cube.manual_seed(recipe.run.seed)
        config, memory = recipe.model.config(recipe.data), recipe.model
        self.model = BertForPreTraining(config, cube, recompute=memory.recompute, keep_gathered=memory.keep_gathered)
        check_parameters(self.model.parameters(), cube)
        self.optimizer = make_optimizer(self.model, recipe.optimizer, cube, self.feed.betas())
        self.scaler = make_scaler(recipe, cube)
        self.learning_rate = learning_rate(recipe.optimizer, recipe.run.steps)
        self.standing = Standing()
        self.best = Best(recipe.run.patience)
        self.mllog = mllog or MLPerfLog(shown=False)
        self._watch = watch
        self._step = TrainingStep(
            self.model, self.optimizer, self.scaler, cube, clip=recipe.optimizer.clip, watch=watch
        )
        self._spikes = LossWatch(factor=recipe.run.loss_spike)
        self._peak = recipe.run.peak_tflops * 1e12 or peak(cube.device, peak_type(recipe.precision))
        self._held_out: PretrainingData | None = None
        self._compared_epoch = 0  # by the feed
        self._taken = 0  # steps, of which the last may still be on its way
        self._samples_due = False
        self._skipped_in_a_row = 0
        self._stopping = False
        self._stall = 0.0
        self.remarks: list[str] = []
        """What is to be said of the latest steps; whoever shows them empties it."""

    @property
    def parameters(self) -> int:
        """Numbers in the logical model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def first_step(self) -> int:
        """Steps done before this process."""
        return self.standing.step

    @property
    def _needed_corpus(self) -> Corpus:
        assert self.corpus is not None, "a trainer without a corpus can neither evaluate nor save"
        return self.corpus

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def resume(self, folder: Path) -> None:
        """Continues from a checkpoint, written on any cube.

        Raises:
            ValueError: `folder` is no checkpoint, is damaged, or one of another model, corpus or batch.
        """
        progress = checkpoint.read_progress(folder)
        check_resume(progress, self.recipe, self._needed_corpus)
        standing = Standing(step=progress["step"], **progress.get("standing", {}))
        best = Best(self.recipe.run.patience, progress.get("best"))
        checkpoint.load(folder, self.model, self.optimizer, self.cube, extra=self._extra())
        self.standing, self.best = standing, best

    def start_from(self, folder: Path) -> None:
        """Takes weights and moments of another run, such as the first phase of two, and begins at step 0 with the
        schedule and the data of this one. The position table may have grown: further rows are new.

        Raises:
            ValueError: `folder` is no checkpoint, is damaged, or one of another model or tokenizer.
        """
        check_start(checkpoint.read_progress(folder), self.recipe, self._needed_corpus)
        checkpoint.load(folder, self.model, self.optimizer, self.cube, grows=(POSITIONS,))
        self.cube.manual_seed(self.recipe.run.seed)  # this run's own streams

    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        """Begins a checkpoint of the steps done so far."""
        standing = vars(self.standing) | {}
        progress: dict[str, Any] = facts_of(self.recipe, self._needed_corpus)
        progress |= {"standing": {k: v for k, v in standing.items() if k != "step"}, "best": self.best.to_dict()}
        self._at("checkpoint")
        self._stall += checkpoints.save(
            self.standing.step, self.model, self.optimizer, progress, self._extra(), wait=wait
        )

    def _extra(self) -> dict[str, torch.Tensor]:
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self, display: Display, checkpoints: Checkpoints, tracer: Tracer | None = None) -> Ending:
        """Trains from the first step on, with evaluations and checkpoints on the way."""
        run, begin, before = self.recipe.run, time.monotonic(), self.standing.seconds
        self.mllog.ready(self.standing.samples)
        with self.feed.loader(self.standing.step, run.steps) as loader:
            for metrics in self.steps(loader, at_once=self._is_boundary, tracer=tracer):
                display.step(metrics)
                self._tell(display)
                if metrics.step < self._taken or not self._is_boundary(metrics.step):
                    continue
                self.standing.seconds = before + time.monotonic() - begin
                ending = self._boundary(metrics.step, display, checkpoints, loader.layout.packs_per_rank)
                self._report(display, checkpoints)
                if ending is not None:
                    checkpoints.wait()
                    self._report(display, checkpoints)
                    self.mllog.stopped(self.standing.samples, reached=ending == "target")
                    return ending
        raise AssertionError("the loader ended before the run")

    def steps(
        self, loader: Loader, *, at_once: Callable[[int], bool] = lambda _: True, tracer: Tracer | None = None
    ) -> Iterator[StepMetrics]:
        """Trains on what the loader gives. What the caller does between two steps is no step's time.

        Args:
            at_once: whether the numbers of a step are waited for before the next one is begun. Where they are not, the
                device has work while the host reads the numbers of the step before.
        """
        last: Taken | None = None
        batches = iter(loader)
        while True:
            self._step.stopwatch.begin()
            self._step.stopwatch.mark("data")
            self._at("data")
            step = next(batches, None)
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

    def loader(self) -> Loader:
        """The steps from the first one on, for this rank, endless for whoever counts them himself. To be closed, best
        by a `with`."""
        return self.feed.loader(self.standing.step)

    def _take(self, step: Step, tracer: Tracer | None) -> Taken:
        self._compare(step)
        if tracer is not None:
            tracer.begin(step.index + 1)
        stall, self._stall = self._stall, 0.0
        taken = self._step.take(step, self.learning_rate.at(step.index), stall)
        if tracer is not None:
            tracer.end(step.index + 1)
        every, before = self.recipe.run.evaluate_every_samples, self.standing.samples
        self.standing.step = self._taken = step.index + 1
        self.standing.samples += step.sequences
        self._samples_due = every > 0 and before // every < self.standing.samples // every
        return taken

    def _compare(self, step: Step) -> None:
        """Makes sure, once an epoch, that all ranks have packed it alike. Raises ValueError on every rank if not."""
        for epoch, digest in step.digests.items():
            if epoch > self._compared_epoch:
                check_equal(self.cube, f"the packing of epoch {epoch}", digest)
                self._compared_epoch = epoch

    def _read(self, taken: Taken) -> StepMetrics:
        """The numbers of a step, as soon as they are there."""
        numbers, step, traffic = taken.numbers.read(), taken.step, taken.traffic
        self.standing.skipped_steps += int(numbers.found_inf)
        self._stopping = self._stopping or numbers.stop_flags > 0
        self._judge(taken, numbers)
        times = taken.lap.seconds()
        seconds = sum(times.values())
        flops = model_flops(self.model.config, step.tokens, step.squares, step.targets, step.sequences)
        per_device = flops / seconds / self.cube.shape.ranks
        return StepMetrics(
            step=step.index + 1,
            loss=numbers.loss,
            masked_lm_loss=numbers.masked_lm_loss,
            next_sentence_loss=numbers.next_sentence_loss,
            masked_lm_accuracy=numbers.masked_lm_correct / step.targets,
            next_sentence_accuracy=numbers.next_sentence_correct / step.sequences,
            learning_rate=taken.learning_rate,
            gradient_norm=numbers.gradient_norm,
            loss_scale=numbers.loss_scale,
            skipped=bool(numbers.found_inf),
            skipped_steps=self.standing.skipped_steps,
            seconds=seconds,
            tokens_per_second=step.tokens / seconds,
            model_tflops=per_device / 1e12,
            mfu=per_device / self._peak if self._peak else None,
            data_wait_seconds=times.get("data", 0.0),
            forward_seconds=times.get("forward", 0.0),
            backward_seconds=times.get("backward", 0.0),
            gradient_sum_seconds=times.get("gradient_sum", 0.0),
            optimizer_seconds=times.get("optimizer", 0.0),
            checkpoint_seconds=taken.stall,
            fill=step.fill,
            imbalance=step.imbalance,
            bytes_received=traffic.total_bytes,
            collectives=traffic.total_calls,
            traffic=by_axis(traffic.received),
        )

    def _judge(self, taken: Taken, numbers: Numbers) -> None:
        """Notes what is odd about a step. Raises FloatingPointError, on every rank, where a run has diverged."""
        number = taken.step.index + 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if numbers.found_inf else 0
        # With fp16 a step is skipped now and then, to find the loss scale.
        worth_saying = self._skipped_in_a_row == (1 if self.scaler is None else _SKIPPED_IN_A_ROW)
        if numbers.found_inf and (worth_saying or self._skipped_in_a_row == _SKIPPED_IN_A_ROW):
            where = first_non_finite(self.model.named_parameters(), self.cube, norms=taken.norm.parts)
            told = f"step {number}: loss {numbers.loss}, gradient norm {numbers.gradient_norm}: {where}"
            if self._skipped_in_a_row == _SKIPPED_IN_A_ROW:
                raise FloatingPointError(
                    f"{told}. {_SKIPPED_IN_A_ROW} steps in a row were skipped. Lower the learning rate, or resume from "
                    "an earlier checkpoint with another seed."
                )
            self.remarks.append(f"{told}. The step is skipped.")
        if spike := self._spikes.update(number, numbers.loss):
            self.remarks.append(spike)

    # --- between steps --------------------------------------------------------------------------------------------

    def _is_boundary(self, done: int) -> bool:
        """Whether something has to be done after this step, so that its numbers are waited for."""
        run = self.recipe.run
        return (
            self._stopping
            or self._samples_due
            or done >= run.steps
            or _is_due(done, run.evaluate_every, run.steps)
            or _is_due(done, run.checkpoint_every, run.steps)
        )

    def _boundary(self, done: int, display: Display, checkpoints: Checkpoints, packs_per_rank: int) -> Ending | None:
        """Evaluation, checkpoint; why the run ends here, if it does."""
        run = self.recipe.run
        ending: Ending | None = "steps" if done >= run.steps else None
        improved = False
        if self._stopping and ending is None:
            ending = "signal"
        elif self._evaluates(done):
            self.mllog.evaluating(self.standing.samples)
            evaluation = self.evaluate(done, packs_per_rank)
            display.evaluation(evaluation)
            improved, patience_ended = self.best.update(evaluation)
            if run.target_accuracy and evaluation.masked_lm_accuracy >= run.target_accuracy:
                ending = "target"
            elif patience_ended and ending is None:
                ending = "patience"
            self.mllog.evaluated(self.standing.samples, evaluation.masked_lm_accuracy, goes_on=ending is None)
        self._save_if_due(done, display, checkpoints, ending, keep_best=improved and run.patience > 0)
        display.memory(MemoryMetrics(step=done, peak_bytes=peak_memory(self.cube)))
        return ending

    def _evaluates(self, done: int) -> bool:
        run = self.recipe.run
        last = done >= run.steps and run.evaluate_every_samples > 0
        due = self._samples_due or last or _is_due(done, run.evaluate_every, run.steps)
        return due and self._needed_corpus.info.held_out_documents > 0

    def _save_if_due(
        self, done: int, display: Display, checkpoints: Checkpoints, ending: Ending | None, *, keep_best: bool
    ) -> None:
        """A signal is followed by a checkpoint even where the recipe wants none: nothing is lost by it."""
        every = self.recipe.run.checkpoint_every
        ends_early = ending in ("target", "patience") and every > 0
        if not (_is_due(done, every, self.recipe.run.steps) or ends_early or ending == "signal" or keep_best):
            return
        if self._watch is not None and ending == "signal":
            self._watch.agreed()
        display.flush()  # first, so that a run that resumes from the checkpoint has no gap
        if keep_best:
            checkpoints.mark_best(done)
        self.save(checkpoints, wait=ending is not None)

    def _tell(self, display: Display) -> None:
        for remark in self.remarks:
            display.say(remark)
            display.event("remark", text=remark)
        self.remarks.clear()

    def _report(self, display: Display, checkpoints: Checkpoints) -> None:
        for outcome in checkpoints.finished():
            display.checkpoint(outcome)

    def evaluate(self, step: int, packs_per_rank: int) -> EvaluationMetrics:
        """The means over all held-out packs."""
        if self._held_out is None:
            self._held_out = held_out_data(self.recipe, self._needed_corpus)
        sums = held_out_means(self.model, self._held_out, self.cube, packs_per_rank, self._at)
        return EvaluationMetrics(step=step, samples=self.standing.samples, **sums)

    def _at(self, doing: str) -> None:
        if self._watch is not None:
            self._watch.at(self.standing.step + 1, doing)


def _is_due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)

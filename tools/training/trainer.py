"""Pre-training: model, optimiser and data, step by step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from models.bert import BertForPreTraining, PreTrainingOutput
from models.bert.cost_model.flops import step_flops
from tensor3d import CommStats, Cube, GradientNorm, check_parameters, checkpoint, clip_gradients
from tensor3d.checkpoint import Checkpoints
from tensor3d.data import Loader, TrainBatch
from tensor3d.distributed.object_collectives import (
    check_same_on_all_ranks,
    run_on_all_ranks,
    run_on_rank0,
)
from tensor3d.distributed.seeds import mix
from tensor3d.distributed.watchdog import Watchdog
from tensor3d.optim import AdamW, GradScaler, Lamb
from tools.corpus.training_corpus import TrainingCorpus
from tools.training.config import TrainConfig
from tools.training.data import TrainData
from tools.training.factory import (
    check_attention,
    learning_rate,
    make_optimizer,
    make_scaler,
    peak_type,
    precision,
    speed,
)
from tools.training.loss_monitor import LossSpikeDetector, first_non_finite
from tools.training.metrics import EarlyStopping, StepMetrics, by_axis, next_sentence_accuracy
from tools.training.peak_flops import peak
from tools.training.profiling import PhaseTimer, StepProfiler, StepTimes
from tools.training.resume import begin_with, check_resume, differences, ended, facts_of

# ----------------------------------------------------------------------------------------------------------------------
# One step of the optimiser. The host never waits for the device in it: its numbers are read when they are there.


class StepScalars(NamedTuple):
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
class PendingStep:
    """A step that the device may still be at."""

    step: TrainBatch
    learning_rate: float
    lap: StepTimes
    """Its times; to be read when `numbers` has come."""
    traffic: CommStats
    norm: GradientNorm
    """For whoever looks for what is not finite."""
    numbers: AsyncScalars
    stall: float
    """Seconds before the step that a checkpoint took."""


class AsyncScalars:
    """Numbers on their way from the device."""

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
        return StepScalars(*self._host.tolist())


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
        scaler: GradScaler | None,
        cube: Cube,
        *,
        clip: float,
        watch: Watchdog | None = None,
    ) -> None:
        self._model, self._optimizer, self._scaler, self._cube = model, optimizer, scaler, cube
        self._clip, self._watch = clip, watch
        self.stopwatch = PhaseTimer(cube.device)
        cube.ledger.observer = self.stopwatch.observe

    def take(self, step: TrainBatch, learning_rate: float, stall: float) -> PendingStep:
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
        return PendingStep(
            step=step,
            learning_rate=learning_rate,
            lap=self.stopwatch.end(),
            traffic=traffic,
            norm=norm,
            numbers=AsyncScalars(torch.cat([sums, numbers, flags[:1].to(sums.dtype)])),
            stall=stall,
        )

    def _forward_backward(self, step: TrainBatch) -> Tensor:
        """All micro-batches; the sums of their losses and counts."""
        dtype = torch.promote_types(next(self._model.parameters()).dtype, torch.float32)
        sums = torch.zeros(5, dtype=dtype, device=self._cube.device)
        for number, batch in enumerate(step.batches, start=1):
            last = number == len(step.batches)
            self._at(step, "forward")
            output: PreTrainingOutput = self._model(batch, step.targets, step.sequences)
            loss = output.loss if self._scaler is None else self._scaler.scaled(output.loss)
            self._at(step, "backward")
            with nullcontext() if last else self._cube.no_sync():
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

    def _at(self, step: TrainBatch, phase: str) -> None:
        self.stopwatch.mark(phase)  # type: ignore[arg-type]
        if self._watch is not None:
            self._watch.at(step.index + 1, phase)


# --- How far a run has come, beside its weights -----------------------------------------------------------------------

Ending = Literal["steps", "target", "patience", "signal"]
"""Why a run ended: all steps done, accuracy reached, no better evaluation for too long, a signal."""


@dataclass(kw_only=True)
class TrainState:
    """How far a run has come, beside its weights; kept in its checkpoints."""

    step: int = 0
    """Steps done."""
    samples: int = 0
    """Sequences trained on."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """Up to now."""
    evaluation_due: bool = False
    """Whether a signal has kept the evaluation of this step from being done; it then comes first."""
    seconds: float = 0.0
    """Of training so far, evaluations and checkpoints included, restarts not."""
    ending: Ending | None = None
    """Why the run ended, if it did."""

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> TrainState:
        """That of a checkpoint."""
        known = {field.name for field in dataclasses.fields(cls)}
        told = {name: value for name, value in progress.get("standing", {}).items() if name in known}
        return cls(**(told | {"step": progress["step"]}))


# --- Pre-training -----------------------------------------------------------------------------------------------------

_SKIPPED_IN_A_ROW = 25  # as often as a loss scale of 2**16 can be halved and still mean something


class Trainer:
    """A model, its optimiser and its data on one cube. Every rank makes one at the same time.

    Args:
        feed: what it trains on; whoever made it closes it.
        corpus: where that comes from, for evaluation and checkpoints. None: there is neither.
        watch: is told where this rank is, and knows of signals.

    Raises:
        ValueError: sizes or a batch that do not divide on this cube, kernels that cannot serve the model on its device.
    """

    def __init__(
        self,
        recipe: TrainConfig,
        cube: Cube,
        feed: TrainData,
        corpus: TrainingCorpus | None,
        *,
        watch: Watchdog | None = None,
    ) -> None:
        check_attention(recipe, "cuda" if cube.device.type == "cuda" else "cpu")
        cube = cube.with_policy(precision(recipe.precision), speed(recipe.speed))
        self.recipe, self.cube, self.feed, self.corpus = recipe, cube, feed, corpus
        cube.manual_seed(recipe.run.seed)
        config, memory = recipe.model.config(recipe.data), recipe.model
        self.model = BertForPreTraining(
            config,
            cube,
            backend=recipe.speed.attention,
            recompute=memory.recompute,
            reshard_after_forward=memory.reshard_after_forward,
            read_rows_only=recipe.speed.read_rows_only,
        )
        check_parameters(self.model.parameters(), cube)
        self.optimizer = make_optimizer(self.model, recipe.optimizer, cube, self.feed.betas())
        self.scaler = make_scaler(recipe, cube)
        self.learning_rate = learning_rate(recipe.optimizer, recipe.run.steps)
        self.standing = TrainState()
        self.best = EarlyStopping(recipe.run.patience)
        self.watch = watch
        self._step = TrainingStep(
            self.model, self.optimizer, self.scaler, cube, clip=recipe.optimizer.clip, watch=watch
        )
        self._spikes = LossSpikeDetector(factor=recipe.run.loss_spike)
        self._peak = recipe.run.peak_tflops * 1e12 or peak(cube.device, peak_type(recipe.precision))
        self._compared_epoch = 0  # by the feed
        self._stall = 0.0
        self.taken = 0
        """Steps begun; the last one may still be on its way."""
        self.samples_due = False
        """Whether the last one has passed a multiple of `run.evaluate_every_samples`."""
        self.stopping = False
        """Whether the ranks are agreed to save and leave."""
        self.began = time.monotonic()
        """Begin of the training, less what was done before."""
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
    def needed_corpus(self) -> TrainingCorpus:
        assert self.corpus is not None, "a trainer without a corpus can neither evaluate nor save"
        return self.corpus

    @property
    def ended(self) -> Ending | None:
        """Why the run that was to be resumed has ended, if it has."""
        return self.standing.ending

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def resume(self, folder: Path, *, finished: bool = False) -> None:
        """Continues from a checkpoint, written on any cube.

        Args:
            finished: a run that has ended is no mistake; `ended` then says why, and nothing is loaded.

        Raises:
            ValueError: `folder` is no checkpoint, is damaged, or one of another model, corpus or batch.
        """

        def checked() -> dict[str, Any]:
            progress = checkpoint.read_progress(folder)
            if not finished or ended(progress, self.recipe) is None:
                check_resume(progress, self.recipe, self.needed_corpus)
            return progress

        progress = run_on_all_ranks(self.cube, checked, kept=checkpoint.DamagedError)
        if finished and (reason := ended(progress, self.recipe)) is not None:
            # Nothing will be loaded, so that nobody else would notice.
            if problems := run_on_rank0(self.cube, lambda: checkpoint.verify(folder)):
                raise checkpoint.DamagedError(f"{'; '.join(problems)}.")
            self.standing.ending = cast(Ending, reason)
            return
        best = EarlyStopping(self.recipe.run.patience, progress.get("best"))
        checkpoint.load(folder, self.model, self.optimizer, self.cube, extra=self._extra())
        self.standing, self.best = TrainState.of(progress), best
        self.standing.ending = None
        if progress["ranks"] != self.cube.shape.ranks:  # no streams to go on with: others than those at the start
            self.cube.manual_seed(mix(self.recipe.run.seed, self.standing.step))
        if different := differences(progress, self.recipe):
            self.remarks.append(f"the recipe differs from that of the checkpoint: {', '.join(different)}")

    def start_from(self, folder: Path) -> str:
        """Begins at step 0 with what another run, or another model, has learnt; schedule and data are this run's own.
        Returns what was taken, in words. See `begin_with`, also for errors."""
        told = begin_with(folder, self.model, self.optimizer, self.recipe, self.needed_corpus, self.cube)
        self.cube.manual_seed(self.recipe.run.seed)  # this run's own streams
        return told

    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        """Begins a checkpoint of the steps done so far."""
        self.standing.seconds = time.monotonic() - self.began
        progress: dict[str, Any] = facts_of(self.recipe, self.needed_corpus)
        progress |= {"standing": dataclasses.asdict(self.standing), "best": self.best.to_dict()}
        self.at("checkpoint")
        self._stall += checkpoints.save(
            self.standing.step, self.model, self.optimizer, progress, self._extra(), wait=wait
        )

    def _extra(self) -> dict[str, torch.Tensor]:
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    # --- the loop -------------------------------------------------------------------------------------------------

    def steps(
        self, loader: Loader, *, at_once: Callable[[int], bool] = lambda _: True, tracer: StepProfiler | None = None
    ) -> Iterator[StepMetrics]:
        """Trains on what the loader gives. What the caller does between two steps is no step's time.

        Args:
            at_once: whether the numbers of a step are waited for before the next one is begun. Where they are not, the
                device has work while the host reads the numbers of the step before.
        """
        last: PendingStep | None = None
        batches = iter(loader)
        while True:
            self._step.stopwatch.begin()
            self._step.stopwatch.mark("data")
            self.at("data")
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

    def _take(self, step: TrainBatch, tracer: StepProfiler | None) -> PendingStep:
        self._compare(step)
        if tracer is not None:
            tracer.begin(step.index + 1)
        stall, self._stall = self._stall, 0.0
        taken = self._step.take(step, self.learning_rate.at(step.index), stall)
        if tracer is not None:
            tracer.end(step.index + 1)
        every, before = self.recipe.run.evaluate_every_samples, self.standing.samples
        self.standing.step = self.taken = step.index + 1
        self.standing.samples += step.sequences
        self.samples_due = every > 0 and before // every < self.standing.samples // every
        return taken

    def _compare(self, step: TrainBatch) -> None:
        """Makes sure, once an epoch, that all ranks have packed it alike. Raises ValueError on every rank if not."""
        for epoch, digest in step.digests.items():
            if epoch > self._compared_epoch:
                check_same_on_all_ranks(self.cube, f"the packing of epoch {epoch}", digest)
                self._compared_epoch = epoch

    def _read(self, taken: PendingStep) -> StepMetrics:
        """The numbers of a step, as soon as they are there."""
        numbers, step, traffic = taken.numbers.read(), taken.step, taken.traffic
        self.standing.skipped_steps += int(numbers.found_inf)
        self.stop_if(numbers.stop_flags > 0)
        self._judge(taken, numbers)
        times = taken.lap.seconds()
        seconds = sum(times.values())
        flops = step_flops(self.model.config, step, read_rows_only=self.recipe.speed.read_rows_only)
        per_device = flops / seconds / self.cube.shape.ranks
        return StepMetrics(
            step=step.index + 1,
            loss=numbers.loss,
            masked_lm_loss=numbers.masked_lm_loss,
            next_sentence_loss=numbers.next_sentence_loss,
            masked_lm_accuracy=numbers.masked_lm_correct / step.targets,
            next_sentence_accuracy=next_sentence_accuracy(
                numbers.next_sentence_correct, numbers.next_sentence_loss, step.sequences
            ),
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

    def _judge(self, taken: PendingStep, numbers: StepScalars) -> None:
        """Notes what is odd about a step. Raises FloatingPointError, on every rank, where a run has diverged."""
        number = taken.step.index + 1
        self.standing.skipped_in_a_row = self.standing.skipped_in_a_row + 1 if numbers.found_inf else 0
        given_up = self.standing.skipped_in_a_row >= _SKIPPED_IN_A_ROW
        # With fp16 a step is skipped now and then, to find the loss scale.
        worth_saying = self.standing.skipped_in_a_row == 1 and self.scaler is None
        if worth_saying or given_up:
            where = first_non_finite(self.model.named_parameters(), self.cube, norms=taken.norm.parts)
            where = where or "every gradient of a parameter is finite, the loss or the norm of all of them is not"
            told = f"step {number}: loss {numbers.loss}, gradient norm {numbers.gradient_norm}: {where}"
            if given_up:
                raise FloatingPointError(
                    f"{told}. {_SKIPPED_IN_A_ROW} steps in a row were skipped. Resume from an earlier checkpoint with "
                    "a lower learning rate, or begin with its weights and another seed: --start-from."
                )
            self.remarks.append(f"{told}. The step is skipped.")
        if spike := self._spikes.update(number, numbers.loss):
            self.remarks.append(spike)

    def stop_if(self, asked: bool) -> None:
        """`asked` is the same on every rank: from here on they are agreed to save and leave."""
        if asked and not self.stopping:
            self.stopping = True
            if self.watch is not None:
                self.watch.agreed()

    def at(self, doing: str) -> None:
        """Tells the watch."""
        if self.watch is not None:
            self.watch.at(self.standing.step + 1, doing)

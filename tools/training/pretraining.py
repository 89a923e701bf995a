"""Pre-training: what a BERT learns from packs of pairs, and what there is to tell of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.bert import BertForPreTraining, ElectraForPreTraining, PreTrainingOutput, ReplacedTokensOutput
from models.bert.cost_model.electra import electra_step_flops
from models.bert.cost_model.flops import step_flops
from models.bert.cost_model.memory import Device
from models.bert.graphed import GraphedBert
from tensor3d import Cube, check_parameters, checkpoint, keep_gathered
from tensor3d.checkpoint import Checkpoints
from tensor3d.data import Loader, PretrainingData, TrainBatch, evaluation_batches
from tensor3d.data.packed_batch import PackedBatch
from tensor3d.distributed.collectives import all_reduce
from tensor3d.distributed.object_collectives import check_same_on_all_ranks, run_on_all_ranks, run_on_rank0
from tensor3d.distributed.watchdog import Watchdog
from tensor3d.ops.seeds import mix
from tools.corpus.training_corpus import TrainingCorpus
from tools.training.config import TrainConfig
from tools.training.data import TrainData, held_out_data
from tools.training.factory import (
    check_attention,
    fp8_remarks,
    learning_rate,
    make_optimizer,
    make_scaler,
    peak_type,
    precision,
    speed,
)
from tools.training.loss_monitor import LossSpikeDetector, first_non_finite
from tools.training.metrics import EvaluationMetrics, StepMetrics, by_axis, next_sentence_accuracy
from tools.training.peak_flops import peak
from tools.training.resume import begin_with, check_resume, differences, run_facts
from tools.training.step import PendingStep, StepScalars
from tools.training.trainer import Trainer, TrainState

# --- What is learnt ---------------------------------------------------------------------------------------------------


class PretrainSums(NamedTuple):
    """What the model adds up over the micro-batches of a step."""

    loss: float
    """Nats; so are the next two."""
    masked_lm_loss: float
    next_sentence_loss: float
    masked_lm_correct: float
    """Positions predicted right; the next are sentence pairs."""
    next_sentence_correct: float


class PretrainObjective:
    """Masked words, and whether the second text follows the first, if the model asks that."""

    sums = len(PretrainSums._fields)
    are_parts = True

    def __init__(self, model: BertForPreTraining) -> None:
        self._model = model

    def parts(self, batch: TrainBatch) -> Sequence[PackedBatch]:
        return batch.batches

    def loss(self, batch: TrainBatch, part: PackedBatch) -> tuple[Tensor, Tensor]:
        output: PreTrainingOutput = self._model(part, batch.targets, batch.sequences, reduce_loss=False)
        return output.loss, output.sums


class ReplacedTokenSums(NamedTuple):
    """What an ELECTRA adds up over the micro-batches of a step."""

    loss: float
    """Nats; so are the next two."""
    generator_loss: float
    discriminator_loss: float
    generator_correct: float
    """Masked positions predicted right."""
    discriminator_correct: float
    """Tokens of which it was rightly said whether they are replaced."""
    replaced: float
    """Tokens."""


class ReplacedTokensObjective:
    """Masked words, and which tokens the generator of these words has replaced."""

    sums = len(ReplacedTokenSums._fields)
    are_parts = True

    def __init__(self, model: ElectraForPreTraining) -> None:
        self._model = model

    def parts(self, batch: TrainBatch) -> Sequence[PackedBatch]:
        return batch.batches

    def loss(self, batch: TrainBatch, part: PackedBatch) -> tuple[Tensor, Tensor]:
        output: ReplacedTokensOutput = self._model(part, batch.targets, batch.tokens, reduce_loss=False)
        return output.loss, output.sums


def _as_one(graphed: GraphedBert) -> Callable[[TrainBatch, PackedBatch, Tensor | None], Tensor]:
    """Both passes of a micro-batch."""
    return lambda batch, part, scale: graphed(part, batch.targets, batch.sequences, scale)


# --- Evaluation on the held-out documents -----------------------------------------------------------------------------


@torch.no_grad()
def held_out_means(
    model: BertForPreTraining | ElectraForPreTraining,
    data: PretrainingData,
    cube: Cube,
    packs_per_rank: int,
    goes_on: Callable[[int], bool],
) -> dict[str, float] | None:
    """Means over all packs of `data`, under the names of `EvaluationMetrics`, as far as there are any. Every rank calls
    it.

    Args:
        goes_on: asked before each batch, from 1, with the same answer on every rank; where it is no, None is returned.
    """
    model.eval()
    kind = ReplacedTokenSums if isinstance(model, ElectraForPreTraining) else PretrainSums
    sums, targets, sequences, tokens = torch.zeros(len(kind._fields), dtype=torch.float64), 0, 0, 0
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
        targets, sequences, tokens = targets + batch.targets, sequences + batch.sequences, tokens + batch.tokens
    model.train()
    if isinstance(model, ElectraForPreTraining):
        found = ReplacedTokenSums(*sums.tolist())
        weighted = model.settings.weight * found.discriminator_loss / tokens
        return {
            "loss": found.generator_loss / targets + weighted,
            "masked_lm_loss": found.generator_loss / targets,
            "masked_lm_accuracy": found.generator_correct / targets,
            "replaced_token_loss": found.discriminator_loss / tokens,
            "replaced_token_accuracy": found.discriminator_correct / tokens,
        }
    _, mlm, nsp, correct, pairs = sums.tolist()
    means = {
        "loss": mlm / targets + nsp / sequences,
        "masked_lm_loss": mlm / targets,
        "masked_lm_accuracy": correct / targets,
    }
    accuracy = next_sentence_accuracy(pairs, nsp, sequences)
    return means if accuracy is None else means | {"next_sentence_accuracy": accuracy}


# --- What there is to tell of a step ----------------------------------------------------------------------------------


def _flops(model: BertForPreTraining | ElectraForPreTraining, step: TrainBatch, *, read_rows_only: bool) -> int:
    if isinstance(model, ElectraForPreTraining):
        return electra_step_flops(model.config, model.generator.config, step)
    return step_flops(model.config, step, read_rows_only=read_rows_only)


def _learnt(
    model: BertForPreTraining | ElectraForPreTraining, found: Sequence[float], step: TrainBatch
) -> dict[str, Any]:
    """Losses and accuracies, under the names of `StepMetrics`."""
    if isinstance(model, ElectraForPreTraining):
        both = ReplacedTokenSums(*found)
        return {
            "loss": both.loss,
            "masked_lm_loss": both.generator_loss,
            "next_sentence_loss": None,
            "masked_lm_accuracy": both.generator_correct / step.targets,
            "next_sentence_accuracy": None,
            "replaced_token_loss": both.discriminator_loss,
            "replaced_token_accuracy": both.discriminator_correct / step.tokens,
            "replaced_share": both.replaced / step.tokens,
        }
    sums = PretrainSums(*found)
    return {
        "loss": sums.loss,
        "masked_lm_loss": sums.masked_lm_loss,
        "next_sentence_loss": sums.next_sentence_loss if model.config.next_sentence else None,
        "masked_lm_accuracy": sums.masked_lm_correct / step.targets,
        "next_sentence_accuracy": next_sentence_accuracy(
            sums.next_sentence_correct, sums.next_sentence_loss, step.sequences
        ),
    }


# --- Pre-training -----------------------------------------------------------------------------------------------------

_SKIPPED_IN_A_ROW = 25  # as often as a loss scale of 2**16 can be halved and still mean something


class PretrainTrainer(Trainer[TrainBatch, StepMetrics]):
    """A BERT, or an ELECTRA with its generator, its optimiser and its data on one cube. Every rank makes one at the
    same time.

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
        device: Device = "cuda" if cube.device.type == "cuda" else "cpu"
        run_on_all_ranks(cube, lambda: check_attention(recipe, device))  # GPUs may differ
        cube = cube.with_policy(precision(recipe.precision), speed(recipe.speed))
        self.recipe, self.feed, self.corpus = recipe, feed, corpus
        cube.manual_seed(recipe.run.seed)
        config, memory, replaced = recipe.model.config(recipe.data), recipe.model, recipe.replaced_tokens
        self.model: BertForPreTraining | ElectraForPreTraining
        objective: PretrainObjective | ReplacedTokensObjective
        made: dict[str, Any] = {
            "backend": recipe.speed.attention,
            "recompute": memory.recompute,
            "reshard_after_forward": memory.reshard_after_forward,
        }
        graphed = None
        if replaced is None:
            self.model = BertForPreTraining(config, cube, read_rows_only=recipe.speed.read_rows_only, **made)
            objective = PretrainObjective(self.model)
            graphed = GraphedBert(self.model, recipe.data.capacity) if recipe.speed.cuda_graph else None
        else:
            self.model = ElectraForPreTraining(config, replaced, cube, **made)
            objective = ReplacedTokensObjective(self.model)
        if memory.keep_budget:
            keep_gathered(self.model, cube, feed.micro_batch_tokens, memory.keep_bytes)
        check_parameters(self.model.parameters(), cube)
        super().__init__(
            self.model,
            make_optimizer(self.model, recipe.optimizer, cube, feed.betas()),
            make_scaler(recipe, cube),
            cube,
            objective,
            rate=learning_rate(recipe.optimizer, recipe.run.steps),
            clip=recipe.optimizer.clip,
            patience=recipe.run.patience,
            watch=watch,
            passes=None if graphed is None else _as_one(graphed),
        )
        self.state.remarks += fp8_remarks(self.model, recipe.precision)
        self._spikes = LossSpikeDetector(factor=recipe.run.loss_spike)
        self._peak = recipe.run.peak_tflops * 1e12 or peak(cube.device, peak_type(recipe.precision))
        self._compared_epoch = 0  # by the feed
        self._held_out: PretrainingData | None = None
        self._packs_per_rank = 1  # of an evaluation: as in training
        self._latest: TrainBatch | None = None
        """The batch of the last step, to try its weights on."""

    @property
    def parameters(self) -> int:
        """Numbers in the logical model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def needed_corpus(self) -> TrainingCorpus:
        assert self.corpus is not None, "a trainer without a corpus can neither evaluate nor save"
        return self.corpus

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def resume(self, folder: Path) -> None:
        """Continues from a checkpoint, written on any cube.

        Raises:
            ValueError: `folder` is no checkpoint, is damaged, or one of another model, corpus or batch.
        """

        def checked() -> dict[str, Any]:
            progress = checkpoint.read_progress(folder)
            check_resume(progress, self.recipe, self.needed_corpus)
            return progress

        progress = run_on_all_ranks(self.cube, checked, kept=checkpoint.DamagedError)
        state = TrainState.of(progress, self.recipe.run.patience)
        state.remarks += self.state.remarks
        checkpoint.load(folder, self.model, self.optimizer, self.cube, extra=self._extra())
        self.state = state
        self._spikes = LossSpikeDetector(factor=self.recipe.run.loss_spike, losses=progress.get("losses", ()))
        if progress["ranks"] != self.cube.shape.ranks:  # no streams to go on with: others than those at the start
            self.cube.manual_seed(mix(self.recipe.run.seed, self.state.step))
        if different := differences(progress, self.recipe):
            self.state.remarks.append(f"the recipe differs from that of the checkpoint: {', '.join(different)}")

    def start_from(self, folder: Path, generator: Path | None = None) -> str:
        """Begins at step 0 with what another run, or another model, has learnt; schedule and data are this run's own.
        Returns what was taken, in words. See `begin_with`, also for errors."""
        told = begin_with(folder, self.model, self.optimizer, self.recipe, self.needed_corpus, self.cube, generator)
        self.cube.manual_seed(self.recipe.run.seed)  # this run's own streams
        return told

    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        state = self.state
        if state.ending != "signal":  # which leaves no time
            self._try_weights()
        state.seconds = time.monotonic() - state.began
        progress = run_facts(self.recipe, self.needed_corpus) | state.to_dict() | {"losses": self._spikes.losses}
        self.at("checkpoint")
        state.stall += checkpoints.save(state.step, self.model, self.optimizer, progress, self._extra(), wait=wait)

    @torch.no_grad()
    def _try_weights(self) -> None:
        """Raises FloatingPointError, on every rank, where the last update has spoilt the weights: the loss of its step
        is that of the weights before. A micro-batch of it once more, forward, costs less than a checkpoint that nobody
        can go on from, and that takes the place of one that is good."""
        if (step := self._latest) is None:
            return
        self.model.eval()
        sums = self.model(step.batches[0], step.targets, step.tokens).sums
        self.model.train()
        self._check_loss("the loss of a micro-batch", run_on_rank0(self.cube, lambda: float(sums[0])))

    def _check_loss(self, what: str, loss: float) -> None:
        """Args: loss: the same on every rank."""
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{what} with the weights after step {self.state.step} is {loss}: they are spoilt, and not saved. "
                "Resume from an earlier checkpoint with a lower learning rate, or begin with its weights and another "
                "seed: --start-from."
            )

    def _extra(self) -> dict[str, Tensor]:
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    # --- steps ----------------------------------------------------------------------------------------------------

    def loader(self, end_step: int | None = None) -> Loader:
        """The steps from the state's on, for this rank. To be closed, best by a `with`.

        Args:
            end_step: None: endless, for whoever counts them himself.
        """
        loader = self.feed.loader(self.state.step, end_step)
        self._packs_per_rank = loader.layout.packs_per_rank
        return loader

    def batches(self) -> Loader:
        return self.loader(self.recipe.run.steps)

    def before(self, step: TrainBatch) -> None:
        """Makes sure, once an epoch, that all ranks have packed it alike. Raises ValueError on every rank if not."""
        self._latest = step
        for epoch, digest in step.digests.items():
            if epoch > self._compared_epoch:
                check_same_on_all_ranks(self.cube, f"the packing of epoch {epoch}", digest)
                self._compared_epoch = epoch
        every, done = self.recipe.run.evaluate_every_samples, self.state.samples
        if every > 0:
            last = step.index + 1 >= self.recipe.run.steps
            self.state.evaluation_due = last or done // every < (done + step.sequences) // every

    def metrics(self, taken: PendingStep[TrainBatch], numbers: StepScalars) -> StepMetrics:
        self._judge(taken, numbers)
        step, traffic = taken.step, taken.traffic
        times = taken.lap.seconds()
        seconds = sum(times.values())
        flops = _flops(self.model, step, read_rows_only=self.recipe.speed.read_rows_only)
        per_device = flops / seconds / self.cube.shape.ranks
        return StepMetrics(
            step=step.index + 1,
            **_learnt(self.model, numbers.sums, step),
            learning_rate=taken.learning_rate,
            gradient_norm=numbers.gradient_norm,
            loss_scale=numbers.loss_scale,
            skipped=bool(numbers.found_inf),
            skipped_steps=self.state.skipped_steps,
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
            masked_share=step.targets / step.tokens,
            imbalance=step.imbalance,
            bytes_received=traffic.total_bytes,
            collectives=traffic.total_calls,
            traffic=by_axis(traffic.received),
        )

    def _judge(self, taken: PendingStep[TrainBatch], numbers: StepScalars) -> None:
        """Notes what is odd about a step. Raises FloatingPointError, on every rank, where a run has diverged."""
        number = taken.step.index + 1
        self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if numbers.found_inf else 0
        given_up = self.state.skipped_in_a_row >= _SKIPPED_IN_A_ROW
        # With fp16 a step is skipped now and then, to find the loss scale.
        worth_saying = self.state.skipped_in_a_row == 1 and self.scaler is None
        if worth_saying or given_up:
            where = first_non_finite(self.model.named_parameters(), self.cube, norms=taken.norm.parts)
            where = where or "every gradient of a parameter is finite, the loss or the norm of all of them is not"
            told = f"step {number}: loss {numbers.loss}, gradient norm {numbers.gradient_norm}: {where}"
            if given_up:
                raise FloatingPointError(
                    f"{told}. {_SKIPPED_IN_A_ROW} steps in a row were skipped. Resume from an earlier checkpoint with "
                    "a lower learning rate, or begin with its weights and another seed: --start-from."
                )
            self.state.remarks.append(f"{told}. The step is skipped.")
        if spike := self._spikes.update(number, numbers.loss):
            self.state.remarks.append(spike)

    # --- evaluation -----------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.corpus is not None and self.corpus.info.has_held_out

    def reached(self, evaluation: EvaluationMetrics) -> bool:
        target = self.recipe.run.target_accuracy
        return target > 0 and evaluation.masked_lm_accuracy >= target

    def evaluate(self) -> EvaluationMetrics | None:
        """The means over all held-out packs; None where a signal has broken it off. Raises FloatingPointError, on every
        rank, where the loss is not finite."""
        if self._held_out is None:
            self._held_out = held_out_data(self.recipe, self.needed_corpus)

        def goes_on(batch: int) -> bool:
            self.at(f"evaluation, batch {batch}")
            flag = torch.full((1,), self.watch.stop_flag if self.watch else 0.0, device=self.cube.device)
            self.stop_if(float(all_reduce(flag, self.cube.over("data", "x", "y", "z")).wait()) > 0)
            return not self.state.stopping

        own = held_out_means(self.model, self._held_out, self.cube, self._packs_per_rank, goes_on)
        if own is None:
            return None
        # Those of one rank: what follows from them must be the same on all, and a last bit may differ between copies.
        means = run_on_rank0(self.cube, lambda: own)
        self._check_loss("the held-out loss", means["loss"])
        return EvaluationMetrics(step=self.state.step, samples=self.state.samples, **means)

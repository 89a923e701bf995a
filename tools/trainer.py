"""Pre-training: the loop, without command line or files of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.bert import BertForPreTraining, PreTrainingOutput
from tensor3d import Cube, check_parameters, checkpoint, clip_grad_norm_
from tensor3d.data import Loader, PretrainingData, Step, evaluation_batches
from tools.agree import check_equal
from tools.corpus.info import Corpus
from tools.feed import Feed, held_out_data, place
from tools.metrics import Display, EvaluationMetrics, StepMetrics
from tools.recipe import OptimizerRecipe, Recipe


class Trainer:
    """A model, its optimiser and its data on one cube. Every rank makes one at the same time.

    Args:
        feed: what it trains on; whoever made it closes it.
        corpus: where that comes from, for evaluation and checkpoints. None: there is neither.

    Raises:
        ValueError: sizes or a batch that do not divide on this cube.
    """

    def __init__(self, recipe: Recipe, cube: Cube, feed: Feed, corpus: Corpus | None) -> None:
        self.recipe, self.cube, self.feed, self.corpus = recipe, cube, feed, corpus
        cube.manual_seed(recipe.run.seed)
        self.model = BertForPreTraining(recipe.model.config(recipe.data), cube)
        check_parameters(self.model.parameters(), cube)
        self.optimizer = make_optimizer(self.model, recipe.optimizer, self.feed.betas())
        self.first_step = 0
        self._held_out: PretrainingData | None = None
        self._compared_epoch = 0  # by the feed

    @property
    def parameters(self) -> int:
        """Numbers in the logical model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def _needed_corpus(self) -> Corpus:
        assert self.corpus is not None, "a trainer without a corpus can neither evaluate nor save"
        return self.corpus

    def resume(self, folder: Path) -> None:
        """Continues from a checkpoint, written on any cube.

        Raises:
            ValueError: `folder` is no checkpoint, or one of another model, corpus or batch.
        """
        check_resume(checkpoint.read_progress(folder), self.recipe, self._needed_corpus)
        progress = checkpoint.load(folder, self.model, self.optimizer, self.cube)
        self.first_step = progress["step"]

    def run(self, display: Display, checkpoints: Path) -> None:
        """Trains from `first_step` to the last step of the recipe, with evaluations and checkpoints on the way."""
        run = self.recipe.run
        with self.feed.loader(self.first_step, run.steps) as loader:
            for metrics in self.steps(loader):
                display.step(metrics)
                done = metrics.step
                if _is_due(done, run.evaluate_every, run.steps) and self._needed_corpus.info.held_out_documents:
                    display.evaluation(self.evaluate(done, loader.layout.packs_per_rank))
                if _is_due(done, run.checkpoint_every, run.steps):
                    self.save(checkpoints, done)
                    display.flush()
                if done >= run.steps:
                    return

    def steps(self, loader: Loader) -> Iterator[StepMetrics]:
        """Trains on what the loader gives, without end. What the caller does between two steps is no step's time."""
        previous = time.perf_counter()
        for step in loader:
            self._compare(step)
            yield self._step(step, previous, waited=time.perf_counter() - previous)
            previous = time.perf_counter()

    def loader(self) -> Loader:
        """The steps from `first_step` on, for this rank, endless for whoever counts them himself. To be closed, best by
        a `with`."""
        return self.feed.loader(self.first_step)

    def save(self, checkpoints: Path, step: int) -> Path:
        """Writes a checkpoint."""
        progress = {"recipe": self.recipe.to_dict(), "corpus": self._needed_corpus.info.fingerprint}
        return checkpoint.save(checkpoints, step, self.model, self.optimizer, self.cube, progress)

    @torch.no_grad()
    def evaluate(self, step: int, packs_per_rank: int) -> EvaluationMetrics:
        """The means over all held-out packs."""
        self.model.eval()
        sums, targets, sequences = torch.zeros(5, dtype=torch.float64), 0, 0
        if self._held_out is None:
            self._held_out = held_out_data(self.recipe, self._needed_corpus)
        for batch in evaluation_batches(
            self._held_out, packs_per_rank=packs_per_rank, device=self.cube.device, **place(self.cube)
        ):
            output = self.model(batch.batches[0], 1, 1)  # sums, to be divided by what all steps have together
            sums += _numbers(output).double().cpu()
            targets, sequences = targets + batch.targets, sequences + batch.sequences
        self.model.train()
        _, mlm, nsp, correct, pairs = sums.tolist()
        return EvaluationMetrics(
            step=step,
            loss=mlm / targets + nsp / sequences,
            masked_lm_loss=mlm / targets,
            masked_lm_accuracy=correct / targets,
            next_sentence_accuracy=pairs / sequences,
        )

    def _compare(self, step: Step) -> None:
        """Makes sure, once an epoch, that all ranks have packed it alike. Raises ValueError on every rank if not."""
        for epoch, digest in step.digests.items():
            if epoch > self._compared_epoch:
                check_equal(self.cube, f"the packing of epoch {epoch}", digest)
                self._compared_epoch = epoch

    def _step(self, step: Step, previous: float, *, waited: float) -> StepMetrics:
        """One step of the optimiser."""
        rate = learning_rate(step.index, self.recipe.run.steps, self.recipe.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.cube.traffic.counting() as traffic:
            sums = self._forward_backward(step)
            norm = clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip, self.cube)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        loss, mlm, nsp, correct, pairs, norm_value = torch.cat([sums, norm.reshape(1).to(sums.dtype)]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm_value)):
            raise FloatingPointError(
                f"step {step.index + 1}: loss {loss}, gradient norm {norm_value}. Lower the learning rate, or resume "
                "from a checkpoint with another seed."
            )
        seconds = time.perf_counter() - previous
        return StepMetrics(
            step=step.index + 1,
            loss=loss,
            masked_lm_loss=mlm,
            next_sentence_loss=nsp,
            masked_lm_accuracy=correct / step.targets,
            next_sentence_accuracy=pairs / step.sequences,
            learning_rate=rate,
            gradient_norm=norm_value,
            seconds=seconds,
            tokens_per_second=step.tokens / seconds,
            fill=step.fill,
            imbalance=step.imbalance,
            data_wait_seconds=waited,
            bytes_received=traffic.total_bytes,
            collectives=traffic.total_calls,
        )

    def _forward_backward(self, step: Step) -> Tensor:
        """All micro-batches of a step; the sums of their losses and counts."""
        sums = torch.zeros(5, device=self.cube.device)
        for number, batch in enumerate(step.batches, start=1):
            last = number == len(step.batches)
            with nullcontext() if last else self.cube.accumulating():
                output: PreTrainingOutput = self.model(batch, step.targets, step.sequences)
                output.loss.backward()
            sums += _numbers(output)
        return sums


def make_optimizer(model: BertForPreTraining, recipe: OptimizerRecipe, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW without decay of vectors. Fused: on DTensors of a four-axis mesh the others start slowly."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.lr,
        betas=betas,
        eps=recipe.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Of step `step` (from 0): linear from 0 to the peak during warm-up, then linear to 0 just after the last step."""
    warmup = max(1, round(recipe.warmup * steps))
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    return recipe.lr * max(0.0, steps - step) / max(1, steps - warmup)


def check_resume(progress: dict[str, Any], recipe: Recipe, corpus: Corpus) -> None:
    """Raises ValueError where a checkpoint belongs to another model, corpus or order of packs."""
    if progress.get("corpus") != corpus.info.fingerprint:
        raise ValueError(
            f"the checkpoint was trained on another corpus or tokenizer (fingerprint {progress.get('corpus')}, now "
            f"{corpus.info.fingerprint}). Resume with the source and data settings of that run."
        )
    before, now = progress.get("recipe", {}), recipe.to_dict()
    for section, names in {
        "model": list(now["model"]),
        "data": [name for name in now["data"] if name not in ("source", "plans")],
        "batch": ["global_batch", "packing_rule", "multiple_of"],
        "run": ["seed"],
    }.items():
        for name in names:
            old, new = before.get(section, {}).get(name), now[section][name]
            if old != new:
                raise ValueError(
                    f"the checkpoint was trained with {section}.{name} = {old!r}, the recipe says {new!r}. Resume with "
                    "the same, or start a run of its own."
                )
    if progress["step"] >= recipe.run.steps:
        raise ValueError(
            f"the checkpoint has done {progress['step']} steps, and the recipe ends at {recipe.run.steps}. Raise run."
            "steps."
        )


def _numbers(output: PreTrainingOutput) -> Tensor:
    return torch.stack([output.loss.detach(), output.mlm_loss, output.nsp_loss, output.mlm_correct, output.nsp_correct])


def _is_due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)

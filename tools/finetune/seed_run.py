"""One seed from its first step to its predictions: OUTPUT/seed-N, a model folder with what belongs to it.

model.json          what the model is, for `tools.predict` and for more fine-tuning
tokenizer/          its tokenizer
checkpoints/        the weights of the best evaluation, for any cube
metrics.jsonl       every step and every evaluation
predictions/        what the best weights say of dev and test
result.json         written last: the metrics of the best weights
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.bert.huggingface import HEADS, write_model_json
from tensor3d import checkpoint
from tensor3d.checkpoint import Checkpoints
from tensor3d.distributed.object_collectives import run_on_all_ranks, run_on_rank0
from tools.corpus.tokenizers.model_dir import CHECKPOINTS
from tools.finetune.init_model import InitModel
from tools.finetune.job import write_json
from tools.finetune.tasks import Evaluation
from tools.finetune.trainer import PendingStep, Trainer, count_steps, steps_of
from tools.training.factory import make_optimizer
from tools.training.metrics.jsonl import JOURNAL, JsonlLogger

RESULT, PREDICTIONS = "result.json", "predictions"
_SMOOTH = 0.95  # of the loss that the bar shows


@dataclass
class SeedProgress:
    """What has happened so far."""

    seconds: float = 0.0
    """In steps, without evaluations."""
    texts: int = 0
    tokens: int = 0
    step: int = 0
    """That was taken last."""
    best_step: int = 0
    best: Evaluation | None = None
    waited: int = 0
    """Evaluations since the best one."""
    loss: float | None = None
    """Smoothed."""
    since: float | None = None
    """When the steps that are under way began; None while there are none."""

    def elapsed(self) -> float:
        return self.seconds + (0.0 if self.since is None else time.perf_counter() - self.since)


class SeedRun:
    """Trains one seed. Every rank makes one at the same point.

    Args:
        trainer: as made, no step taken.
        folder: of the seed, made anew.
    """

    def __init__(self, trainer: Trainer, start: InitModel, seed: int, folder: Path) -> None:
        self._trainer, self._start, self._seed, self._folder = trainer, start, seed, folder
        self._cube, self._task, self._run = trainer.cube, trainer.task, trainer.recipe.run
        examples = len(self._task.train)
        self._steps = count_steps(examples, self._run.batch, self._run.epochs)
        self._every = self._run.evaluate_every or -(-examples // self._run.batch)
        self._course = SeedProgress()

    def result(self) -> dict[str, Any]:
        """Trains, evaluates, predicts. What result.json says.

        Raises:
            FloatingPointError: a loss that is not finite, naming the step; on every rank.
            OSError, ValueError: a file cannot be written; on every rank.
        """
        run_on_rank0(self._cube, self._begin)
        self._train()
        course, best = self._course, self._complete()
        files = self._task.write_predictions(best, self._folder / PREDICTIONS)
        run_on_rank0(self._cube, lambda: self._describe(best.facts))
        result = {
            "seed": self._seed,
            "cube": str(self._cube.shape),
            "best_step": course.best_step,
            "metric": self._task.best,
            "metrics": best.metrics,
            "seconds": round(course.seconds, 3),
            "texts_per_second": round(course.texts / course.seconds, 2),
            "tokens_per_second": round(course.tokens / course.seconds, 1),
            "predictions": [str(path.relative_to(self._folder)) for path in files],
        }
        run_on_rank0(self._cube, lambda: write_json(self._folder / RESULT, result))
        return result

    def _begin(self) -> None:
        """On the first rank: an unfinished seed starts again."""
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / PREDICTIONS).mkdir(parents=True)
        self._start.keep(self._folder)
        self._describe({})

    def _describe(self, found: Mapping[str, Any]) -> None:
        """Writes model.json."""
        facts, source = self._task.facts(), self._trainer.recipe.model.start_from
        write_model_json(
            self._folder,
            config=self._start.config,
            heads=tuple(name for name, _ in self._trainer.model.named_children() if name in HEADS),
            labels=facts.labels,
            problem=facts.problem,
            facts={**facts.more, **found, "source": source, "seed": self._seed},
        )

    def _complete(self) -> Evaluation:
        """The best evaluation, with what its weights say of the parts that were not measured."""
        course, task, model = self._course, self._task, self._trainer.model
        assert course.best is not None, "the first evaluation is always better than none"
        missing = [part for part in task.parts if part not in course.best.outputs]
        if missing and course.best_step != course.step:
            kept = checkpoint.latest(self._folder / CHECKPOINTS)
            assert kept is not None, "saved with the best evaluation"
            checkpoint.load(kept, model, None, self._cube)
        more = {part: task.outputs(model, part) for part in missing}
        return dataclasses.replace(course.best, outputs={**course.best.outputs, **more})

    def _train(self) -> None:
        first = self._cube.rank == 0
        journal: JsonlLogger | None = None

        def open_journal() -> None:
            nonlocal journal
            journal = stack.enter_context(closing(JsonlLogger(self._folder / JOURNAL, first_step=0)))

        with ExitStack() as stack:
            run_on_rank0(self._cube, open_journal)
            checkpoints = stack.enter_context(
                Checkpoints(self._folder / CHECKPOINTS, self._cube, keep_last=1, asynchronous=False)
            )
            bar = stack.enter_context(
                tqdm(total=self._steps, unit="step", desc=f"seed {self._seed}", disable=None if first else True)
            )
            for number in self._advance(bar, journal):
                if not self._evaluate(number, checkpoints, bar, journal):
                    break

    def _advance(self, bar: tqdm, journal: JsonlLogger | None) -> Iterator[int]:
        """Takes the steps; yields the number of each after which to evaluate. A step is told when the next one is on
        its way, so that the host works ahead of the device."""
        train, run, course = self._task.train, self._run, self._course
        before: PendingStep | None = None
        course.since = time.perf_counter()
        for number, places in enumerate(steps_of(len(train), run.batch, self._seed, run.epochs), start=1):
            taken = self._trainer.take(number, [train[place] for place in places])
            if before is not None:
                self._tell(before, bar, journal)
            before = taken
            if number % self._every == 0 or number == self._steps:
                self._tell(taken, bar, journal)
                before = None
                course.seconds, course.since = course.elapsed(), None
                yield number
                course.since = time.perf_counter()

    def _tell(self, taken: PendingStep, bar: tqdm, journal: JsonlLogger | None) -> None:
        course, loss = self._course, taken.loss.item()
        if not math.isfinite(loss):
            optimizer = self._trainer.recipe.optimizer
            raise FloatingPointError(
                f"seed {self._seed}: the loss of step {taken.step} is {loss}. Lower optimizer.lr, which is "
                f"{optimizer.lr:g}, or raise optimizer.warmup, which is {optimizer.warmup:g}."
            )
        course.texts += taken.texts
        course.tokens += taken.tokens
        course.loss = loss if course.loss is None else _SMOOTH * course.loss + (1 - _SMOOTH) * loss
        seconds = course.elapsed()
        speed = f"{course.texts / seconds:.0f} {self._task.unit}/s, {course.tokens / seconds:.0f} tokens/s"
        bar.set_postfix_str(f"loss {course.loss:.4f}, {speed}", refresh=False)
        bar.update()
        record = {
            "step": taken.step,
            "loss": loss,
            "gradient_norm": taken.gradient_norm.item(),
            "learning_rate": taken.learning_rate,
            "texts": taken.texts,
            "tokens": taken.tokens,
            "seconds": seconds,
        }
        _write(journal, "step", record, bar)

    def _evaluate(self, step: int, checkpoints: Checkpoints, bar: tqdm, journal: JsonlLogger | None) -> bool:
        """Keeps the weights if they are the best so far. Whether to go on."""
        course, trainer = self._course, self._trainer
        evaluation = self._evaluated(step)
        metrics, course.step = evaluation.metrics, step
        value = metrics[self._task.best]
        better = course.best is None or value > course.best.metrics[self._task.best]
        _write(journal, "evaluation", {"step": step, **metrics, "best": better}, bar)
        if self._cube.rank == 0:
            told = ", ".join(f"{name} {metric:.4f}" for name, metric in metrics.items())
            bar.write(f"seed {self._seed}, step {step}: {told}{' *' if better else ''}", file=sys.stderr)
        if better:
            course.best, course.best_step, course.waited = evaluation, step, 0
            # A new optimiser remembers nothing: what is kept is to be used, not to be trained on from this very step.
            weights_alone = make_optimizer(trainer.model, trainer.recipe.optimizer, self._cube, (0.0, 0.0))
            checkpoints.save(step, trainer.model, weights_alone, {"seed": self._seed, "metrics": metrics})
            run_on_all_ranks(self._cube, lambda: _check_saved(checkpoints))
        else:
            course.waited += 1
        return not 0 < self._run.patience <= course.waited

    def _evaluated(self, step: int) -> Evaluation:
        evaluation = self._task.evaluate(self._trainer.model)
        metrics = evaluation.metrics
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            raise FloatingPointError(
                f"seed {self._seed}: {wrong[0]} after step {step} is {metrics[wrong[0]]}, so the model says what is no "
                "number. Lower optimizer.lr."
            )
        return evaluation


def _check_saved(checkpoints: Checkpoints) -> None:
    """Raises OSError where the last checkpoint could not be written."""
    for outcome in checkpoints.finished():
        if outcome.error is not None:
            raise OSError(outcome.error)


def _write(journal: JsonlLogger | None, kind: str, record: dict[str, Any], bar: tqdm) -> None:
    """A journal that cannot be written ends no training: the other ranks would wait for this one."""
    if journal is not None:
        try:
            journal.write(kind, record)
        except OSError as problem:
            bar.write(f"{JOURNAL}: {problem}", file=sys.stderr)

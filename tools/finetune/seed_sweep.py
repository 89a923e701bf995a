"""All seeds of a recipe, one after another, and what they come to.

One seed goes from its first step to its predictions in OUTPUT/seed-N, a model folder with what belongs to it:

model.json          what the model is, for `tools.predict` and for more fine-tuning
tokenizer/          its tokenizer
checkpoints/        the weights of the best evaluation, for any cube
metrics.jsonl       every step and every evaluation
curves.png          the same as a picture, where matplotlib is installed
predictions/        what the best weights say of dev and test
README.md           a model card
result.json         written last: the metrics of the best weights
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from models.bert.huggingface import HEADS, write_model_json
from tensor3d import Cube, checkpoint
from tensor3d.checkpoint import Checkpoints
from tensor3d.distributed.object_collectives import run_on_all_ranks, run_on_rank0
from tensor3d.files import WRONG_ENTRIES, make_folder, read_file, remove, what_is_wrong
from tools.common.cli import run_folder
from tools.common.files import parsed_json, write_file
from tools.common.log import progress
from tools.common.machine import write_json
from tools.corpus.tokenizers.model_dir import CHECKPOINTS
from tools.finetune.init_model import InitModel, open_start
from tools.finetune.job import SETTINGS, FinetuneCommand, check_same_settings, drop_settings, keep_settings
from tools.finetune.metrics import summary
from tools.finetune.model_card import CARD, model_card, predicted_by
from tools.finetune.pictures import draw_curves
from tools.finetune.tasks import ComparedTask, Evaluation, FinetuneTask, PartsTask
from tools.finetune.trainer import FinetuneTrainer, TextEvaluation, TextStepMetrics, count_steps
from tools.training.factory import fp8_remarks, precision, set_matmul_precision
from tools.training.loop import LoopSchedule, TrainLoop
from tools.training.metrics import RunLog

RESULT, PREDICTIONS = "result.json", "predictions"
_SMOOTH = 0.95  # of the loss that the bar shows

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SeedLog(RunLog[TextStepMetrics, TextEvaluation]):
    """What one seed tells."""

    seed: int
    unit: str
    """What an example is."""
    texts: int = 0
    tokens: int = 0
    loss: float | None = None
    """Smoothed."""

    def bar(self) -> tqdm[Any]:
        return progress(total=self.steps, unit="step", desc=f"seed {self.seed}", shown=self.shown)

    def in_words(self, metrics: TextStepMetrics) -> str:
        self.texts, self.tokens = self.texts + metrics.texts, self.tokens + metrics.tokens
        self.loss = metrics.loss if self.loss is None else _SMOOTH * self.loss + (1 - _SMOOTH) * metrics.loss
        speeds = (self.texts / metrics.seconds, self.tokens / metrics.seconds)
        return f"loss {self.loss:.4f}, {speeds[0]:.0f} {self.unit}/s, {speeds[1]:.0f} tokens/s"

    def evaluation(self, metrics: TextEvaluation, *, best: bool, goes_on: bool) -> None:
        self._note("evaluation", metrics.record() | {"best": best})
        told = ", ".join(f"{name} {metric:.4f}" for name, metric in metrics.found.metrics.items())
        self.say(f"seed {self.seed}, step {metrics.step}: {told}{' *' if best else ''}")


class SeedRun:
    """Trains one seed. Every rank makes one at the same point.

    Args:
        trainer: as made, no step taken.
        folder: of the seed, made anew.
        card: makes README.md of what result.json will say.
        shared: puts what all seeds share where it belongs, unless it is there.
    """

    def __init__(
        self,
        trainer: FinetuneTrainer,
        start: InitModel,
        folder: Path,
        card: Callable[[dict[str, Any]], str],
        shared: Callable[[], None],
    ) -> None:
        self._card, self._shared = card, shared
        self._trainer, self._start, self._seed, self._folder = trainer, start, trainer.seed, folder
        self._cube, self._task = trainer.cube, trainer.task

    def result(self) -> dict[str, Any]:
        """Trains, evaluates, predicts. What result.json says.

        Raises:
            FloatingPointError: a loss that is not finite, naming the step; on every rank.
            OSError, ValueError: a file cannot be written; on every rank.
        """
        run_on_rank0(self._cube, self._begin)
        log = self._train()
        trainer, best = self._trainer, self._complete()
        if isinstance(self._task, ComparedTask) and self._cube.rank == 0:
            for line in self._task.doubts(best):
                _log.warning("seed %d: warning: %s", self._seed, line)
        if (skipped := trainer.state.skipped_steps) and self._cube.rank == 0:
            _log.warning(
                "seed %d: %d of %d steps changed nothing: a gradient was not finite in fp16 (metrics.jsonl says which; "
                "precision.loss_scale, precision.growth_interval)",
                self._seed,
                skipped,
                trainer.state.step,
            )
        files = self._task.write_predictions(best, self._folder / PREDICTIONS)
        run_on_rank0(self._cube, lambda: self._describe(best.facts))
        result = {
            "seed": self._seed,
            "cube": str(self._cube.shape),
            "best_step": trainer.state.best.step,
            "metric": self._task.best,
            "metrics": best.metrics,
            "seconds": round(trainer.seconds, 3),
            "texts_per_second": round(log.texts / trainer.seconds, 2),
            "tokens_per_second": round(log.tokens / trainer.seconds, 1),
            "predictions": [str(path.relative_to(self._folder)) for path in files],
        }

        def end() -> None:
            write_file(self._folder / CARD, self._card(result))
            draw_curves(self._folder, self._task.best)
            write_json(self._folder / RESULT, result)

        run_on_rank0(self._cube, end)
        return result

    def _begin(self) -> None:
        """On the first rank: an unfinished seed starts again."""
        remove(self._folder)  # also where it is a link; what cannot be removed is in the way of a name, if at all
        self._restore()

    def _restore(self) -> None:
        """Writes what is known before the first step; also again, where somebody has removed it."""
        self._shared()
        make_folder(self._folder / PREDICTIONS)
        self._start.keep(self._folder)
        self._describe({})

    def _describe(self, found: Mapping[str, Any]) -> None:
        """Writes model.json."""
        facts, source = self._task.facts(), self._trainer.recipe.model.start_from
        dropout = getattr(self._trainer.model, "dropout", None)
        of_head = {} if dropout is None else {"classifier_dropout": dropout.p}
        write_model_json(
            self._folder,
            config=self._start.config,
            heads=tuple(name for name, _ in self._trainer.model.named_children() if name in HEADS),
            labels=facts.labels,
            problem=facts.problem,
            facts={**facts.more, **found, **of_head, "source": source, "seed": self._seed},
        )
        for name, content in facts.files(self._start.config).items():
            make_folder((self._folder / name).parent)
            write_json(self._folder / name, content)

    def _complete(self) -> Evaluation:
        """The best evaluation, with what its weights say of the parts that were not measured."""
        task, model, state, best = self._task, self._trainer.model, self._trainer.state, self._trainer.best
        assert best is not None, "the first evaluation is always better than none"
        missing = [part for part in task.parts if part not in best.outputs]
        if missing and state.best.step != state.step:
            kept = checkpoint.latest(self._folder / CHECKPOINTS)
            assert kept is not None, "saved with the best evaluation"
            checkpoint.load(kept, model, None, self._cube)
        more = {part: task.outputs(model, part) for part in missing}
        return dataclasses.replace(best, outputs={**best.outputs, **more})

    def _train(self) -> SeedLog:
        """What it has told: of all ranks, as each counts for itself."""
        trainer, run = self._trainer, self._trainer.recipe.run
        log = SeedLog(
            directory=self._folder,
            steps=trainer.total_steps,
            shown=self._cube.rank == 0,
            restore=self._restore,
            seed=self._seed,
            unit=self._task.unit,
        )
        schedule = LoopSchedule(
            steps=trainer.total_steps,
            evaluate_every=run.evaluate_every or -(-len(self._task.train) // run.batch),
            keep_best="alone",
            must_save=True,
        )
        with ExitStack() as stack:
            run_on_all_ranks(self._cube, lambda: stack.enter_context(log))
            checkpoints = stack.enter_context(
                Checkpoints(self._folder / CHECKPOINTS, self._cube, keep_last=1, asynchronous=False)
            )
            TrainLoop(trainer, log, checkpoints, schedule).to_the_end()
        return log


# --- All seeds --------------------------------------------------------------------------------------------------------


RESULTS = "results.json"


def finetune(command: FinetuneCommand, cube: Cube) -> dict[str, Any]:
    """Trains every seed that is not done yet, on every rank. What results.json says.

    Raises:
        ValueError: the folder holds results of other settings, or another run is at it; files that cannot be used. On
            every rank.
        FloatingPointError: a loss that is not finite.
    """
    with run_folder(command.folder, cube):
        return _all_seeds(command, cube)


def _all_seeds(command: FinetuneCommand, cube: Cube) -> dict[str, Any]:
    recipe, folder = command.settings, command.folder
    set_matmul_precision(recipe.precision, cube)
    cube = cube.with_policy(precision(recipe.precision))
    # Every seed begins with the same weights, also where a run that goes on writes newer ones meanwhile.
    source = run_on_rank0(cube, lambda: keep_settings(command))
    try:
        model = dataclasses.replace(recipe.model, start_from=source)
        start = open_start(model, command.max_length, folder, cube, pairs=command.pairs)
        check_same_settings(command, source, cube)
        task = run_on_all_ranks(cube, lambda: command.make_task(start.tokenizer, cube))
        if isinstance(task, PartsTask) and (weights := start.weights) is not None:
            filled = run_on_all_ranks(cube, partial(task.weights_of, weights))
            start = dataclasses.replace(start, weights=filled)
    except BaseException:
        drop_settings(folder)  # on every rank: one that ends may take the others with it
        raise
    if cube.rank == 0:
        _tell(task)
        for line in command.idle_settings():
            _log.info("%s", line)
    settings: dict[str, Any] = run_on_rank0(cube, lambda: parsed_json(read_file(folder / SETTINGS)))
    results = [_seed_result(command, task, start, cube, seed, settings) for seed in recipe.run.seeds]
    found = _together(results, task.best)
    run_on_rank0(cube, lambda: write_json(folder / RESULTS, found))
    if cube.rank == 0:
        best = folder / found["best"]
        told = [f"best      {best}", f"results   {folder / RESULTS}", f"next      {_next(task, best)}"]
        print(table(found, task.unit), *told, sep="\n", flush=True)
    return found


def table(results: dict[str, Any], unit: str = "texts") -> str:
    """A line for each seed, then mean and standard deviation, which a single seed does not have."""
    names = list(results["mean"])
    width = max(8, *map(len, names))
    lines = [f"{'seed':<10}" + "".join(f"{name:>{width + 2}}" for name in names) + f"{'step':>8}{unit + '/s':>12}"]
    for seed in results["seeds"]:
        cells = "".join(f"{seed['metrics'][name]:>{width + 2}.4f}" for name in names)
        lines.append(f"{seed['seed']:<10}{cells}{seed['best_step']:>8}{seed['texts_per_second']:>12.1f}")
    for label, values in (("mean", results["mean"]), ("deviation", results["deviation"])):
        shown = ["-" if values[name] is None else f"{values[name]:.4f}" for name in names]
        lines.append(f"{label:<10}" + "".join(f"{cell:>{width + 2}}" for cell in shown))
    return "\n".join(lines)


def _seed_result(
    command: FinetuneCommand, task: FinetuneTask, start: InitModel, cube: Cube, seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Args: settings: as SETTINGS has them."""
    recipe, folder = command.settings, command.folder / f"seed-{seed}"
    done: dict[str, Any] | None = run_on_rank0(cube, lambda: _read_result(folder, seed, task.best))
    if done is not None:
        if cube.rank == 0:
            _log.info("seed %d is done already: %s", seed, folder)
        return done
    steps = count_steps(len(task.train), recipe.run.batch, recipe.run.epochs)
    trainer = FinetuneTrainer(task, recipe, cube, start.config, start.weights, seed=seed, steps=steps)
    if cube.rank == 0:
        _announce(task, trainer, first=seed == recipe.run.seeds[0])
        for line in fp8_remarks(trainer.model, recipe.precision):
            _log.info("%s", line)

    def shared() -> None:
        if not (command.folder / SETTINGS).exists():
            make_folder(command.folder)
            write_json(command.folder / SETTINGS, settings)
        start.install()

    return SeedRun(trainer, start, folder, partial(model_card, command, task, settings), shared).result()


def _tell(task: FinetuneTask) -> None:
    for line in task.notes:
        _log.info("%s", line)
    if task.truncated:
        _log.warning("a part of %d texts is left out: they are longer than max_length", task.truncated)


def _announce(task: FinetuneTask, trainer: FinetuneTrainer, *, first: bool) -> None:
    if first:
        tokens = sum(example.tokens for example in task.train)
        what = f"{len(task.train)} {task.unit} to train on"
        _log.info("%s, %d tokens; %d steps", what, tokens, trainer.total_steps)
    if first and trainer.filled is not None:
        _log.info("%s", trainer.filled.in_words())


def _next(task: FinetuneTask, folder: Path) -> str:
    """A command that asks the model."""
    return f"python -m tools.predict {predicted_by(task, shlex.quote(str(folder)))}"


def _together(results: list[dict[str, Any]], best: str) -> dict[str, Any]:
    names = list(results[0]["metrics"])
    summaries = {name: summary([result["metrics"][name] for result in results]) for name in names}
    winner = max(results, key=lambda result: result["metrics"][best])
    return {
        "metric": best,
        "best": f"seed-{winner['seed']}",
        "mean": {name: mean for name, (mean, _) in summaries.items()},
        "deviation": {name: deviation for name, (_, deviation) in summaries.items()},
        "seeds": results,
    }


def _read_result(folder: Path, seed: int, best: str) -> dict[str, Any] | None:
    """Of a seed that is done. One that is damaged, of another seed or without its weights counts as not done, and is
    told: it is trained again.

    Args:
        best: the metric by which seeds are compared.
    """
    try:
        result: Any = parsed_json(read_file(folder / RESULT))
        if result["seed"] != seed:
            raise ValueError(f"it is that of seed {result['seed']!r}")
        numbers = [result["metrics"][best], *result["metrics"].values(), result["best_step"]]
        if not all(type(value) in (int, float) for value in [*numbers, result["texts_per_second"]]):
            raise ValueError("a number is of another kind")
        if checkpoint.latest(folder / CHECKPOINTS) is None:
            raise ValueError("the weights are gone")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except WRONG_ENTRIES as problem:
        _log.warning("seed %d: %s is damaged (%s): it is trained again", seed, folder / RESULT, what_is_wrong(problem))
        return None
    return cast("dict[str, Any]", result)

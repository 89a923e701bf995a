"""All seeds of a recipe, one after another, and what they come to."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_all_ranks, run_on_rank0
from tools.common.machine import write_json
from tools.finetune.init_model import InitModel, open_start
from tools.finetune.job import FinetuneCommand, claim, release
from tools.finetune.metrics import summary
from tools.finetune.seed_run import RESULT, SeedRun
from tools.finetune.tasks import FinetuneTask
from tools.finetune.trainer import FinetuneTrainer, count_steps
from tools.training.factory import precision, set_matmul_precision

RESULTS = "results.json"


def finetune(command: FinetuneCommand, cube: Cube) -> dict[str, Any]:
    """Trains every seed that is not done yet, on every rank. What results.json says.

    Raises:
        ValueError: the folder holds results of other settings; files that cannot be used. On every rank.
        FloatingPointError: a loss that is not finite.
    """
    recipe, folder = command.settings, command.folder
    set_matmul_precision(recipe.precision, cube)
    cube = cube.with_policy(precision(recipe.precision))
    # Every seed begins with the same weights, also where a run that goes on writes newer ones meanwhile.
    source = run_on_rank0(cube, lambda: claim(command))
    try:
        start = open_start(dataclasses.replace(recipe.model, start_from=source), command.max_length, folder, cube)
        task = run_on_all_ranks(cube, lambda: command.make_task(start.tokenizer, cube))
    except BaseException:
        release(folder)  # on every rank: one that ends may take the others with it
        raise
    if cube.rank == 0:
        _tell(task)
    results = [_seed_result(command, task, start, cube, seed) for seed in recipe.run.seeds]
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
    command: FinetuneCommand, task: FinetuneTask, start: InitModel, cube: Cube, seed: int
) -> dict[str, Any]:
    recipe, folder = command.settings, command.folder / f"seed-{seed}"
    done: dict[str, Any] | None = run_on_rank0(cube, lambda: _read_result(folder / RESULT))
    if done is not None:
        if cube.rank == 0:
            print(f"seed {seed} is done already: {folder}", file=sys.stderr)
        return done
    steps = count_steps(len(task.train), recipe.run.batch, recipe.run.epochs)
    trainer = FinetuneTrainer(task, recipe, cube, start.config, start.weights, seed=seed, steps=steps)
    if cube.rank == 0:
        _announce(task, trainer, first=seed == recipe.run.seeds[0])
    return SeedRun(trainer, start, folder).result()


def _tell(task: FinetuneTask) -> None:
    for line in task.notes:
        print(line, file=sys.stderr)
    if task.truncated:
        print(f"the end of {task.truncated} texts is left out: they are longer than max_length", file=sys.stderr)
    sys.stderr.flush()


def _announce(task: FinetuneTask, trainer: FinetuneTrainer, *, first: bool) -> None:
    if first:
        tokens = sum(len(example.text.ids) for example in task.train)
        print(
            f"{len(task.train)} {task.unit} to train on, {tokens} tokens; {trainer.total_steps} steps", file=sys.stderr
        )
    if first and trainer.filled is not None:
        print(trainer.filled.in_words(), file=sys.stderr)


def _next(task: FinetuneTask, folder: Path) -> str:
    """A command that asks the model."""
    name, more = task.name if task.name == "answer" else "classify", '"TEXT"'
    if name == "answer":
        more = '"QUESTION" "CONTEXT"'
    elif task.facts().more.get("pairs"):
        more = '"TEXT" "TEXT_B"'
    return f"python -m tools.predict {name} {shlex.quote(str(folder))} {more}"


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


def _read_result(path: Path) -> dict[str, Any] | None:
    """Of a seed that is done. One that is damaged counts as not done."""
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return result

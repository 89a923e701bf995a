"""README.md of a fine-tuned model: what it is, what it was made of, and how good it is (Mitchell et al. 2019)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tools.finetune.data import EMBEDDED
from tools.finetune.job import FinetuneCommand
from tools.finetune.tasks import TEST, FinetuneTask

CARD = "README.md"
_SHOWN = 20  # labels


def model_card(
    command: FinetuneCommand, task: FinetuneTask, settings: Mapping[str, Any], result: dict[str, Any]
) -> str:
    """Markdown, with a head of YAML as Hugging Face's hub reads it.

    Args:
        settings: of finetune.json.
        result: of the seed, as result.json has it.
    """
    facts, recipe = task.facts(), command.settings
    labels = facts.labels or ()
    names = ", ".join(labels[:_SHOWN]) + (f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else "")
    start = recipe.model.start_from or f"random weights, preset {recipe.model.preset}"
    about = {
        "task": facts.problem + (f": {names}" if labels else ""),
        "begun with": start,
        "trained on": f"{len(task.train):,} {task.unit}, {recipe.run.epochs} epochs in batches of {recipe.run.batch}",
        "seed": result["seed"],
        "kept": f"the weights of step {result['best_step']}, the best by {result['metric']} on dev",
        "cube": result["cube"],
        "PyTorch": torch.__version__,
    }
    metrics = {name: value for name, value in result["metrics"].items() if not name.startswith(TEST)}
    of_test = [result["metrics"].get(TEST + name) for name in metrics]
    has_test = any(value is not None for value in of_test)
    files = settings["files"] or {EMBEDDED: "made of the documentation that comes with Python"}
    lines = [
        *(
            "---",
            "library_name: tensor3d",
            f"tags: [bert, {command.task}]",
            f"metrics: {json.dumps(list(metrics))}",
            "---",
        ),
        *("", f"# {command.recipe.stem}, seed {result['seed']}", ""),
        f"A BERT that `python -m tools.finetune {command.task} {command.recipe}` has fine-tuned. Nobody has looked at "
        "what it says beyond the figures below.",
        *("", "| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in about.items())),
        *("", "## Metrics", "", "| metric | dev | test |" if has_test else "| metric | dev |"),
        "| --- | --- | --- |" if has_test else "| --- | --- |",
        *(
            f"| {name} | {value:.4f} |" + (f" {other:.4f} |" if other is not None else "")
            for (name, value), other in zip(metrics.items(), of_test, strict=True)
        ),
        *("", "Dev has chosen the weights, so its figures are better than those of new texts."),
        *("", "## Data", "", "| file | hash |", "| --- | --- |"),
        *(f"| {_cell(name)} | {_cell(hashed)} |" for name, hashed in files.items()),
        *(f"\n{note}." for note in task.notes),
        *("", "## Settings", "", "```json", json.dumps({**settings, "files": None}, indent=2), "```"),
        *("", "## Use", "", f"    python -m tools.predict {predicted_by(task)}"),
        *("    python -m tools.convert to-hf FOLDER OUT", ""),
    ]
    return "\n".join(lines)


def predicted_by(task: FinetuneTask, folder: str = "FOLDER") -> str:
    """The words of a command that asks the model."""
    name, more = task.name if task.name in ("answer", "tag", "rank", "embed") else "classify", '"TEXT"'
    if name == "answer":
        more = '"QUESTION" "CONTEXT"'
    elif name == "rank":
        more = '"QUERY" "PASSAGE" "PASSAGE"'
    elif task.facts().more.get("pairs"):
        more = '"TEXT" "TEXT_B"'
    return f"{name} {folder} {more}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

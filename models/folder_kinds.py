"""What a folder is, by the files in it: told to whoever has named one of another kind.

A run of BERT, one of GPT, a fine-tuning, a checkpoint, a tokenizer and a model of another library look alike by name. A
message that says what is missing helps less than one that also says what is there, and who reads it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensor3d.files import read_file

PROGRESS, CHECKPOINTS = "progress.json", "checkpoints"
_TOKENIZERS = (
    "tokenizer-settings.json", "tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


def instead(path: Path) -> str:
    """A sentence, after a space, of what is at `path`, and of what takes it. Empty where nothing is known of it.

    It never raises: it is part of a message about something else.
    """
    found = _kind(path)
    return f" It is {found}." if found else ""


def check_no_model(folder: Path) -> None:
    """For a training that begins in `folder`, where no run.json lies, or one of its own.

    Raises:
        ValueError: a model lies there, whose model.json it would replace, and its checkpoints in time.
    """
    with suppress(OSError):
        found = next((name for name in ("finetune.json", "model.json") if (folder / name).exists()), None)
        if found is not None and not (folder / "run.json").exists():
            raise ValueError(
                f"{folder} has a {found}, and what lies beside it would be overwritten.{instead(folder)} Choose "
                "another --output."
            )


def is_gpt_run(folder: Path) -> bool:
    """Whether tools.gpt has written it."""
    return "command" in _read(folder / "run.json")


def run_of(checkpoint: Path) -> Path:
    """The folder of the run, or of the model, that a checkpoint or a folder of checkpoints lies in."""
    full = checkpoint.absolute()
    if full.name == CHECKPOINTS:
        return full.parent
    return full.parents[1] if full.parent.name == CHECKPOINTS else full.parent


def _kind(path: Path) -> str | None:
    with suppress(OSError):
        if not path.exists():
            return None
        if not path.is_dir():
            return "a file" if path.is_file() else "neither a folder nor a regular file"
        return _kind_of_folder(path)
    return None


def _kind_of_folder(folder: Path) -> str | None:
    there = {each.name for each in folder.iterdir()}
    if not there:
        return "an empty folder"
    if "run.json" in there:
        return _run(folder)  # None: it is damaged, and no guess is better than that word
    if "finetune.json" in there:
        seeds = sorted(name for name in there if name.startswith("seed-"))
        named = f": {folder / seeds[0]} is a model of it" if seeds else ", and no seed of it is done"
        return f"a run of tools.finetune{named}"
    if "model.json" in there:
        heads = _read(folder / "model.json").get("heads")
        told = f" with the heads {', '.join(map(str, heads))}" if isinstance(heads, list) and heads else ""
        return f"a BERT of this project{told}; python -m tools.predict and tools.convert take it"
    if PROGRESS in there:
        run = run_of(folder)
        whose = _run(run)
        return f"a checkpoint of {run}{f', {whose}' if whose else ''}"
    if folder.absolute().name == CHECKPOINTS:
        return f"the folder of checkpoints of {run_of(folder)}"
    if "config.json" in there and (model := _read(folder / "config.json").get("model_type")):
        return f"a folder of Hugging Face with a model of type {str(model)[:40]!r}"
    if "corpus.json" in there:
        return "a corpus that tools.pretrain, tools.gpt or tools.corpus prepare has made: --corpus takes it"
    if "step.json" in there:
        step = _read(folder / "step.json").get("step")
        return f"the output of python -m tools.corpus {step}" if isinstance(step, str) else None
    if not there.isdisjoint(_TOKENIZERS):
        return "a tokenizer without a model"
    return None


def _run(folder: Path) -> str | None:
    facts = _read(folder / "run.json")
    if "command" in facts:
        return "a run of tools.gpt (GPT): python -m tools.gpt generate takes it"
    recipe = facts.get("recipe")
    if not isinstance(recipe, dict):
        return None
    model = recipe.get("model")
    model = model if isinstance(model, dict) else {}
    modern = ", modern encoder" if model.get("encoder") == "modern" else ""
    family = str(model.get("family", "bert"))[:40]
    return f"a run of tools.pretrain ({family}{modern}): python -m tools.predict and tools.convert take it"


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_file(path))
        if isinstance(content, dict):
            return content
    return {}

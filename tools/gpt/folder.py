"""The folder of a run: what `train` leaves there and `generate` reads.

run.json            the model's sizes, and how it was trained
tokenizer.model     the corpus' sentencepiece model
metrics.jsonl       the loss of every step, and the held-out loss
checkpoints/        the weights, as `tensor3d.checkpoint` writes them, for any cube
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.gpt import GptConfig
from tensor3d import checkpoint

_RUN, _CONFIG = "run.json", "model"
TOKENIZER, CHECKPOINTS = "tokenizer.model", "checkpoints"


def check_new(folder: Path) -> None:
    """Raises ValueError where the folder holds a run, or cannot hold one."""
    if (folder / _RUN).exists():
        raise ValueError(f"{folder} holds a run already. Choose another --output, or remove it.")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the run needs a folder, and {folder} is a file. Choose another --output.")


def begin(folder: Path, config: GptConfig, tokenizer: Path, facts: Mapping[str, Any]) -> None:
    """Writes what is known before the first step."""
    check_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    text = json.dumps({_CONFIG: dataclasses.asdict(config), **facts}, indent=2)
    (folder / _RUN).write_text(text + "\n", encoding="utf-8")


def read_config(folder: Path) -> GptConfig:
    """The model of a run.

    Raises:
        ValueError: no run, or one whose run.json is damaged.
    """
    try:
        values = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        return GptConfig(**values[_CONFIG])
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} holds no run: it has no {_RUN}. Train one first: python -m tools.gpt train --output {folder}"
        ) from None
    except (ValueError, TypeError, KeyError) as problem:
        raise ValueError(f"{folder / _RUN} is not what training writes: {problem!r}. Train the model again.") from None


def newest_weights(folder: Path) -> Path:
    """Raises ValueError where the run has no checkpoint."""
    found = checkpoint.latest(folder / CHECKPOINTS)
    if found is None:
        raise ValueError(f"{folder} has no checkpoint: its training did not come to its end. Train it again.")
    return found

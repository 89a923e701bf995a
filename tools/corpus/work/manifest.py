"""step.json: what a finished folder is, and what lies in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.corpus.work.files import draft

STEP, LEFT_OUT = "step.json", "left-out.jsonl"
VERSION = 1
"""Raised when the same input and settings would give other bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished step. It holds nothing of the machine, the time or the workers: the same work gives the same bytes."""

    step: str
    settings: dict[str, Any]
    """Everything that decides the output."""
    counts: dict[str, Any]
    files: dict[str, int]
    """Bytes of every file, by its name below the folder."""
    left_out: int
    """Places left out because they were bad; listed in left-out.jsonl."""
    folder: Path


def write_manifest(manifest: Manifest) -> None:
    values = {
        "step": manifest.step,
        "version": VERSION,
        "settings": manifest.settings,
        "counts": manifest.counts,
        "left_out": manifest.left_out,
        "files": manifest.files,
    }
    with draft(manifest.folder / STEP) as file:
        file.write(json.dumps(values, indent=1, sort_keys=True).encode() + b"\n")


def read_manifest(folder: Path, *steps: str) -> Manifest:
    """What the folder of a finished step holds.

    Args:
        folder: as the step's --output named it.
        steps: those that may have made it; none: any.

    Raises:
        ValueError: no such folder, unfinished, not of one of these steps, or a file that is missing or has another
            size.
    """
    path = folder / STEP
    wanted = " or ".join(f"`python -m tools.corpus {step}`" for step in steps) or "a step of tools.corpus"
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is no output of {wanted}: there is no {STEP}. Run that step first.") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Remove the folder and run {wanted} again.") from error
    try:
        manifest = Manifest(folder=folder, **{name: value for name, value in values.items() if name != "version"})
        version = values["version"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is no record of a step. Remove the folder and run {wanted} again.") from error
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, this program reads {VERSION}. Run {wanted} again.")
    if steps and manifest.step not in steps:
        raise ValueError(f"{folder} was made by the step {manifest.step!r}; what is needed is the output of {wanted}.")
    for name, size in manifest.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"{file} {state} where {STEP} speaks of {size} bytes. Run {wanted} again in a new folder.")
    return manifest

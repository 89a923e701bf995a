"""Checkpoints of a training run on `torch.distributed.checkpoint`: written beside, renamed when whole.

A directory of checkpoints holds one folder a step:

    step-00000100/          written as step-00000100.partial and renamed: a folder with this name is complete
        .metadata, *.distcp the model and the optimiser, logical tensors whatever the cube; random streams by rank
        progress.json       the step, the loss so far and whatever else the run must remember
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tensor3d.cube import Cube

_NAME = re.compile(r"step-(\d{8,})")
_PROGRESS = "progress.json"


def save(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, cube: Cube, progress: dict[str, Any]
) -> Path:
    """Writes one checkpoint from all ranks and returns its folder. Every rank calls it at the same step.

    Args:
        directory: shared by all ranks; made if missing.
        progress: JSON-able facts of the run, the same on every rank.

    Raises:
        OSError: the folder cannot be written; on every rank.
    """
    final = directory / f"step-{step:08d}"
    partial = final.with_suffix(".partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it wrote
        directory.mkdir(parents=True, exist_ok=True)

    def complete() -> None:
        facts = {"step": step, "ranks": cube.shape.ranks, "cube": str(cube.shape), **progress}
        (partial / _PROGRESS).write_text(json.dumps(facts, indent=2) + "\n")
        _replace_folder(partial, final)

    _on_first_rank(cube, begin)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, **_streams(cube)}
    with _alone_without_warning():
        dcp.save(state, checkpoint_id=partial, no_dist=cube.mesh is None)
    _on_first_rank(cube, complete)
    return final


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, cube: Cube) -> dict[str, Any]:
    """Fills model and optimiser from a checkpoint and returns its progress. The cube may be another than at saving.

    Random streams are restored where the number of ranks is the same; else they stay as `Cube.manual_seed` left them.

    Raises:
        ValueError: `folder` is not a checkpoint (before anything is changed), or a file of it is missing or damaged;
            on every rank.
    """
    progress = read_progress(folder)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if progress["ranks"] == cube.shape.ranks:
        state |= _streams(cube)
    try:
        with _alone_without_warning():
            dcp.load(state, checkpoint_id=folder, no_dist=cube.mesh is None)
    except CheckpointException as problem:  # DCP raises it on every rank
        causes = "; ".join(sorted({str(cause[0]) for cause in problem.failures.values()}))
        raise ValueError(f"{folder} cannot be read: {causes}. Resume from an earlier checkpoint.") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if progress["ranks"] == cube.shape.ranks:
        _restore_streams(state, cube)
    return progress


def read_progress(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its run. Raises ValueError where `folder` is not a complete checkpoint."""
    if not (folder / ".metadata").is_file() or not (folder / _PROGRESS).is_file():
        near = latest(folder) if folder.is_dir() else None
        remedy = f" Did you mean {near}?" if near else " A checkpoint is a folder step-NNNNNNNN written by training."
        raise ValueError(f"{folder} is not a checkpoint: it has no .metadata and {_PROGRESS}.{remedy}")
    try:
        progress = json.loads((folder / _PROGRESS).read_text())
    except json.JSONDecodeError as problem:
        raise ValueError(f"{folder / _PROGRESS} is damaged: {problem}. Resume from an earlier checkpoint.") from None
    if not isinstance(progress, dict) or not isinstance(progress.get("step"), int):
        raise ValueError(f"{folder / _PROGRESS} names no step. Resume from an earlier checkpoint.")
    return progress


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in a directory, or None."""
    if not directory.is_dir():
        return None
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return max(found)[1] if found else None


def _replace_folder(new: Path, final: Path) -> None:
    """Puts `new` in the place of `final`; an older folder of that name is gone only when the new one is there."""
    old = final.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(new, final)
    shutil.rmtree(old, ignore_errors=True)


def _streams(cube: Cube) -> dict[str, torch.Tensor]:
    """This rank's random streams, under keys of its own: DCP stores what differs by key for every rank."""
    streams = {f"random.cpu.{cube.rank}": torch.get_rng_state()}
    if cube.device.type == "cuda":
        streams[f"random.cuda.{cube.rank}"] = torch.cuda.get_rng_state(cube.device)
    return streams


def _restore_streams(state: dict[str, Any], cube: Cube) -> None:
    torch.set_rng_state(state[f"random.cpu.{cube.rank}"])
    if cube.device.type == "cuda":
        torch.cuda.set_rng_state(state[f"random.cuda.{cube.rank}"], cube.device)


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """DCP warns when there is no process group, even where it is told so by `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _on_first_rank(cube: Cube, action: Callable[[], None]) -> None:
    """Does `action` on rank 0 while the others wait. Its OSError is raised on every rank: none waits in vain."""
    problem: list[OSError | None] = [None]
    if cube.rank == 0:
        try:
            action()
        except OSError as error:
            problem[0] = error
    if cube.mesh is not None:
        dist.broadcast_object_list(problem, device=cube.device)
    if problem[0] is not None:
        raise problem[0]

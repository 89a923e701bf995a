"""Checkpoints of a training run: written beside and renamed when whole, readable on any cube, without pickle.

    with Checkpoints(directory, cube) as checkpoints:       every rank
        checkpoints.save(step, model, optimizer, facts)     returns when the state is copied
    progress = load(latest(directory), model, optimizer, cube)

`docs/checkpoints.md` describes the format.
"""

from __future__ import annotations

from tensor3d.checkpoint.directory import DamagedError, best, check_writable, complete, latest, read_progress
from tensor3d.checkpoint.manager import Checkpoints, RankResult, save
from tensor3d.checkpoint.reader import load
from tensor3d.checkpoint.validation import (
    CheckpointIndex,
    StoredChunk,
    StoredTensor,
    read_contents,
    strangers,
    value_problems,
    verify,
)

__all__ = [
    "CheckpointIndex",
    "Checkpoints",
    "DamagedError",
    "RankResult",
    "StoredChunk",
    "StoredTensor",
    "best",
    "check_writable",
    "complete",
    "latest",
    "load",
    "read_contents",
    "read_progress",
    "save",
    "strangers",
    "value_problems",
    "verify",
]

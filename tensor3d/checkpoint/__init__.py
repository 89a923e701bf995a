"""Checkpoints of a training run: written beside and renamed when whole, readable on any cube, without pickle.

    with Checkpoints(directory, cube) as checkpoints:       every rank
        checkpoints.save(step, model, optimizer, facts)     returns when the state is copied
    progress = load(latest(directory), model, optimizer, cube)

`docs/checkpoints.md` describes the format.
"""

from __future__ import annotations

from tensor3d.checkpoint.contents import Chunk, Contents, StoredTensor, read_contents, verify
from tensor3d.checkpoint.folders import DamagedError, best, check_writable, complete, latest, read_progress
from tensor3d.checkpoint.loading import load
from tensor3d.checkpoint.saver import Checkpoints, Outcome, save

__all__ = [
    "Checkpoints",
    "Chunk",
    "Contents",
    "DamagedError",
    "Outcome",
    "StoredTensor",
    "best",
    "check_writable",
    "complete",
    "latest",
    "load",
    "read_contents",
    "read_progress",
    "save",
    "verify",
]

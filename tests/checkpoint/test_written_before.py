"""A checkpoint that commit 5841ce2 wrote, before the code moved into its rooms, still loads to the last bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tensor3d import checkpoint
from tests.checkpoint.subject import ALONE, Shape, make, state
from tests.ranks import run_ranks

# 1x2x1, after one step: what `test_cubes.written` saves.
FOLDER = Path(__file__).parent / "of_5841ce2" / "step-00000001"
# SHA-256 of parameters, buffer, moments and counts of steps, as that commit had them in memory.
DIGEST = "c6263358a031aa8453fafac277c643e45b22a06c8d6e262da63e0e0ff1c8c2e5"


def loaded(shape: Shape) -> str:
    cube, model, optimizer = make(shape, seed=2)
    progress = checkpoint.load(FOLDER, model, optimizer, cube)
    assert (progress["step"], progress["note"]) == (1, "first")
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in state(model, optimizer))).hexdigest()


@pytest.mark.parametrize("shape", [ALONE, (1, 2, 1, 1), (2, 1, 1, 1)])
def test_its_tensors_are_those_that_were_saved(shape: Shape) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    digests = [loaded(shape)] if ranks == 1 else run_ranks(ranks, loaded, shape)
    assert set(digests) == {DIGEST}


def test_it_is_whole() -> None:
    assert checkpoint.verify(FOLDER) == []

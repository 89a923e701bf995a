"""A part of a model, filled from a checkpoint of a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensor3d import checkpoint
from tests.checkpoint.subject import ALONE, Shape, make, step
from tests.ranks import run_ranks
from tests.single_device_reference import full, ranks_of


def part_of(folder: Path, shape: Shape) -> None:
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    path = checkpoint.save(folder, 1, model, optimizer, cube, {"epoch": 3})
    wanted = full(model.tokens.weight).clone()
    cube, other, _ = make(shape, seed=2, positions=5)  # of another shape in the checkpoint
    other.register_parameter("more", torch.nn.Parameter(torch.ones(2)))  # not in the checkpoint at all
    before = {name: full(tensor).clone() for name, tensor in other.state_dict(keep_vars=True).items()}
    counts = {name: parameter._version for name, parameter in other.named_parameters()}
    progress = checkpoint.load(path, other, None, cube, only=["tokens.weight"])
    assert progress["epoch"] == 3
    written = [name for name, parameter in other.named_parameters() if parameter._version > counts[name]]
    assert written == ["tokens.weight"], "by their counters keepers of copies know"
    assert torch.equal(full(other.tokens.weight), wanted)
    rest = {name for name in before if name != "tokens.weight"}
    assert all(torch.equal(full(other.state_dict(keep_vars=True)[name]), before[name]) for name in rest)
    for only, message in (
        (["tokens"], "only names 'tokens', which is nothing of the model"),
        (["more"], "has no model.more, which is asked for"),
        (["positions.weight"], r"of shape \(8, 16\), and the shape \(5, 16\) is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(path, other, None, cube, only=only)
    assert torch.equal(full(other.tokens.weight), wanted)


def test_on_one_device(tmp_path: Path) -> None:
    part_of(tmp_path, ALONE)


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), pytest.param((2, 2, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_on_cubes(tmp_path: Path, shape: Shape) -> None:
    run_ranks(ranks_of(shape), part_of, tmp_path, shape)


def test_not_with_an_optimiser(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    step(cube, model, optimizer)
    path = checkpoint.save(tmp_path, 1, model, optimizer, cube, {})
    with pytest.raises(ValueError, match=r"fills some.*optimiser needs all"):
        checkpoint.load(path, model, optimizer, cube, only=["tokens.weight"])

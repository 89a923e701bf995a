"""Delayed scaling in checkpoints: a run that is resumed has the bits of one that was not interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, Linear3D, MixedPrecisionPolicy, gather, local, shard
from tensor3d.checkpoint import load, save
from tensor3d.distributed.fp8_scales import history_tensor
from tensor3d.optim import AdamW
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, ranks_of

DELAYED = MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed", fp8_history=3)


def _made(cube: Cube) -> tuple[Linear3D, AdamW]:
    cube.manual_seed(1)
    layer = Linear3D(64, 64, cube, std=0.3)
    return layer, AdamW(layer.parameters(), cube, lr=0.01)


def _steps(layer: Linear3D, optimizer: AdamW, cube: Cube, steps: range) -> Tensor:
    y = torch.zeros(())
    for step in steps:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) * 2.0 ** (step % 3)
        y = gather(layer(shard(x, cube, "z")), cube, "y")
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def _resumed(shape: Shape, folder: Path) -> tuple[Tensor, Tensor]:
    cube = Cube(*shape, precision=DELAYED)
    layer, optimizer = _made(cube)
    _steps(layer, optimizer, cube, range(4))
    path = save(folder, 4, layer, optimizer, cube, {})
    wanted = _steps(layer, optimizer, cube, range(4, 8))
    other, another = _made(cube)
    load(path, other, another, cube)
    history = history_tensor(other.weight)
    assert history is not None
    assert _steps(other, another, cube, range(4, 8)).equal(wanted)
    assert local(other.weight).equal(local(layer.weight))
    return history, wanted


@pytest.mark.parametrize("shape", fast_alone((1, 1, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (1, 1, 1, 2)))
def test_resuming_has_the_same_bits_and_any_cube_reads_the_history(shape: Shape, tmp_path: Path) -> None:
    written, _ = run_ranks(ranks_of(shape), _resumed, shape, tmp_path)[0]
    cube = Cube.single(precision=DELAYED)
    layer, optimizer = _made(cube)
    load(next(tmp_path.glob("step-*")), layer, optimizer, cube)
    found = history_tensor(layer.weight)
    assert found is not None
    assert found.equal(written)
    assert cube.fp8_scales.of(layer.weight)[0] is not None


def test_the_cube_at_hand_may_have_another_precision_than_the_model(tmp_path: Path) -> None:
    """As where a model is made on `cube.with_policy(...)`, and saved with the cube of before."""
    cube = Cube.single()
    layer, optimizer = _made(cube.with_policy(DELAYED))
    _steps(layer, optimizer, layer.cube, range(3))
    kept = save(tmp_path, 3, layer, optimizer, cube, {})
    other, another = _made(cube.with_policy(DELAYED))
    load(kept, other, another, cube)
    found, wanted = history_tensor(other.weight), history_tensor(layer.weight)
    assert found is not None
    assert wanted is not None
    assert found.equal(wanted)


def test_a_run_goes_on_with_or_without_it(tmp_path: Path) -> None:
    plain, delayed = Cube.single(precision=MixedPrecisionPolicy(compute=torch.bfloat16)), Cube.single(precision=DELAYED)
    layer, optimizer = _made(plain)
    _steps(layer, optimizer, plain, range(2))
    without = save(tmp_path / "without", 2, layer, optimizer, plain, {})
    other, another = _made(delayed)
    _steps(other, another, delayed, range(2))
    holding = save(tmp_path / "with", 2, other, another, delayed, {})
    load(holding, layer, optimizer, plain)
    assert history_tensor(layer.weight) is None
    with pytest.warns(UserWarning, match="no history of FP8's scales: they begin anew"):
        load(without, other, another, delayed)
    assert history_tensor(other.weight) is None
    _steps(other, another, delayed, range(2))

"""The loss scale: what it does by itself, and one overflow on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tensor3d import Cube, local
from tensor3d.optim import GradScaler
from tensor3d.optim.clip_grad import clip_gradients
from tests.optim.zoo import KINDS, NoWaiting, bits, give, gradients_of, make, same
from tests.ranks import run_ranks

GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


def scales(scaler: GradScaler, *steps: torch.Tensor) -> list[float]:
    found = []
    for found_inf in steps:
        scaler.update(found_inf)
        found.append(float(scaler.scale))
    return found


def test_it_grows_after_good_steps_in_a_row_and_falls_at_once() -> None:
    scaler = GradScaler(Cube.single(), initial=8.0, growth_interval=2)
    assert scales(scaler, GOOD, GOOD, GOOD, BAD, GOOD, GOOD, BAD, BAD) == [8, 16, 16, 8, 8, 16, 8, 4]
    other = GradScaler(Cube.single(), initial=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=1)
    assert scales(other, GOOD, BAD) == [24, 6]


def test_it_stays_in_its_bounds() -> None:
    assert scales(GradScaler(Cube.single(), initial=2.0**-23), BAD, BAD, BAD) == [2.0**-24] * 3
    assert scales(GradScaler(Cube.single(), initial=2.0**23, growth_interval=1), GOOD, GOOD, GOOD) == [2.0**24] * 3


def test_a_scaled_loss_has_scaled_gradients() -> None:
    """A gradient of 2**-26 is 0 in fp16, and none under a scale of 2**10."""
    weight, tiny = nn.Parameter(torch.tensor(1.0)), 2.0**-26
    for initial, wanted in ((1.0, 0.0), (1024.0, tiny)):
        scaler = GradScaler(Cube.single(), initial=initial)
        weight.grad = None
        scaler.scaled(weight.half().float() * tiny).backward()
        assert weight.grad is not None
        assert float(weight.grad) / float(scaler.scale) == wanted


def test_the_host_waits_for_nothing() -> None:
    scaler = GradScaler(Cube.single())
    loss = nn.Parameter(torch.tensor(1.0))
    with NoWaiting():
        scaler.scaled(loss)
        scaler.update(BAD)
    assert float(scaler.scale) == 2.0**15


def test_its_state_goes_round() -> None:
    scaler = GradScaler(Cube.single(), initial=8.0, growth_interval=2)
    scaler.update(GOOD)
    state = {name: tensor.clone() for name, tensor in scaler.state_dict().items()}
    other = GradScaler(Cube.single(), growth_interval=2)
    scale = other.scale
    other.load_state_dict(state)
    assert other.scale is scale, "whoever holds the tensor must see it"
    assert scales(other, GOOD) == scales(scaler, GOOD) == [16]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"scale": 1.0}, r"scale and good_steps\. Got \['scale'\]"),
        ({"scale": 0.0, "good_steps": 0}, r"Got 0\.0 after 0\. The checkpoint is damaged"),
        ({"scale": math.nan, "good_steps": 0}, "Got nan after 0"),
        ({"scale": 8.0, "good_steps": -1}, r"Got 8\.0 after -1"),
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict[str, float], message: str) -> None:
    scaler = GradScaler(Cube.single())
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    assert float(scaler.scale) == 2.0**16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 2.0**25}, r"initial must be from 2\*\*-24 to 2\*\*24\. Got 33554432"),
        ({"initial": math.nan}, "initial must be"),
        ({"growth_factor": 1.0}, r"growth_factor.*\b1.*\b1\.0"),
        ({"backoff_factor": 1.0}, r"backoff_factor.*\b0.*\b1.*\b1\.0"),
        ({"growth_interval": 0}, r"growth_interval.*\b1.*\b0"),
        ({"growth_interval": 2.5}, r"Got 2\.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradScaler(Cube.single(), **options)


def _overflow(culprit: int) -> dict[str, Any]:
    """A good step, one with an inf in one block of one rank, and a good one."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        cube, zoo, optimizer = make(kind, (1, 2, 2, 1))
        scaler = GradScaler(cube, initial=8.0)
        changed, seen = [], []
        for step in range(3):
            give(zoo, cube, {name: 8.0 * gradient for name, gradient in gradients_of(step).items()})
            if step == 1 and cube.rank == culprit:
                assert zoo.gain.grad is not None
                local(zoo.gain.grad)[0] = math.inf
            before = bits(zoo, optimizer)
            optimizer.found_inf = clip_gradients(zoo.parameters(), 1.0, cube, loss_scale=scaler.scale).found_inf
            optimizer.step()
            scaler.update(optimizer.found_inf)
            changed.append(not same(bits(zoo, optimizer), before))
            seen.append(float(scaler.scale))
        found[kind] = (changed, seen, float(optimizer.state[zoo.gain]["step"]))
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """Rank 3 holds a copy of the block that no norm counts: also what happens there is known everywhere."""
    for found in run_ranks(4, _overflow, 3):
        for kind in KINDS:
            assert found[kind] == ([True, False, True], [8.0, 4.0, 4.0], 2.0)

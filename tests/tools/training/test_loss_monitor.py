"""What is said of a run that goes wrong: the tensor and the ranks, and jumps of made-up losses."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from tensor3d import Cube, Linear3D, local
from tensor3d.optim.clip_grad import clip_gradients
from tests.ranks import run_ranks
from tools.training.loss_monitor import LossSpikeDetector, first_non_finite

# Which tensor is not finite


def _pair(cube: Cube) -> nn.Sequential:
    cube.manual_seed(0)
    return nn.Sequential(Linear3D(8, 8, cube, "z"), Linear3D(8, 8, cube, "y"))


def _spoil(cube: Cube, kind: str, name: str, ranks: tuple[int, ...]) -> list[str | None]:
    """Says what is found before and after one number of one block has become infinite."""
    model = _pair(cube)
    model(torch.ones(4, 8 // cube.shape.z)).sum().backward()
    told = [first_non_finite(model.named_parameters(), cube)]
    parameter = dict(model.named_parameters())[name]
    if cube.rank in ranks:
        with torch.no_grad():
            tensor = parameter if kind == "weight" else parameter.grad
            assert tensor is not None
            local(tensor).view(-1)[0] = math.inf
    told.append(first_non_finite(model.named_parameters(), cube))
    if kind == "gradient":  # clipping spoils all gradients, and keeps the norms from before
        norm = clip_gradients(model.parameters(), 1.0, cube)
        told.append(first_non_finite(model.named_parameters(), cube, norms=norm.parts))
        model.zero_grad(set_to_none=True)  # the norms outlive them
        told.append(first_non_finite(model.named_parameters(), cube, norms=norm.parts))
    return told


def _spoil_on_ranks(kind: str, name: str, ranks: tuple[int, ...]) -> list[str | None]:
    return _spoil(Cube(1, 2, 2), kind, name, ranks)


@pytest.mark.parametrize("kind", ["weight", "gradient"])
def test_a_parameter_and_its_rank_are_named(kind: str) -> None:
    results = run_ranks(4, _spoil_on_ranks, kind, "1.weight", (2,))
    assert all(told == results[0] for told in results), "the same on every rank"
    named = "the weight 1.weight" if kind == "weight" else "the gradient of 1.weight"
    assert results[0][0] is None
    assert set(results[0][1:]) == {f"{named} is not finite on rank 2 of 4"}


def test_copies_are_named_with_all_their_ranks() -> None:
    told = run_ranks(4, _spoil_on_ranks, "gradient", "0.bias", (1, 3))[0]
    assert told[1] == "the gradient of 0.bias is not finite on ranks 1, 3 of 4"


def test_one_device() -> None:
    told = _spoil(Cube.single(), "gradient", "0.weight", (0,))
    assert told == [None, *["the gradient of 0.weight is not finite on rank 0"] * 3]


def test_the_backward_pass_is_followed_to_where_it_went_wrong() -> None:
    cube = Cube.single()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 1.0 if name.startswith("2") else math.nan)
    assert first_non_finite(model.named_parameters(), cube) == (
        "the gradient of 1.bias is not finite on rank 0 (and 3 other gradients)"
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert first_non_finite(model.named_parameters(), cube) == (
        "all 6 gradients are not finite, 2.bias on rank 0: it came with the loss or its scale"
    )
    with torch.no_grad():
        dict(model.named_parameters())["1.weight"][0, 0] = math.nan
    assert first_non_finite(model.named_parameters(), cube) == "the weight 1.weight is not finite on rank 0"


def test_norms_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"norms.*2.*3"):
        first_non_finite(nn.Linear(2, 2).named_parameters(), Cube.single(), norms=torch.ones(3))


# A loss that jumps


def training(steps: int, seed: int, noise: float = 0.15) -> list[float]:
    """A loss like BERT's: from ln(30522) down in a few hundred steps, then slowly, with the noise of batches."""
    draw = random.Random(seed)
    return [
        2.0 + 5.0 * math.exp(-step / 150) + 3.3 * math.exp(-step / 1500) + draw.gauss(0, noise * (1 + 2 / (1 + step)))
        for step in range(steps)
    ]


def spikes(losses: list[float], window: int = 100, factor: float = 10.0) -> list[int]:
    watch = LossSpikeDetector(window, factor)
    return [step for step, loss in enumerate(losses) if watch.update(step, loss) is not None]


@pytest.mark.parametrize("seed", range(5))
def test_no_false_alarm_from_the_noisy_start_on(seed: int) -> None:
    assert spikes(training(2000, seed)) == []


@pytest.mark.parametrize("at", [300, 700, 1500])
def test_a_jump_is_told_once(at: int) -> None:
    losses = training(2000, seed=1)
    losses[at : at + 30] = [loss + 4.0 for loss in losses[at : at + 30]]
    assert spikes(losses) == [at]


def test_a_second_jump_after_the_loss_has_come_back() -> None:
    losses = [2.0 + 0.01 * (step % 5) for step in range(500)]
    for at in (200, 210, 400):
        losses[at] = 9.0
    assert spikes(losses) == [200, 210, 400]
    watch = LossSpikeDetector(100, 10.0)
    told = [watch.update(step, loss) for step, loss in enumerate(losses)]
    assert told[200] == (
        "step 200: the loss jumped to 9, from 2.02 usual in the 100 steps before (346 times its usual deviation)"
    )


def test_a_divergence_for_good_is_told_once() -> None:
    assert spikes([2.0 + 0.001 * (step % 7) for step in range(300)] + [50.0] * 300) == [300]


def test_a_loss_that_stands_still_may_move_a_little() -> None:
    assert spikes([3.0] * 200 + [3.2] + [3.0] * 10) == []
    assert spikes([3.0] * 200 + [3.4] + [3.0] * 10) == [200]


def test_what_is_not_finite_is_no_spike_and_does_not_spoil_the_window() -> None:
    losses = [2.0 + 0.01 * (step % 5) for step in range(300)]
    losses[150] = math.nan
    losses[160] = math.inf
    losses[250] = 8.0
    assert spikes(losses) == [250]


def test_a_resumed_run_is_held_against_the_losses_before() -> None:
    before = LossSpikeDetector(100)
    for step in range(150):
        assert before.update(step, 2.0 + 0.01 * (step % 5)) is None
    told = LossSpikeDetector(100, losses=before.losses).update(150, 9.0)
    assert told is not None
    assert "in the 100 steps before" in told
    assert LossSpikeDetector(100).update(150, 9.0) is None


def test_switched_off() -> None:
    assert spikes([1.0] * 200 + [100.0], factor=0.0) == []


@pytest.mark.parametrize(("window", "factor"), [(2, 1.0), (10, -1.0), (10, math.nan), (10, math.inf)])
def test_numbers_out_of_range_are_refused(window: int, factor: float) -> None:
    with pytest.raises(ValueError, match="Got"):
        LossSpikeDetector(window, factor)

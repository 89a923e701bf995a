"""StableAdamW on a cube against the algorithm of the paper, written out on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tensor3d import Cube
from tensor3d.distributed.comm_stats import summed_elements
from tensor3d.optim import AdamW, StableAdamW
from tests.optim.zoo import BETAS, EPS, LAYOUTS, first_values, give, gradients_of, make, rate
from tests.ranks import run_ranks
from tests.single_device_reference import error, full

Shape = tuple[int, int, int, int]
STEPS, DECAY, SPIKE = 8, 0.1, 5


def gradients(step: int) -> dict[str, Tensor]:
    """As the zoo has them, and a hundred times as large in one step."""
    return {name: (100.0 if step == SPIKE else 1.0) * value for name, value in gradients_of(step).items()}


def paper() -> tuple[dict[str, Tensor], list[float]]:
    """Weights after all steps, and the largest rms of each: Algorithm 2 of Wortsman et al. (2023), whose betas, not the
    moments, are debiased."""
    weights = first_values()
    v, u = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    worst = []
    for t in range(1, STEPS + 1):
        beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in BETAS)
        found = []
        for name, g in gradients(t - 1).items():
            v[name] = beta1 * v[name] + (1 - beta1) * g
            u[name] = beta2 * u[name] + (1 - beta2) * g * g
            rms = float((g * g / u[name].clamp_min(EPS**2)).mean() ** 0.5)
            lr = rate(t - 1) / max(1.0, rms)
            decay = DECAY if g.dim() > 1 else 0.0
            weights[name] = (1 - lr * decay) * weights[name] - lr * v[name] / (u[name] ** 0.5 + EPS)
            found.append(rms)
        worst.append(max(found))
    return weights, worst


def _errors(shape: Shape) -> dict[str, float]:
    """By regions, and without."""
    return {f"{name}, {ways}": error for ways in (False, True) for name, error in _some_errors(shape, ways).items()}


def _some_errors(shape: Shape, regions: bool) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube, zoo, optimizer = make("stable_adamw", shape, DECAY, regions)
    with cube.traffic.counting() as count:
        for step in range(STEPS):
            give(zoo, cube, gradients(step))
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
    if cube.shape.ranks > 1:
        assert dict(count.calls) == {(cube.over("data", "x", "y", "z").name, "all-reduce"): STEPS}
        assert count.total_bytes == STEPS * summed_elements(cube.shape.ranks, len(LAYOUTS)) * 8, "of a number a tensor"
    wanted, worst = paper()
    assert worst[SPIKE] > 2 > worst[0], "the spike shortens its step, and no other is shortened as much"
    return {name: error(full(parameter), wanted[name], name) for name, parameter in zoo.named_parameters()}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 4, 2, 1), id="1x4x2", marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 2), id="1x2x1-data2"),
        pytest.param((2, 2, 2, 1), id="2x2x2", marks=pytest.mark.slow),
    ],
)
def test_equals_the_paper_on_one_device(shape: Shape) -> None:
    x, y, z, data = shape
    for errors in run_ranks(x * y * z * data, _errors, shape):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.usefixtures("fp64")
def test_one_device_without_a_process_group() -> None:
    assert max(_errors((1, 1, 1, 1)).values()) <= 1e-12


def test_a_first_step_is_adamws_and_one_behind_a_spike_is_shorter() -> None:
    """By hand: v / bias2 is at first the square of the gradient, and the mean of its quotients is 1. Of two equal
    gradients and one ten times as large, with beta2 = 0.5, it is (1 + 2 + 400) / 7, so that rms = 10 / sqrt(57.57)."""
    cube = Cube.single()
    weights = {kind: torch.nn.Parameter(torch.ones(2)) for kind in (AdamW, StableAdamW)}
    lengths: dict[type, list[float]] = {kind: [] for kind in weights}
    for kind, weight in weights.items():
        optimizer = kind([weight], cube, lr=0.1, betas=(0.0, 0.5), eps=1e-12, weight_decay=0.0)
        for size in (1.0, 1.0, 10.0):
            before = weight.detach().clone()
            weight.grad = torch.full((2,), size)
            optimizer.step()
            lengths[kind].append(float((before - weight.detach())[0]))
    assert lengths[StableAdamW][:2] == pytest.approx(lengths[AdamW][:2], rel=1e-6)
    rms = 10 / (403 / 7) ** 0.5
    assert lengths[StableAdamW][2] == pytest.approx(lengths[AdamW][2] / rms, rel=1e-6)


def test_a_beta_that_is_one_in_fp32_leaves_something_to_divide_by() -> None:
    """The first step is AdamW's, whatever the betas are; an element without a gradient stays."""
    for beta2 in (0.999999, 1 - 1e-9):
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.tensor([0.0, 1.0, 2.0, -1.0])
        StableAdamW([weight], Cube.single(), lr=0.1, betas=(0.0, beta2), eps=1e-12, weight_decay=0.0).step()
        assert torch.allclose(weight, torch.tensor([1.0, 0.9, 0.9, 1.1]))

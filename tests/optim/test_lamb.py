"""LAMB on a cube against the algorithm of the paper, written out on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, local
from tensor3d.distributed.collectives import Axis, CommHandle
from tensor3d.distributed.comm_stats import summed_elements
from tensor3d.optim import Lamb, tensorwise
from tests.optim.zoo import BETAS, EPS, LAYOUTS, first_values, gradients_of, make, rate, run
from tests.ranks import run_ranks
from tests.single_device_reference import error, full

Shape = tuple[int, int, int, int]
STEPS, DECAY = 8, 0.1
CASES = [(False, False), (True, False), (True, True)]
"""adapt_all, regions."""
MATRICES = [name for name, (_, size) in LAYOUTS.items() if len(size) == 2]


def paper(adapt_all: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments after all steps: Algorithm 2 of You et al. (2020) with phi the identity.

    With NVIDIA's two conventions: a ratio of 1 where a norm is 0, and, unless `adapt_all`, where nothing decays.
    """
    weights = first_values()
    m, v = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    (beta1, beta2), eps = BETAS, EPS
    for t in range(1, STEPS + 1):
        for name, g in gradients_of(t - 1).items():
            decay = DECAY if name in MATRICES else 0.0
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            r = (m[name] / (1 - beta1**t)) / ((v[name] / (1 - beta2**t)) ** 0.5 + eps)
            u = r + decay * weights[name]
            size, length = float((weights[name] ** 2).sum() ** 0.5), float((u**2).sum() ** 0.5)
            ratio = size / length if size > 0 and length > 0 and (decay > 0 or adapt_all) else 1.0
            weights[name] = weights[name] - rate(t - 1) * ratio * u
    return weights, m, v


def _errors(shape: Shape, adapt_all: bool, regions: bool = False) -> dict[str, float]:
    cube, zoo, optimizer = make("lamb", shape, DECAY, regions, adapt_all=adapt_all)
    with cube.traffic.counting() as count, sums_seen() as seen:
        run(optimizer, zoo, cube, range(STEPS))
    if count.calls:  # none on one device, and none where the sabotage below took them away
        names = cube.over("data", "x", "y", "z").name
        assert dict(count.calls) == {(names, "all-reduce"): STEPS}, "one collective a step"
        numbers = 2 * (len(LAYOUTS) if adapt_all else len(MATRICES))
        assert count.total_bytes == STEPS * summed_elements(cube.shape.ranks, numbers) * 8, "of two numbers a tensor"
    adapted = [name for name, _ in zoo.named_parameters() if adapt_all or name in MATRICES]
    adapted.sort(key=lambda name: name not in MATRICES)  # the group with decay comes first
    squares = torch.stack([first_values()[name].square().sum() for name in adapted])
    errors = {"|w|^2": error(seen[0][0], squares)}
    wanted = paper(adapt_all)
    for name, parameter in zoo.named_parameters():
        state = optimizer.state[parameter]
        assert float(state["step"]) == STEPS
        got = (parameter, state["exp_avg"], state["exp_avg_sq"])
        for what, tensor, tensors in zip(("", ".m", ".v"), got, wanted, strict=True):
            errors[name + what] = error(full(tensor), tensors[name], name)
    return errors


@contextmanager
def sums_seen() -> Iterator[list[Tensor]]:
    """What the steps inside sum over ranks: square norms of weights, then of updates, one entry a step."""
    seen, send = [], tensorwise.all_reduce

    def watched(part: Tensor, axis: Axis) -> CommHandle:
        pending = send(part, axis)
        seen.append(pending.wait().clone())
        return pending

    with mock.patch("tensor3d.optim.tensorwise.all_reduce", watched):
        yield seen


def _sound_and_broken(shape: Shape) -> tuple[dict[str, float], dict[str, float], bool]:
    """The worst error for each case, and with each defect: the norms of blocks, and of copies counted again."""
    torch.set_default_dtype(torch.float64)
    sound = {str(case): max(_errors(shape, *case).values()) for case in CASES}
    empty = any(local(p).numel() == 0 for p in make("lamb", shape)[1].parameters())
    defects: dict[str, Any] = {"all_reduce": lambda part, axis: CommHandle(part), "owns_for_norm": lambda *_: True}
    broken = {}
    for name, defect in defects.items() if shape == (2, 2, 2, 1) else ():
        with mock.patch(f"tensor3d.optim.tensorwise.{name}", defect):
            broken[name] = max(_errors(shape, adapt_all=True).values())
    return sound, broken, empty


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 4, 2, 1), id="1x4x2"),
        pytest.param((2, 2, 2, 1), id="2x2x2", marks=pytest.mark.slow),
        pytest.param((8, 1, 1, 1), id="8x1x1", marks=pytest.mark.slow),
    ],
)
def test_equals_the_paper_on_one_device(shape: Shape) -> None:
    results = run_ranks(8, _sound_and_broken, shape)
    for sound, broken, _ in results:
        assert max(sound.values()) <= 1e-12, sound
        assert all(distance >= 1e-3 for distance in broken.values()), broken
        assert bool(broken) == (shape == (2, 2, 2, 1))
    assert shape == (2, 2, 2, 1) or any(empty for _, _, empty in results), "no rank held an empty block"


def _on_data_axis() -> float:
    torch.set_default_dtype(torch.float64)
    return max(error for case in CASES for error in _errors((1, 2, 1, 2), *case).values())


def test_copies_of_the_model_count_once() -> None:
    assert max(run_ranks(4, _on_data_axis)) <= 1e-12


@pytest.mark.usefixtures("fp64")
def test_one_device_without_a_process_group() -> None:
    assert max(error for case in CASES for error in _errors((1, 1, 1, 1), *case).values()) <= 1e-12


def test_the_ratio_makes_steps_as_long_as_their_weights() -> None:
    """By hand: a first step of Adam is the sign of the gradient, so |u| = 2 for four elements, and |w| = 6."""
    cube = Cube.single()
    weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
    weight.grad = torch.tensor([[1.0, -1.0], [100.0, -0.01]])
    Lamb([weight], cube, lr=0.1, eps=1e-12, weight_decay=0.0, adapt_all=True).step()
    assert weight.tolist() == [pytest.approx([2.7, 3.3], rel=1e-6)] * 2

"""Ranks that use different parameters in a step: sums are by parameter, or refused on all ranks by name.

The truth is a twin on one device, which runs what each rank has run, one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, ExecutionPolicy, LayerNorm3D, Linear3D, RMSNorm3D, SmallHead3D, local_param, normal, vector
from tensor3d.sharding.param_layout import copies
from tests.dtensors import LocalSGD
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, make_twins, ranks_of
from tests.small_buckets import small_buckets

Shape = tuple[int, int, int, int]
HIDDEN = 8
DATA, X, BOX = (1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 2)


class Blocks(nn.Module):
    """Layers of equal and of different sizes, copies of one another, and one that shares its weight. `norms`: two."""

    def __init__(self, cube: Cube, *, norms: bool = False) -> None:
        super().__init__()
        self.norm, self.rms = LayerNorm3D(HIDDEN, cube, "z"), RMSNorm3D(HIDDEN, cube, "z")
        if norms:
            return
        self.twin_norm = copy.deepcopy(self.norm)
        self.other_rms = RMSNorm3D(HIDDEN, cube, "z")
        self.pair = nn.Sequential(Linear3D(HIDDEN, HIDDEN, cube, std=0.5), Linear3D(HIDDEN, HIDDEN, cube, "y", std=0.5))
        self.twin_pair = copy.deepcopy(self.pair)
        self.tied_pair = copy.deepcopy(self.pair)
        self.tied_pair[0].weight = self.pair[0].weight
        self.head3, self.head5 = (SmallHead3D(HIDDEN, classes, cube, "z", std=0.5) for classes in (3, 5))

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names.split():
            x = getattr(self, name)(x)
        return x.cos().sum()


class Trial(NamedTuple):
    shape: Shape
    passes: tuple[tuple[str, ...], ...]
    """Of each micro-batch, what each rank runs: by data, or by x."""


ALIKE = ("pair norm twin_pair rms",) * 2
TRIALS = {
    "each skips the other's layer": Trial(DATA, (("pair norm", "twin_pair norm"),)),
    "one skips a layer": Trial(DATA, (("pair twin_pair norm", "norm"),)),
    "one uses a layer twice": Trial(DATA, (("norm pair", "norm pair pair"),)),
    "another order": Trial(DATA, (("rms other_rms pair twin_pair", "twin_pair other_rms pair rms"),)),
    "heads of different sizes": Trial(DATA, (("pair head3", "pair head5"),)),
    "a tied weight": Trial(DATA, (("pair norm", "tied_pair twin_norm"),)),
    "accumulated": Trial(DATA, (("pair", "twin_pair"), ("norm", "rms"), ("pair head3", "rms head3"))),
    "accumulated, the last alike": Trial(DATA, (("pair norm", "twin_pair rms"), ("norm", "norm"))),
    "no layer in common": Trial(DATA, (("pair norm", "rms head5"),)),
    # What two passes had alike, the next ones send while they run: each rank in its own order, and what it has.
    "alike": Trial(DATA, (ALIKE,)),
    "alike again": Trial(DATA, (ALIKE,)),
    "one in another order": Trial(DATA, (("pair norm twin_pair rms", "twin_pair rms pair norm"),)),
    "one skips the first that is sent": Trial(DATA, (("pair norm twin_pair rms", "pair norm twin_pair"),)),
    "one skips the last that is sent": Trial(DATA, (("pair norm twin_pair rms", "norm twin_pair rms"),)),
    "both skip one in the midst": Trial(DATA, (("pair norm rms",) * 2,)),
    "one uses one twice, which was sent": Trial(DATA, (("pair norm twin_pair rms rms", "pair norm twin_pair rms"),)),
    "alike, accumulated": Trial(DATA, (("pair head3",) * 2, ALIKE)),
    "one skips, accumulated": Trial(DATA, (ALIKE, ("pair norm twin_pair rms", "rms"))),
    "both in another order": Trial(DATA, (("rms twin_pair norm pair",) * 2,)),
    "both in another order again": Trial(DATA, (("rms twin_pair norm pair",) * 2,)),
    "on x": Trial(X, (("norm rms", "twin_norm other_rms"),)),
    "on x, one alone": Trial(X, (("norm twin_norm rms", "rms"),)),
    "on x, accumulated": Trial(X, (("norm", "rms"), ("rms", "twin_norm"), ("norm", "norm"))),
    "planes, alike": Trial(BOX, (ALIKE,)),
    "planes, alike again": Trial(BOX, (ALIKE,)),
    "planes, one skips one that is sent": Trial(BOX, (("pair norm twin_pair rms", "norm twin_pair"),)),
    "planes of two ranks": Trial(BOX, (("pair norm head5", "norm tied_pair"), ("norm", "twin_norm pair"))),
}


def _place(cube: Cube, shape: Shape) -> int:
    return cube.coordinate["data" if shape[3] > 1 else "x"]


@small_buckets(96)  # 12 elements: most hold parts of two parameters
def _summed(shape: Shape) -> dict[str, float]:
    """Of all trials of a shape, one after another with one model: the worst error."""
    torch.set_default_dtype(torch.float64)
    cube, model, _, twin = make_twins(Blocks, shape)
    found = {}
    for name, trial in TRIALS.items():
        if trial.shape != shape:
            continue
        inputs = torch.randn(len(trial.passes), 2, 4, HIDDEN, generator=torch.Generator().manual_seed(len(name)))
        rows = slice(cube.coordinate["y"] * 4 // shape[1], (cube.coordinate["y"] + 1) * 4 // shape[1])
        for number, (x, names) in enumerate(zip(inputs, trial.passes, strict=True)):
            place = _place(cube, shape)
            with nullcontext() if number == len(trial.passes) - 1 else cube.no_sync():
                model(x[place][rows], names[place]).backward()
            for of_rank, names_of_rank in zip(x, names, strict=True):
                twin(of_rank, names_of_rank).backward()
        wanted = dict(twin.named_parameters())
        for which, parameter in model.named_parameters():
            assert (parameter.grad is None) == (wanted[which].grad is None), f"{name}: {which}"
        found[name] = max(
            error(full(parameter.grad), full(wanted[which].grad), which)
            for which, parameter in model.named_parameters()
            if parameter.grad is not None
        )
        model.zero_grad(), twin.zero_grad()
    return found


@pytest.mark.parametrize("shape", [DATA, X, BOX], ids=["data", "x", "planes"])
def test_a_parameter_that_some_rank_has_not_used_counts_as_zero_there(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _summed, shape):
        assert errors
        assert max(errors.values()) <= 1e-9, errors


def _beside_other_cubes() -> tuple[float, bool]:
    """Models on three cubes have parameters of equal numbers and shapes; ranks differ in a pass of each in turn, for
    one of them would be found last by chance."""
    cubes = [Cube(data=2) for _ in range(3)]
    models = []
    for cube in cubes:
        cube.manual_seed(0)
        models.append(nn.Sequential(*(LayerNorm3D(HIDDEN, cube, "z") for _ in range(2))))
    x = torch.arange(4.0 * HIDDEN).view(4, HIDDEN).sin()
    twin = LayerNorm3D(HIDDEN, Cube.single(), "z")
    twin(x).cos().sum().backward()
    worst, untouched = 0.0, True
    for model in models:
        one, other = model
        (one if cubes[0].rank == 0 else other)(x).cos().sum().backward()
        worst = max(worst, *(error(full(layer.weight.grad), full(twin.weight.grad), "") for layer in (one, other)))
        untouched &= all(p.grad is None for each in models if each is not model for p in each.parameters())
        model.zero_grad()
    return worst, untouched


def test_a_parameter_of_another_cube_is_not_taken_for_it() -> None:
    for worst, untouched in run_ranks(2, _beside_other_cubes):
        assert worst <= 1e-5
        assert untouched


def _waiting_for_each_sum() -> float:
    """What is summed is waited for where it is issued; one rank leaves out what two passes have had alike."""
    cube, single = Cube(data=2, speed=ExecutionPolicy(overlap=False)), Cube.single()
    models = [nn.Sequential(*(RMSNorm3D(HIDDEN, each, "z") for _ in range(3))) for each in (cube, single)]
    inputs = torch.arange(8.0 * HIDDEN).view(2, 4, HIDDEN).sin()
    ours, theirs = models
    for skipped in (0, 0, 1, 0):
        ours.zero_grad(), theirs.zero_grad()
        for place, x in enumerate(inputs):
            theirs[skipped * place :](x).cos().sum().backward()
        ours[skipped * cube.coordinate["data"] :](inputs[cube.coordinate["data"]]).cos().sum().backward()
    return max(
        error(full(own.grad), full(one.grad)) for own, one in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_ranks_that_wait_for_each_sum_may_differ() -> None:
    for worst in run_ranks(2, _waiting_for_each_sum, timeout=20.0):
        assert worst <= 1e-5


# --- what is refused -----------------------------------------------------------------------------------------------


def over_x(cube: Cube, model: Blocks, odd: int) -> None:
    model(torch.ones(4, HIDDEN), ("pair", "twin_pair")[odd]).backward()


def over_x_while_accumulating(cube: Cube, model: Blocks, odd: int) -> None:
    with cube.no_sync():
        over_x(cube, model, odd)
    model.zero_grad()
    model(torch.ones(4, HIDDEN), "norm").backward()


def columns(cube: Cube, model: Blocks, odd: int) -> None:
    local_param((model.norm.weight, model.rms.weight)[odd], vector("z"), cube).sum().backward()


def copies_over_the_columns(cube: Cube, model: Blocks, odd: int) -> None:
    local_param((model.head3.bias, model.head5.bias)[odd], copies("z"), cube).sum().backward()


def made_on_one_rank(cube: Cube, model: Blocks, odd: int) -> None:
    loss = model(torch.ones(4, HIDDEN), "norm")
    if odd:
        loss = loss + local_param(normal((HIDDEN, HIDDEN), copies("z"), cube, 1.0), copies("z"), cube).sum()
    loss.backward()


def _refused(shape: Shape, use: Callable[[Cube, Blocks, int], None]) -> str:
    cube = Cube(*shape)
    cube.manual_seed(0)
    model = Blocks(cube)
    with pytest.raises(ValueError, match=r"different parameters in this backward pass: .* alone") as caught:
        use(cube, model, cube.rank % 2)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(4, HIDDEN // shape[2]), "rms").backward()  # the next pass is a good one
    assert model.rms.weight.grad is not None
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "use", "names"),
    [
        (X, over_x, ["pair.0.weight by rank 0 alone", "twin_pair.1.weight by rank 1 alone"]),
        (X, over_x_while_accumulating, ["pair.1.weight by rank 0 alone", "twin_pair.0.weight by rank 1 alone"]),
        ((1, 1, 2, 1), columns, ["norm.weight by rank 0 alone", "rms.weight by rank 1 alone"]),
        ((1, 1, 2, 1), copies_over_the_columns, ["head3.bias by rank 0", "head5.bias by rank 1"]),
        (DATA, made_on_one_rank, ["shape (8, 8) by rank 1 alone", "Make the same parameters on every rank"]),
    ],
)
def test_ranks_that_hold_parts_of_a_parameter_must_all_use_it(
    shape: Shape, use: Callable[[Cube, Blocks, int], None], names: list[str]
) -> None:
    first, second = run_ranks(2, _refused, shape, use)
    assert first == second
    for name in names:
        assert name in first


def _dropped_a_checkpoint() -> str:
    """A reentrant checkpoint is a pass of its own: its end would be taken for that of the other rank's whole pass."""
    cube = Cube(data=2)
    model = Blocks(cube, norms=True)
    x = torch.ones(4, HIDDEN, requires_grad=True)
    with pytest.raises(ValueError, match="end of a reentrant checkpoint") as caught:
        model(x if cube.rank else checkpoint(model.norm, x, use_reentrant=True), "rms").backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(2):
        model(checkpoint(model.norm, x, use_reentrant=True), "rms").backward()
    assert model.norm.weight.grad is not None
    return str(caught.value)


@pytest.mark.slow
def test_a_reentrant_checkpoint_is_dropped_by_all_or_none() -> None:
    first, second = run_ranks(2, _dropped_a_checkpoint, timeout=20.0)
    assert first == second
    assert "ranks 0 alone" in first


def _left_a_pass_out() -> str:
    """Its next pass would be taken for the one in which the other rank waits, and the copies drift apart."""
    cube = Cube(data=2)
    model = Blocks(cube, norms=True)
    optimizer = LocalSGD(model.parameters(), lr=0.1)
    x = torch.ones(4, HIDDEN, requires_grad=True)
    with pytest.raises(ValueError, match="some have left out a pass") as caught:  # noqa: PT012
        for skipped in (False, True, False):
            (x if skipped and cube.rank else model(x, "rms")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return str(caught.value)


@pytest.mark.slow
def test_a_pass_is_left_out_by_all_or_none() -> None:
    first, second = run_ranks(2, _left_a_pass_out, timeout=20.0)
    assert first == second
    assert "ranks 0 have taken 1 optimiser steps, and others up to 2" in first


# --- cost ----------------------------------------------------------------------------------------------------------


def _sent(shape: Shape) -> list[Any]:
    """Sums of a pass that all ranks make alike, and of one in which they differ."""
    cube = Cube(*shape)
    model, found = Blocks(cube), []
    for names in (("norm", "norm"), ("norm", "rms")):
        with cube.traffic.counting() as count:
            model(torch.ones(4, HIDDEN), names[_place(cube, shape)]).backward()
        found.append([(kind, size) for _, kind, size in count.order])
    return found


@pytest.mark.parametrize("shape", fast_alone(DATA, X))
def test_where_all_use_the_same_it_costs_sixteen_bytes(shape: Shape) -> None:
    for rank, (alike, different) in enumerate(run_ranks(2, _sent, shape)):
        norm, compared, rms = (("all-reduce", size) for size in (4 * 2 * HIDDEN, 16, 4 * HIDDEN))
        assert alike == [compared, norm]
        # Over data, the norm leaves while the pass runs where it was used, and with zeros when the other rank knows.
        over_data = [[norm, compared, rms], [compared, norm, rms]][rank]
        assert different == (over_data if shape == DATA else [compared, ("all-reduce", 4 * 3 * HIDDEN)])

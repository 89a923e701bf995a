"""State of the optimisers: kept and read by torch's own means, on the same cube and on another."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tensor3d import local
from tensor3d.distributed.data_shares import share_placements
from tensor3d.optim import GradScaler
from tests.optim.zoo import BETAS, EPS, KINDS, Zoo, bits, make, rate, run, same
from tests.ranks import run_ranks
from tests.single_device_reference import error, full

Shape = tuple[int, int, int, int]
kinds = pytest.mark.parametrize("kind", KINDS)
BEFORE, AFTER = range(3), range(3, 8)


def everything(zoo: Zoo, optimizer: Any) -> list[Tensor]:
    """Logical tensors of weights, moments and counts."""
    states = [optimizer.state[p][key] for p in zoo.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    return [full(t).clone() for t in [*zoo.parameters(), *states]]


@kinds
def test_a_state_dict_goes_round(kind: str) -> None:
    cube, zoo, optimizer = make(kind, (1, 1, 1, 1))
    run(optimizer, zoo, cube, BEFORE)
    kept = copy.deepcopy((zoo.state_dict(), optimizer.state_dict()))
    run(optimizer, zoo, cube, AFTER)
    _, other_zoo, other = make(kind, (1, 1, 1, 1))
    other_zoo.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    assert other.param_groups[0]["lr"] == rate(BEFORE[-1])
    run(other, other_zoo, cube, AFTER)
    for got, wanted in zip(everything(other_zoo, other), everything(zoo, optimizer), strict=True):
        assert torch.equal(got, wanted)


def test_a_checkpoint_of_torchs_adamw_is_read() -> None:
    cube, zoo, _ = make("adamw", (1, 1, 1, 1))
    theirs = torch.optim.AdamW(zoo.parameters(), lr=0.1, betas=BETAS, eps=EPS, fused=True)
    run(theirs, zoo, cube, BEFORE)  # type: ignore[arg-type]
    ours = KINDS["adamw"](zoo.parameters(), cube, lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["betas"] == BETAS
    copied, twin = copy.deepcopy((zoo, theirs))
    run(ours, zoo, cube, AFTER)
    run(twin, copied, cube, AFTER)  # type: ignore[arg-type]
    for got, wanted in zip(everything(zoo, ours), everything(copied, twin), strict=True):
        assert torch.equal(got, wanted)


@kinds
def test_a_parameter_that_a_loaded_state_lacks_starts_anew(kind: str) -> None:
    cube, zoo, optimizer = make(kind, (1, 1, 1, 1))
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]
    optimizer.load_state_dict(state)
    run(optimizer, zoo, cube, BEFORE)
    _, wanted_zoo, wanted = make(kind, (1, 1, 1, 1))
    run(wanted, wanted_zoo, cube, BEFORE)
    assert torch.equal(zoo.up, wanted_zoo.up)


# torch.distributed.checkpoint


def state_of(zoo: Zoo, optimizer: Any, scaler: GradScaler) -> dict[str, Any]:
    weights, moments = get_state_dict(zoo, optimizer)
    return {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}


def _written(shape: Shape, shards: bool, folder: Path) -> dict[str, list[Tensor]]:
    """For each kind, one checkpoint before the first step and one in the middle of a run that then goes on."""
    torch.set_default_dtype(torch.float64)
    results = {}
    for kind in KINDS:
        cube, zoo, optimizer = make(kind, shape, shard_over_data=shards)
        scaler = GradScaler(cube, initial=4.0)
        first = bits(zoo, optimizer)
        dcp.save(state_of(zoo, optimizer, scaler), checkpoint_id=folder / kind / "first")
        assert same(bits(zoo, optimizer), first), "a look changed it"
        assert all(p.grad is None for p in zoo.parameters())
        run(optimizer, zoo, cube, BEFORE)
        scaler.update(torch.tensor(1.0, dtype=torch.float32))
        dcp.save(state_of(zoo, optimizer, scaler), checkpoint_id=folder / kind / "middle")
        run(optimizer, zoo, cube, AFTER)
        results[kind] = everything(zoo, optimizer)
    return results


def _read(shape: Shape, shards: bool, folder: Path) -> dict[tuple[str, str], tuple[list[Tensor], float]]:
    """Goes on from each, with optimisers that have not made a step yet."""
    torch.set_default_dtype(torch.float64)
    results = {}
    for kind, (name, steps) in itertools.product(KINDS, {"first": range(0, 8), "middle": AFTER}.items()):
        cube, zoo, optimizer = make(kind, shape, shard_over_data=shards)
        for parameter in zoo.parameters():
            local(parameter).detach().fill_(9.0)
        scaler = GradScaler(cube)
        state = state_of(zoo, optimizer, scaler)
        dcp.load(state, checkpoint_id=folder / kind / name)
        set_state_dict(zoo, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        for parameter in zoo.parameters():
            assert isinstance(parameter, DTensor)
            wanted = share_placements(parameter) if shards else parameter.placements
            assert optimizer.state[parameter]["exp_avg"].placements == wanted
        run(optimizer, zoo, cube, steps)
        results[kind, name] = everything(zoo, optimizer), float(scaler.scale)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(((2, 2, 2, 1), False), ((1, 4, 1, 1), False), id="2x2x2-1x4x1"),
        pytest.param(
            ((1, 2, 1, 4), True),
            ((2, 1, 1, 2), True),
            id="shares-shares",
            marks=pytest.mark.long(reason="shares are written and read as in shares-whole and by test_data_shards.py"),
        ),
        pytest.param(((1, 2, 2, 2), True), ((1, 1, 2, 2), False), id="shares-whole"),
    ],
)
def test_another_cube_goes_on(tmp_path: Path, before: tuple[Shape, bool], after: tuple[Shape, bool]) -> None:
    wanted = run_ranks(8, _written, *before, tmp_path)[0]
    for results in run_ranks(4, _read, *after, tmp_path):
        for (kind, name), (got, scale) in results.items():
            assert scale == {"first": 4.0, "middle": 2.0}[name]
            assert max(error(a, b) for a, b in zip(got, wanted[kind], strict=True)) <= 1e-12

"""Gradients in shares over `data` (ZeRO stage 2): trainings are those of whole gradients, and a rank holds its share."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d import Cube, ExecutionPolicy, MixedPrecisionPolicy, check_copies, clip_gradients, local
from tensor3d.distributed.data_shares import is_whole, share, share_placements
from tensor3d.optim import GradScaler, decay_groups
from tests.optim.zoo import BETAS, EPS, KINDS, Optimizer
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, ranks_of
from tests.small_buckets import small_buckets
from tests.tied_weight_model import Tied

Shape = tuple[int, int, int, int]


def made(shape: Shape, kind: str, shards: Any, **policy: Any) -> tuple[Cube, Tied, Optimizer]:
    """A model with a weight that is used three times and a weight that is frozen."""
    cube = Cube(*shape, **policy)
    cube.manual_seed(3)
    model = Tied(cube)
    model.on_y.bias.requires_grad_(False)
    optimizer = KINDS[kind](decay_groups(model, 0.1), cube, lr=0.01, betas=BETAS, eps=EPS, shard_over_data=shards)
    return cube, model, optimizer


def train(cube: Cube, model: nn.Module, optimizer: Optimizer, steps: range = range(6)) -> list[Tensor]:
    """Steps of one pass, of two that are held back or not, with a loss scale, one that overflows, and one in which no
    rank uses the head. Returns the norms."""
    scaler, norms = GradScaler(cube, initial=2.0**10), []
    for step in steps:
        if step % 3 == 1:
            with cube.no_sync():
                scaler.scaled(model(2 * step)).backward()
        if step % 3 == 2:
            scaler.scaled(model(2 * step)).backward()
        scaler.scaled(model(2 * step + 1, head=step != 3)).backward()
        if step == 4:
            first = next(p for p in model.parameters() if p.grad is not None)
            local(first.grad).fill_(math.inf)  # type: ignore[arg-type]
        norm = clip_gradients(model.parameters(), 0.5, cube, loss_scale=scaler.scale)
        norms.append(norm.total)
        optimizer.found_inf = norm.found_inf
        optimizer.step()
        scaler.update(norm.found_inf)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return norms


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}


@small_buckets()
def _trained(shape: Shape) -> tuple[dict[str, float], bool]:
    torch.set_default_dtype(torch.float64)
    errors = {}
    for kind in KINDS:
        found = []
        for shards in ("state", "gradients"):
            cube, model, optimizer = made(shape, kind, shards)
            norms = train(cube, model, optimizer)
            found.append((weights(model), [float(norm) for norm in norms if norm.isfinite()]))
        (wanted, norms), (got, others) = found
        errors[kind] = max(error(got[name], wanted[name], name) for name in wanted)
        assert len(others) == len(norms) == 5, "one overflows"
        errors[f"{kind}: norms"] = max(abs(mine / theirs - 1) for mine, theirs in zip(others, norms, strict=True))
        check_copies(dict(model.named_parameters()), cube)
    bits = []
    for overlap in (True, False):
        cube, model, optimizer = made(shape, "adamw", "gradients", speed=ExecutionPolicy(overlap=overlap))
        train(cube, model, optimizer, range(3))
        bits.append([local(p).detach() for p in model.parameters()])
    return errors, all(torch.equal(*pair) for pair in zip(*bits, strict=True))


@pytest.mark.parametrize("shape", fast_alone((1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 4), (1, 2, 1, 2)))
def test_trainings_are_those_of_whole_gradients(shape: Shape) -> None:
    for errors, same in run_ranks(ranks_of(shape), _trained, shape):
        assert max(errors.values()) <= 1e-9, errors
        assert same, "overlap has changed bits"

"""Gathered operands that are kept within a budget: what is chosen, what it holds, and what it spares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import (
    MLP3D,
    Attention3D,
    Block3D,
    Cube,
    Dropout3D,
    LayerNorm3D,
    MixedPrecisionPolicy,
    keep_gathered,
    local,
    shard,
)
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes
from tests.single_device_reference import fast_alone, ranks_of

Shape = tuple[int, int, int, int]
TOKENS, HIDDEN, INNER = 48, 24, 44
BUDGETS = (0, 1 << 12, 1 << 13, 1 << 30)


def _model(cube: Cube) -> nn.Module:
    cube.manual_seed(0)
    return nn.Sequential(MLP3D(HIDDEN, cube, INNER), LayerNorm3D(HIDDEN, cube), MLP3D(HIDDEN, cube, INNER))


def _pass(cube: Cube, model: nn.Module) -> tuple[list[Tensor], int, int, int]:
    """Gradients, what is saved for backward, bytes received and collectives, of a pass whose order is known."""
    x = shard(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)), cube, "z").requires_grad_()
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        with cube.traffic.counting() as count:
            model(x).square().sum().backward()
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [x.grad, *gradients], saved_bytes(lambda: model(x)), count.total_bytes, count.total_calls


def _within_budgets(shape: Shape, compute: torch.dtype | None) -> list[dict[str, Any]]:
    cube = Cube(*shape, precision=MixedPrecisionPolicy(compute=compute))
    model, found = _model(cube), []
    plain, saved, received, calls = _pass(cube, model)
    for budget in BUDGETS:
        chosen = keep_gathered(model, cube, TOKENS, budget)
        gradients, now_saved, now_received, now_calls = _pass(cube, model)
        found.append(
            {
                "same": all(map(torch.equal, gradients, plain)),
                "within": now_saved - saved <= chosen.held_bytes <= budget,
                "bytes": received - now_received == chosen.spared_bytes,
                "calls": calls - now_calls == chosen.spared_collectives,
                "kept": chosen.kept,
            }
        )
    return found


@pytest.mark.parametrize("shape", fast_alone((2, 2, 1, 1), (1, 1, 2, 2), (4, 1, 1, 1)))
@pytest.mark.parametrize("compute", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_it_spares_what_it_says_within_the_budget(shape: Shape, compute: torch.dtype | None) -> None:
    on_ranks = run_ranks(ranks_of(shape), _within_budgets, shape, compute)
    for found in on_ranks:
        for budget, each in zip(BUDGETS, found, strict=True):
            assert all(each[name] for name in ("same", "within", "bytes", "calls")), (budget, each)
        assert [each["kept"] for each in found] == [each["kept"] for each in on_ranks[0]], "all choose alike"
        assert not found[0]["kept"]
        assert 0 < len(found[2]["kept"]) <= len(found[3]["kept"])
    if shape == (2, 2, 1, 1) and compute is None:
        # Weights of 2,112 bytes come before inputs of 2,304. "down" has its input from one member alone.
        assert [each["kept"].get("0.up") for each in on_ranks[0]] == [None, None, None, False]
        assert [each["kept"].get("2.down") for each in on_ranks[0]] == [None, "input", "input", "input"]


def test_what_is_computed_again_is_left_as_it_is() -> None:
    cube = Cube.single()
    blocks = [
        Block3D(
            Attention3D(HIDDEN, 2, cube),
            LayerNorm3D(HIDDEN, cube),
            MLP3D(HIDDEN, cube, reshard_after_forward=False),
            LayerNorm3D(HIDDEN, cube),
            dropout=Dropout3D(0.0, cube),
            recompute=recompute,
        )
        for recompute in ("none", "layer")
    ]
    keep_gathered(nn.ModuleList(blocks), cube, TOKENS, 1 << 30)
    assert [block.mlp.up.reshard_after_forward for block in blocks] == [True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tokens, budget, message",
    [(0, 1, "tokens must be at least 1. Got 0"), (1, -1, "budget must be at least 0 bytes. Got -1")],
)
def test_what_makes_no_sense_is_refused(tokens: int, budget: int, message: str) -> None:
    cube = Cube.single()
    with pytest.raises(ValueError, match=message):
        keep_gathered(_model(cube), cube, tokens, budget)


def _with_what_is_free() -> None:
    cube = Cube(1, 1, 2)
    with pytest.raises(ValueError, match=r"budget must be the same on all ranks.*Got 100 to 101"):
        keep_gathered(nn.Identity(), cube, TOKENS, 100 + cube.rank)


def test_budgets_that_differ_are_refused_by_all() -> None:
    run_ranks(2, _with_what_is_free)

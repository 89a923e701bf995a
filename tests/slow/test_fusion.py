"""Compiled models against eager ones: every type, on cubes, with whatever else changes how a layer works."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.bert import BertForPreTraining
from tensor3d import Cube, ExecutionPolicy, LayerNorm3D, MixedPrecisionPolicy, cross_entropy, explain
from tensor3d.layers.loss import _row_statistics
from tensor3d.ops.activations import biased_backward
from tensor3d.ops.dropout import gain_of, keep_mask
from tests.models.toy import FAMILIES, lay, sums_and_gradients, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import error, name_of, ranks_of

pytestmark = pytest.mark.slow

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 2, 1)]
# Of the model, and of how it is made.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"norm": "pre", "activation": "gelu_tanh"}, {"reshard_after_forward": False}),
    ({"activation": "silu"}, {"recompute": "layer"}),
    ({"activation": "relu"}, {"recompute": "attention"}),
    ({"encoder": "modern"}, {}),
    (
        {"encoder": "modern", "family": "eurobert", "activation": "silu", "types": 0, "tied": False, "kv_heads": 4},
        {"recompute": "attention"},
    ),
    (FAMILIES["gemma"], {}),
]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4, torch.bfloat16: 8e-2}
# Each type once, and a cut along y and along z; in fp64 all models.
SOON = [((1, 1, 1, 1), torch.float64), ((1, 2, 1, 1), torch.bfloat16), ((1, 1, 2, 1), torch.float32)]
PAIRS = [
    pytest.param(
        *(shape, dtype),
        id=f"{name_of(shape)}-{dtype}",
        marks=() if (shape, dtype) in SOON else pytest.mark.long(reason="every rank compiles every region anew"),
    )
    for shape in SHAPES
    for dtype in TOLERANCE
]


def test_a_compiled_loss_and_norm_equal_torchs() -> None:
    """In fp64; all layers, types and cubes are compared in the slow tier."""
    torch.manual_seed(1)
    cube = Cube.single(speed=ExecutionPolicy(compile=True))
    logits, labels = torch.randn(6, 11, dtype=torch.float64), torch.tensor([3, -100, 0, 10, 5, 5])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses, predictions = cross_entropy(ours, labels, 11, cube)
    wanted = F.cross_entropy(theirs, labels, reduction="none")
    weights = torch.randn(6, dtype=torch.float64)
    (losses * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert torch.allclose(losses, wanted, atol=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)  # type: ignore[arg-type]
    assert torch.equal(predictions, logits.argmax(1))

    layer, twin = LayerNorm3D(24, cube, eps=1e-5).double(), nn.LayerNorm(24).double()
    x = 1000 + torch.randn(5, 24, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (layer(ours) ** 3).sum().backward()
    (twin(theirs) ** 3).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-9)  # type: ignore[arg-type]
    assert torch.allclose(layer.weight.grad, twin.weight.grad, atol=1e-9)  # type: ignore[arg-type]


def test_another_probability_of_dropout_compiles_nothing_anew() -> None:
    cube = Cube.single(speed=ExecutionPolicy(compile=True))
    layer, x = LayerNorm3D(24, cube), torch.randn(2, 8, 24)
    counts = []
    for p in (0.1, 0.2, 0.3):
        own = x.clone().requires_grad_()
        torch.manual_seed(1)
        kept = keep_mask(x[1], p)
        torch.manual_seed(1)
        result = layer(*own, dropout=p)
        result.square().sum().backward()
        twin = x.clone().requires_grad_()
        wanted = F.layer_norm(twin[0] + twin[1] * kept * gain_of(p), (24,), eps=1e-12)
        wanted.square().sum().backward()
        assert torch.allclose(result, wanted, atol=1e-5)
        assert torch.allclose(own.grad, twin.grad, atol=1e-5)  # type: ignore[arg-type]
        counts.append(len(cube.regions._made))
    assert counts == [2, 2, 2]


def test_compiled_regions_of_infinite_numbers_give_what_the_eager_ones_do() -> None:
    """A slice of -inf, and an infinite gradient of relu."""
    cube, eager = Cube.single(speed=ExecutionPolicy(compile=True)), Cube.single()
    logits, found = torch.randn(4, 9), []
    logits[:, 3:] = -math.inf
    for each in (cube, eager):
        own = logits.clone().requires_grad_()
        losses, _ = cross_entropy(own, torch.tensor([0, 1, 2, 0]), 9, each)
        losses.sum().backward()
        statistics = each.regions(
            _row_statistics, logits[:, 3:].contiguous(), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1) > 0
        )
        bias, dy = torch.zeros(9), torch.full((4, 9), math.inf)
        relu, _ = each.regions(biased_backward, dy, logits.relu(), bias, "relu")
        found.append([losses.detach(), own.grad, statistics, relu])
    for got, wanted in zip(*found, strict=True):
        assert torch.allclose(got, wanted, atol=1e-6)  # type: ignore[arg-type]  # nor any nan


def _errors(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    cube = Cube(*shape, precision=MixedPrecisionPolicy(compute=dtype if dtype == torch.bfloat16 else None))
    compiling = cube.with_policy(speed=ExecutionPolicy(compile=True))
    compiling.regions.with_activations = True  # as on a GPU
    errors: dict[str, float] = {}
    for case in CASES if dtype == torch.float64 else CASES[:1]:
        wanted, got = sums_and_gradients(cube, *case), sums_and_gradients(compiling, *case)
        errors |= {f"{case} {name}": error(got[name], wanted[name]) for name in wanted}
    assert compiling.regions._made, "nothing was compiled"
    return errors


@pytest.mark.parametrize(("shape", "dtype"), PAIRS)
def test_compiled_models_equal_eager_ones(shape: Shape, dtype: torch.dtype) -> None:
    for errors in run_ranks(ranks_of(shape), _errors, shape, dtype, timeout=900):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE[dtype], (worst, errors[worst])


def _compilations(shape: Shape) -> list[int]:
    """How often something was compiled, after each of several steps of other packs, dropout in all of them."""
    cube = Cube(*shape, speed=ExecutionPolicy(compile=True))
    cube.manual_seed(3)
    config = toy_config(67, dropout=0.1)
    model, counts = BertForPreTraining(config, cube), []
    for packs in (16, 8, 24, 8, 32):
        step = toy_packs(config.vocab, packs, seed=packs)
        model(lay(step, cube), *totals(step)).loss.backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    with torch.no_grad():
        model.eval()(lay(step, cube), *totals(step))
    assert torch._dynamo.utils.counters["graph_break"] == {}
    return counts


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 1, 1, 1), id="1x1x1"),
        pytest.param((1, 2, 2, 1), id="1x2x2", marks=pytest.mark.long(reason="four ranks compile the same")),
    ],
)
def test_other_numbers_of_rows_compile_nothing_anew(shape: Shape) -> None:
    for counts in run_ranks(ranks_of(shape), _compilations, shape, timeout=900):
        assert counts[0] > 0
        assert counts == [counts[0]] * 5


def test_a_compiling_model_is_explained() -> None:
    """Modules that somebody follows are called as ever, so every module is found."""
    cubes = (Cube.single(speed=ExecutionPolicy(compile=True)), Cube.single())
    ours, eager = (explain(BertForPreTraining(toy_config(67, dropout=0.1), cube), tokens=192) for cube in cubes)
    # A number a row more in each of six norms: docs/compile.md.
    assert 0 < ours.saved - eager.saved <= 6 * 4 * 192

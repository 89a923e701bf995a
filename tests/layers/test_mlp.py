"""The gated feed-forward block and attention with rotary positions and windows: against plain PyTorch, and on cubes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Attention3D, Cube, Sequences
from tensor3d.layers.mlp import GatedActivation, GatedMLP3D
from tests.ranks import run_ranks
from tests.single_device_reference import FOUR_SHAPES, TOLERANCE, compare, ranks_of, sequences_of, worst

Shape = tuple[int, int, int, int]
HIDDEN, INNER, HEADS, ROWS = 32, 24, 8, 64


def on_the_cube(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the block with either activation, with and without bias, and of attention with every option."""
    measure = partial(compare, shape=shape, rows=ROWS, columns=HIDDEN, face_in="z", face_out="z", dtype=dtype)
    errors = {}
    for activation, bias in (("silu", False), ("gelu", True)):
        found = measure(partial(_gated, activation=activation, bias=bias))
        errors |= {f"{activation} {name}": value for name, value in found.items()}
    for window, causal in ((None, True), (3, True), (2, False)):
        make = partial(_attention, window=window, causal=causal)
        found = measure(make, call=lambda layer, x, cube: layer(x, sequences_of(cube)))
        errors |= {f"window={window} causal={causal} {name}": value for name, value in found.items()}
    return errors


def _gated(cube: Cube, activation: GatedActivation, bias: bool) -> nn.Module:
    return GatedMLP3D(HIDDEN, cube, INNER, activation, bias=bias, std=0.3)


def _attention(cube: Cube, window: int | None, causal: bool) -> nn.Module:
    return Attention3D(HIDDEN, HEADS, cube, causal, bias=False, std=0.3, rotary_base=100.0, window=window)


@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_on_cubes(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), on_the_cube, shape, torch.float64))
    assert value <= TOLERANCE[torch.float64], f"{name} differs by {value}"


@pytest.mark.slow
def test_on_a_cube_in_fp32() -> None:
    name, value = worst(run_ranks(8, on_the_cube, (1, 2, 4, 1), torch.float32))
    assert value <= TOLERANCE[torch.float32], f"{name} differs by {value}"


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_block_equals_plain_pytorch(activation: GatedActivation) -> None:
    """Three linear layers; rows of the fused weight are (unit, gate/up)."""
    layer = GatedMLP3D(12, Cube.single(), 10, activation, bias=True, std=0.4).double()
    nn.init.normal_(layer.gate_up.bias)
    gate_weight, up_weight = layer.gate_up.weight.view(10, 2, 12).unbind(1)
    gate_bias, up_bias = layer.gate_up.bias.view(10, 2).unbind(1)
    x = torch.randn(7, 12, dtype=torch.float64)
    opened = getattr(F, activation)(F.linear(x, gate_weight, gate_bias))
    wanted = F.linear(opened * F.linear(x, up_weight, up_bias), layer.down.weight, layer.down.bias)
    assert torch.allclose(layer(x), wanted, rtol=1e-12)
    assert layer.state_dict().keys() == {"gate_up.weight", "gate_up.bias", "down.weight", "down.bias"}


def _turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """(T, h, d), pair by pair."""
    dim = x.shape[-1]
    pairs = []
    for i in range(dim // 2):
        angle = (positions * base ** (-2 * i / dim))[:, None]
        a, b = x[..., i], x[..., i + dim // 2]
        pairs.append((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()))
    return torch.stack([first for first, _ in pairs] + [second for _, second in pairs], -1)


def test_attention_equals_plain_pytorch() -> None:
    layer = Attention3D(16, 2, Cube.single(), True, bias=False, std=0.4, rotary_base=50.0, window=4).double()
    x, rows = torch.randn(9, 16, dtype=torch.float64), torch.arange(9)
    q, k, v = (x @ layer.qkv.weight.t()).view(9, 2, 3, 8).unbind(2)
    q, k = (_turned(t, rows, 50.0) for t in (q, k))
    distance = rows[:, None] - rows
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    weights = scores.masked_fill((distance < 0) | (distance > 3), -torch.inf).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ layer.out.weight.t()
    # Angles of the layer are fp32.
    assert torch.allclose(layer(x, Sequences.from_lengths([9])), wanted, atol=1e-6)


def test_recomputed_attention_is_the_same() -> None:
    x, sequences, results = torch.randn(9, 16), Sequences.from_lengths([4, 5]), []
    for recompute in ("none", "attention"):
        cube = Cube.single()
        cube.manual_seed(3)
        layer = Attention3D(16, 2, cube, True, std=0.4, rotary_base=50.0, window=2, recompute=recompute)  # type: ignore[arg-type]
        layer(x, sequences).square().sum().backward()
        results.append(layer.qkv.weight.grad)
    assert torch.equal(*results)


def test_a_leading_batch_dim_of_one_comes_back() -> None:
    cube, sequences = Cube.single(), Sequences.from_lengths([4, 5])
    x = torch.randn(9, 16)
    attention = Attention3D(16, 2, cube, True, rotary_base=50.0)
    assert torch.equal(attention(x[None], sequences), attention(x, sequences)[None])
    gated = GatedMLP3D(16, cube, 8)
    assert torch.equal(gated(x[None]), gated(x)[None])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of silu, gelu, gelu_tanh\. Got 'relu'"):
        GatedMLP3D(8, Cube.single(), 8, "relu")  # type: ignore[arg-type]
    run_ranks(2, _inner_that_does_not_divide)


def _inner_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"inner.*y=2.*9"):
        GatedMLP3D(8, Cube(1, 2, 1), 9)  # 18 rows of the fused product would divide


def test_dropout_behind_the_gate_and_a_bias_of_the_last_product_alone() -> None:
    cube = Cube.single()
    layer = GatedMLP3D(8, cube, 64, down_bias=True, dropout=0.5, std=0.3)
    assert (layer.gate_up.bias, layer.down.bias is not None) == (None, True)
    x = torch.randn(5, 8)
    gated, seen = [], []
    layer.dropout.register_forward_hook(lambda _, given, result: gated.append((given[0], result)))
    layer.down.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer(x)
    (given, kept), (read,) = gated[0], seen
    assert read is kept
    dropped = kept == 0
    assert 0.2 < dropped.float().mean() < 0.8
    torch.testing.assert_close(kept[~dropped], 2 * given[~dropped])
    assert torch.equal(layer.eval()(x), layer(x))

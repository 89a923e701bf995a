"""`Block3D`: a residual block of given parts is what is written out by hand, and refuses what would do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensor3d import MLP3D, Attention3D, Block3D, Cube, Dropout3D, GatedMLP3D, RMSNorm3D, TransformerLayer3D
from tensor3d.batches.sequences import Sequences

SEQUENCES = Sequences.from_lengths([3, 5])


def parts(cube: Cube) -> list[nn.Module]:
    cube.manual_seed(2)
    attention, mlp = Attention3D(16, 4, cube, std=0.3), GatedMLP3D(16, cube, 24, std=0.3)
    return [attention, RMSNorm3D(16, cube), mlp, RMSNorm3D(16, cube)]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_block_is_its_parts(norm: Any, recompute: Any) -> None:
    cube = Cube.single()
    attention, first, mlp, second = parts(cube)
    block = Block3D(attention, first, mlp, second, norm=norm, dropout=Dropout3D(0.0, cube), recompute=recompute)
    x, again = (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    if norm == "pre":
        h = x + attention(first(x), SEQUENCES)
        wanted = h + mlp(second(h))
    else:
        h = first(x + attention(x, SEQUENCES))
        wanted = second(h + mlp(h))
    got = block(again, SEQUENCES)
    assert torch.equal(got, wanted)
    wanted.square().sum().backward()
    got.square().sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert torch.equal(again.grad, x.grad)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_attentions_output_may_have_a_dropout_of_its_own(norm: Any) -> None:
    cube, drop = Cube.single(), Dropout3D(0.5, Cube.single())
    attention, first, mlp, second = parts(cube)
    block = Block3D(attention, first, mlp, second, norm=norm, dropout=Dropout3D(0.0, cube), attention_out_dropout=drop)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    cube.manual_seed(3)
    got = block(x, SEQUENCES)
    cube.manual_seed(3)
    if norm == "pre":
        h = x + drop(attention(first(x), SEQUENCES))
        assert torch.equal(got, h + mlp(second(h)))
    else:
        h = first(x + drop(attention(x, SEQUENCES)))
        assert torch.equal(got, second(h + mlp(h)))
    assert not torch.equal(got, block.eval()(x, SEQUENCES))


def test_identity_leaves_a_norm_out() -> None:
    cube = Cube.single()
    attention, _, mlp, norm = parts(cube)
    block = Block3D(attention, nn.Identity(), mlp, norm, norm="pre", dropout=Dropout3D(0.0, cube))
    x = torch.randn(8, 16)
    h = x + attention(x, SEQUENCES)
    assert torch.equal(block(x, SEQUENCES), h + mlp(norm(h)))


def test_berts_layer_is_a_block_with_the_names_it_always_had() -> None:
    layer = TransformerLayer3D(16, 4, Cube.single(), recompute="attention")
    assert isinstance(layer, Block3D)
    assert list(layer.state_dict()) == [
        f"{part}.{kind}"
        for part in ("attention.qkv", "attention.out", "attention_norm", "mlp.up", "mlp.down", "mlp_norm")
        for kind in ("weight", "bias")
    ]
    assert isinstance(layer.attention, Attention3D)
    assert layer.attention.recompute == "attention"
    assert isinstance(layer.mlp, MLP3D)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "sideways"}, 'norm must be "post" or "pre". Got \'sideways\''),
        ({"recompute": "all"}, "recompute.*'all'"),
        ({"recompute": "attention"}, "Got Attention3D made without it; make it with"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    cube = Cube.single()
    with pytest.raises(ValueError, match=message):
        Block3D(*parts(cube), dropout=Dropout3D(0.0, cube), **options)

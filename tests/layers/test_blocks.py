"""`Block3D`: a residual block of given parts is what is written out by hand, and refuses what would do nothing."""

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
    Embedding3D,
    GatedMLP3D,
    Linear3D,
    RMSNorm3D,
    TransformerLayer3D,
    redistribute,
)
from tensor3d.batches.sequences import Sequences
from tensor3d.sharding.layout_checks import check_origin
from tensor3d.sharding.matmul import HandedOn

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


def test_what_a_part_gives_may_have_a_norm() -> None:
    cube = Cube.single()
    attention, first, mlp, second = parts(cube)
    after = [RMSNorm3D(16, cube, eps=eps) for eps in (1e-2, 1e-1)]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    made: dict[str, Any] = {"attention_out_norm": after[0], "mlp_out_norm": after[1], "dropout": Dropout3D(0.0, cube)}
    h = x + after[0](attention(first(x), SEQUENCES))
    assert torch.equal(
        Block3D(attention, first, mlp, second, norm="pre", **made)(x, SEQUENCES), h + after[1](mlp(second(h)))
    )
    with pytest.raises(ValueError, match="Got attention_out_norm and mlp_out_norm with"):
        Block3D(attention, first, mlp, second, **made)
    del made["mlp_out_norm"]
    with pytest.raises(ValueError, match=r"come together, beside .* Got attention_out_norm with"):
        Block3D(attention, first, mlp, second, norm="pre", **made)


def residual_by_hand(cube: Cube, layer: Linear3D, x: Tensor) -> Tensor:
    with HandedOn(x, cube) as residual:
        y = layer(x)
    assert residual.tensor is not x, "handed on"
    return redistribute(y, cube, to="z") + residual.tensor


def test_a_product_adds_the_gradient_of_what_it_hands_on() -> None:
    cube = Cube.single()
    layer = Linear3D(16, 16, cube, std=0.3)
    ones, others = (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    (redistribute(layer(ones), cube, to="z") + ones).square().sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    residual_by_hand(cube, layer, others).square().sum().backward()
    assert torch.equal(others.grad, ones.grad)
    assert torch.equal(layer.weight.grad, wanted)


def test_what_a_product_hands_on_may_be_all_that_is_used() -> None:
    cube = Cube.single()
    layer, x = Linear3D(16, 16, cube), torch.randn(8, 16, requires_grad=True)
    with HandedOn(x, cube) as residual:
        layer(x + 1)
        y = layer(x)
        layer(x)  # the second one reads what it always did
    (2 * residual.tensor).sum().backward(retain_graph=True)
    assert x.grad.unique().tolist() == [2.0]
    assert layer.weight.grad is None
    y.sum().backward()
    assert torch.allclose(x.grad, 2 + layer.weight.detach().sum(0))
    assert not cube.handed_on
    with torch.no_grad(), HandedOn(x, cube) as residual:
        layer(x)
    assert residual.tensor is x


def test_what_is_handed_on_lies_where_it_was_read() -> None:
    cube = Cube.single()
    x = Embedding3D(11, 16, cube)(torch.arange(8))
    with HandedOn(x, cube) as residual:
        y = Linear3D(16, 16, cube)(x)
    for right, face in ((residual.tensor, "z"), (residual.tensor * 2, "z"), (y, "y"), (y * 2, "y")):
        check_origin(right, face, cube, "a reader")
        with pytest.raises(ValueError, match=f"lies on face {face}"):
            check_origin(right, "y" if face == "z" else "z", cube, "a reader")


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

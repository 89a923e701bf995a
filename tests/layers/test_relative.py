"""Layers whose scores hang on distance equal their single-device twins, on real ranks; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Attention3D, Cube, CubeShape, Dropout3D, LayerNorm3D, Sequences, TransformerLayer3D
from tensor3d.attention.relative import BiasBuckets, LogBuckets
from tensor3d.layers.attention import Recompute
from tensor3d.layers.relative import RelativeBias3D, RelativeEmbedding3D, RelativeRows, check_rows
from tests.ranks import run_ranks
from tests.single_device_reference import SHAPES_AND_TYPES, TOLERANCE, compare, ranks_of, sequences_of, worst

BUCKETS = LogBuckets(span=8, farthest=30)


class Disentangled(nn.Module):
    """Two layers that share a table by distance, as DeBERTa has them."""

    def __init__(self, cube: Cube, recompute: Recompute = "none") -> None:
        super().__init__()
        self.table = RelativeEmbedding3D(BUCKETS, 32, cube, std=0.3)
        self.norm = LayerNorm3D(32, cube)
        self.layers = nn.ModuleList(TransformerLayer3D(32, 8, cube, 48, std=0.2, recompute=recompute) for _ in range(2))

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        relative = RelativeRows(rows=self.norm(self.table.all_rows()), buckets=BUCKETS)
        for layer in self.layers:
            x = layer(x, sequences, relative=relative)
        return x


class Biased(nn.Module):
    """Two layers that share a bias, as MPNet has them."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.bias = RelativeBias3D(8, cube, BiasBuckets(rows=8, farthest=20), std=0.5)
        self.layers = nn.ModuleList(TransformerLayer3D(32, 8, cube, 48, std=0.2) for _ in range(2))

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        relative = self.bias()
        for layer in self.layers:
            x = layer(x, sequences, relative=relative)
        return x


def layers(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, float]:
    errors, whole = {}, Cube(*shape)
    for make in (Disentangled, Biased):
        both = compare(
            make,
            whole,
            rows=64,
            columns=32,
            face_in="z",
            face_out="z",
            dtype=dtype,
            call=lambda layer, x, cube: layer(x, sequences_of(cube)),
        )
        errors |= {f"{make.__name__} {name}": value for name, value in both.items()}
    return errors


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        each if each.id == "2x2x2" else pytest.param(*each.values, id=each.id, marks=pytest.mark.slow)
        for each in SHAPES_AND_TYPES
    ],
)
@pytest.mark.slow
def test_layers_that_share_a_table(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    name, value = worst(run_ranks(ranks_of(shape), layers, shape, dtype))
    assert value <= TOLERANCE[dtype], f"{name} differs by {value}"


@pytest.mark.parametrize("recompute", ["layer", "attention"])
def test_recomputed(recompute: Any) -> None:
    def gradients(how: Any) -> list[Tensor]:
        cube = Cube.single()
        cube.manual_seed(3)
        model = Disentangled(cube, how)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = model(x, Sequences.from_lengths([3, 5]))
        out.square().sum().backward()
        return [out, x.grad, *(each.grad for each in model.parameters())]  # type: ignore[list-item]

    assert all(map(torch.equal, gradients("none"), gradients(recompute)))


def test_each_layer_drops_of_the_table_for_itself() -> None:
    cube = Cube.single()
    cube.manual_seed(1)
    attention, table = Attention3D(32, 4, cube, std=0.3), RelativeEmbedding3D(BUCKETS, 32, cube, std=0.3)
    rows = RelativeRows(rows=table.all_rows(), buckets=BUCKETS, dropout=Dropout3D(0.5, cube))
    x, sequences = torch.randn(6, 32), Sequences.from_lengths([6])
    assert not torch.equal(attention(x, sequences, relative=rows), attention(x, sequences, relative=rows))
    assert rows.dropout is not None
    rows.dropout.eval()
    assert torch.equal(attention(x, sequences, relative=rows), attention(x, sequences, relative=rows))


@pytest.mark.parametrize(("keys", "queries"), [(True, False), (False, True)])
def test_one_product_alone(keys: bool, queries: bool) -> None:
    """The other's row of the table has no influence: nothing is multiplied for it."""
    cube = Cube.single()
    cube.manual_seed(1)
    attention, table = Attention3D(32, 4, cube, std=0.3), RelativeEmbedding3D(BUCKETS, 32, cube, std=0.3)
    terms = attention._terms(RelativeRows(rows=table.all_rows(), buckets=BUCKETS, keys=keys, queries=queries))
    assert (terms.keys is not None, terms.queries is not None) == (keys, queries)
    q, k, _ = attention.qkv(table.all_rows()).view(-1, 4, 3, 8).unbind(2)
    found, wanted = (terms.keys, k) if keys else (terms.queries, q)
    assert found is not None
    assert torch.equal(found, wanted)


def test_what_is_refused() -> None:
    cube = Cube.single()
    attention, table = Attention3D(32, 4, cube, kv_heads=2), RelativeEmbedding3D(BUCKETS, 32, cube)
    with pytest.raises(ValueError, match=r"as many heads of keys as of queries\. Got kv_heads=2 of heads=4"):
        attention(
            torch.zeros(4, 32),
            Sequences.from_lengths([4]),
            relative=RelativeRows(rows=table.all_rows(), buckets=BUCKETS),
        )
    for shape, needed in ((CubeShape(x=4, z=5), r"x \* z = 20"), (CubeShape(x=3), r"x \* y = 3")):
        with pytest.raises(ValueError, match=rf"must divide by {needed}\. Got 16"):
            check_rows(BUCKETS, shape)

"""A plane's packs as tensors."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from tensor3d import CubeShape
from tensor3d.data import Pack, PackedBatch, collate
from tensor3d.data.packed_batch import IGNORED, UNUSED

LIMITS = {"capacity": 6, "masked_per_pack": 2, "max_sequences": 2, "pad": 0}


def pack(
    ids: list[int], types: list[int], lengths: list[int], masked: list[int], labels: list[int], following: list[int]
) -> Pack:
    names = ("ids", "types", "lengths", "masked", "masked_labels", "next_labels")
    values = (ids, types, lengths, masked, labels, following)
    return Pack(**{name: np.array(value, dtype=np.int64) for name, value in zip(names, values, strict=True)})


# Two packs: one sequence of five and a free slot; two sequences of three.
ONE = pack([2, 4, 3, 8, 3], [0, 0, 0, 1, 1], [5], [1], [7], [1])
TWO = pack([2, 9, 3, 2, 4, 3], [0, 0, 0, 0, 0, 0], [3, 3], [1, 4], [9, 6], [0, 1])


def test_a_plane_of_two_packs_by_hand() -> None:
    batch = collate([ONE, TWO], shape=CubeShape(), rank=0, **LIMITS)
    assert batch.ids.tolist() == [2, 4, 3, 8, 3, 0, *(2, 9, 3, 2, 4, 3)]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, *(0, 1, 2, 0, 1, 2)]
    assert batch.types.tolist() == [0, 0, 0, 1, 1, 0, *(0, 0, 0, 0, 0, 0)]
    assert batch.sequences.lengths == (5, 1, 3, 3)
    assert batch.sequences.cu_seqlens.tolist() == [0, 5, 6, 9, 12]
    assert batch.masked.tolist() == [1, 7, 10, UNUSED]
    assert batch.masked_labels.tolist() == [7, 9, 6, IGNORED]
    assert batch.first.tolist() == [0, 6, 9, UNUSED]
    assert batch.next_labels.tolist() == [1, 0, 1, IGNORED]
    for field in fields(PackedBatch):
        if field.name not in ("sequences", "read", "draws", "planes_alike"):
            assert getattr(batch, field.name).dtype == torch.int64


def test_members_of_z_own_their_packs_and_share_the_rest() -> None:
    first, second = (collate([ONE, TWO], shape=CubeShape(y=2, z=2), rank=index, **LIMITS) for index in (0, 1))
    assert (first.sequences.lengths, second.sequences.lengths) == ((5, 1), (3, 3))
    for field in fields(PackedBatch):
        if field.name not in ("sequences", "read", "draws", "planes_alike"):
            torch.testing.assert_close(getattr(first, field.name), getattr(second, field.name))


def test_row_lists_divide_by_y_and_z() -> None:
    # Two packs have budgets of 4 and 4; lcm(3, 2) = 6.
    batch = collate([ONE, TWO], shape=CubeShape(y=3, z=2), rank=0, **LIMITS)
    assert batch.masked.tolist() == [1, 7, 10, UNUSED, UNUSED, UNUSED]
    assert batch.first.tolist() == [0, 6, 9, UNUSED, UNUSED, UNUSED]
    assert batch.masked_labels.shape == batch.next_labels.shape == (6,)


def test_an_empty_pack_is_one_unused_tail() -> None:
    batch = collate([Pack.empty(), ONE], shape=CubeShape(), rank=0, **LIMITS)
    assert batch.ids.tolist() == [0] * 6 + [2, 4, 3, 8, 3, 0]
    assert batch.sequences.lengths == (6, 5, 1)
    assert batch.masked.tolist() == [7, UNUSED, UNUSED, UNUSED]
    assert batch.first.tolist() == [6, UNUSED, UNUSED, UNUSED]
    nothing = collate([Pack.empty()], shape=CubeShape(), rank=0, **LIMITS)
    assert (nothing.masked == UNUSED).all()
    assert (nothing.next_labels == IGNORED).all()


def test_to_moves_every_tensor() -> None:
    batch = collate([ONE, TWO], shape=CubeShape(), rank=0, with_read_rows=True, **LIMITS).to("meta")
    for field in fields(PackedBatch):
        if field.name not in ("read", "draws", "planes_alike"):
            assert getattr(batch, field.name).device.type == "meta"
    assert batch.read is not None
    for tensor in (*batch.read.heads, batch.read.plane_rows, batch.read.rows):
        assert tensor.device.type == "meta"
    assert batch.sequences.lengths == (5, 1, 3, 3)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"capacity": 5}, "pack 1 has 6 tokens, more than capacity=5"),
        ({"masked_per_pack": 1}, "pack 1.*2 masked.*masked_per_pack=1"),
        ({"max_sequences": 1}, "pack 1.*2 sequences.*max_sequences=1"),
    ],
)
def test_a_pack_over_a_limit_is_named(limit: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate([ONE, TWO], shape=CubeShape(), rank=0, **{**LIMITS, **limit})


@pytest.mark.parametrize(
    ("packs", "y", "z", "rank", "message"),
    [
        ([], 1, 1, 0, "each member of z=1. Got 0"),
        ([ONE, TWO, ONE], 1, 2, 0, "each member of z=2. Got 3"),
        ([ONE], 4, 1, 0, r"a plane of 1 packs per rank \* z=1 \* capacity 6 has 6 rows, which do not divide by y=4"),
        ([ONE, TWO], 1, 2, 2, r"rank of 1x1x2 .*\b0.*\b1.*\b2"),
    ],
)
def test_a_plane_that_does_not_divide_is_named(packs: list[Pack], y: int, z: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate(packs, shape=CubeShape(y=y, z=z), rank=rank, **LIMITS)

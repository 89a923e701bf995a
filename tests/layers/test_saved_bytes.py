"""What is kept for backward: 1/P of one device's, measured, since one saved gathered tensor would undo it."""

from __future__ import annotations

import pytest
import torch

from tensor3d import (
    Cube,
    Embedding3D,
    Linear3D,
    MixedPrecisionPolicy,
    Sequences,
    TransformerLayer3D,
    cross_entropy,
    local,
    shard,
)
from tensor3d.sharding.matmul import Reshard
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes

HIDDEN, CAPACITY = 512, 128
RESHARD: tuple[Reshard, ...] = (True, False, "input", "weight")
# Lengths in packs of 128. Alike: each rank holds what every other holds. Mixed: they differ.
ALIKE = ((90, 38),) * 8
MIXED = ((128,), (64, 64), (100, 20, 8), (90, 38), (50, 50, 28), (120, 8), (32,) * 4, (77, 51))


def _products() -> list[tuple[int, int]]:
    """Linear layers on both faces, and what is kept with and without gathering anew: all, none, one operand."""
    cube, found = Cube(2, 2, 2), []
    full = torch.randn(32, 24)
    for face in ("z", "y"):
        for reshard in RESHARD:
            sizes = []
            for each in (cube, Cube.single()):
                layer = Linear3D(24, 40, each, face, reshard_after_forward=reshard)
                x = shard(full, each, face).requires_grad_()
                sizes.append(saved_bytes(lambda: layer(x)))  # noqa: B023
            found.append((sizes[0], sizes[1]))
    return found


def test_a_product_keeps_exactly_its_share() -> None:
    a, w = 4 * 32 * 24, 4 * 40 * 24
    kept = [a // 8 + w // 8, a // 4 + w // 4, a // 8 + w // 4, a // 4 + w // 8]
    for found in run_ranks(8, _products):
        assert found == [(each, a + w) for each in kept] * 2


@pytest.mark.parametrize("reshard", RESHARD)
def test_a_product_in_bf16_keeps_a_copy_of_the_weight_where_it_is_to(reshard: Reshard) -> None:
    cube = Cube.single(precision=MixedPrecisionPolicy(compute=torch.bfloat16))
    layer, x = Linear3D(24, 40, cube, reshard_after_forward=reshard), torch.randn(32, 24, requires_grad=True)
    kept = saved_bytes(lambda: layer(x))
    assert kept == 2 * 32 * 24 + (2 if reshard in (False, "input") else 4) * 40 * 24


def _layer(packs: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    cube = Cube(2, 2, 2)
    rows = CAPACITY * len(packs)
    full = torch.randn(rows, HIDDEN)
    sizes = []
    for each in (cube, Cube.single()):
        slices = each.shape.planes * each.shape.z
        mine = each.coordinate["x"] * each.shape.z + each.coordinate["z"]
        held = packs[mine * len(packs) // slices : (mine + 1) * len(packs) // slices]
        sequences = Sequences.from_lengths([length for pack in held for length in pack])
        layer = TransformerLayer3D(HIDDEN, 8, each)
        x = shard(full, each, "z").requires_grad_()
        sizes.append(saved_bytes(lambda: layer(x, sequences)))  # noqa: B023
    return sizes[0], sizes[1]


@pytest.mark.parametrize("packs", [ALIKE, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["alike", "mixed"])
def test_a_bert_layer_keeps_its_share(packs: tuple[tuple[int, ...], ...]) -> None:
    """Copies are allowed for LayerNorm's three numbers a row and for masks alone: 5 % is more than they take."""
    results = run_ranks(8, _layer, packs)
    whole = results[0][1]
    tokens = CAPACITY * len(packs)
    assert whole >= 4 * (10 * tokens * HIDDEN + 12 * HIDDEN**2), "the measurement misses what a layer must keep"
    kept = [on_cube for on_cube, _ in results]
    measure = max(kept) if packs is ALIKE else sum(kept) / len(kept)
    # Ranks with fewer sequences group them with less padding, so that a little less than the share is no mistake.
    assert 0.95 * whole / 8 <= measure <= 1.05 * whole / 8


def _ends() -> dict[str, tuple[int, int]]:
    """The embedding keeps no table, the loss its slice of the logits and some numbers a row."""
    cube = Cube(2, 2, 2)
    ids = torch.arange(64) % 1000
    logits = torch.randn(32, 500, requires_grad=True)
    embedding = Embedding3D(1000, 64, cube)
    return {
        "embedding": (saved_bytes(lambda: embedding(ids)), 64 * (8 + 1)),
        "loss": (
            saved_bytes(lambda: cross_entropy(logits, ids[:32], 1000, cube)[0]),
            local(logits).numel() * 4 + 32 * (4 + 8 + 1 + 1),
        ),
    }


def test_embedding_and_loss_keep_no_more_than_rows() -> None:
    for result in run_ranks(8, _ends):
        for name, (kept, allowed) in result.items():
            assert 0 < kept <= allowed, name

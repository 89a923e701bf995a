"""Recomputation and kept gathers: the same gradients to the bit, dropout included, and less or more that is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, Sequences, TransformerLayer3D, all_reduce_replicated, local, shard
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes
from tests.single_device_reference import fast_alone, ranks_of

Shape = tuple[int, int, int, int]
PACKS, CAPACITY, HIDDEN = 8, 24, 64
LENGTHS = (7, 17)


def _layer(shape: Shape, options: dict[str, Any], norm: str) -> tuple[TransformerLayer3D, Tensor, Sequences]:
    cube = Cube(*shape)
    cube.manual_seed(5)
    layer = TransformerLayer3D(HIDDEN, 8, cube, norm=norm, dropout=0.3, attention_dropout=0.2, std=0.2, **options)
    full = torch.randn(PACKS * CAPACITY, HIDDEN, generator=torch.Generator().manual_seed(1))
    x = shard(full, cube, "z").requires_grad_()
    packs = PACKS // (cube.shape.planes * cube.shape.z)
    torch.manual_seed(100 + cube.rank)  # dropout draws the same in every trial
    return layer, x, Sequences.from_lengths(list(LENGTHS) * packs)


def _gradients(shape: Shape, options: dict[str, Any], norm: str) -> list[Tensor]:
    layer, x, sequences = _layer(shape, options, norm)
    result = layer(x, sequences)
    after_forward = torch.get_rng_state()
    all_reduce_replicated(result.square().sum(), layer.attention.cube.over("data", "x", "y", "z")).backward()
    assert torch.equal(torch.get_rng_state(), after_forward), "what is drawn again must not move the stream"
    return [x.grad, *(local(p.grad) for p in layer.parameters())]  # type: ignore[list-item, arg-type]


def _trials(shape: Shape, norm: str) -> list[str]:
    """What differs from the layer that keeps everything."""
    wanted = _gradients(shape, {}, norm)
    assert all(float(t.abs().sum()) > 0 for t in wanted if t.numel())
    different = []
    for recompute in ("layer", "attention"):
        for reshard in (True, False):
            got = _gradients(shape, {"recompute": recompute, "reshard_after_forward": reshard}, norm)
            if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
                different.append(f"{recompute}, reshard={reshard}")
    return different


@pytest.mark.parametrize("norm", ["post", pytest.param("pre", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", fast_alone((1, 2, 1, 2), (2, 2, 2, 1)))
def test_gradients_are_the_same_to_the_bit(shape: Shape, norm: str) -> None:
    assert run_ranks(ranks_of(shape), _trials, shape, norm) == [[]] * ranks_of(shape)


def _kept(shape: Shape) -> dict[str, int]:
    kept = {}
    for name, options in {
        "nothing": {"recompute": "layer"},
        "attention": {"recompute": "attention"},
        "everything": {},
        "gathered": {"reshard_after_forward": False},
    }.items():
        layer, x, sequences = _layer(shape, options, "post")
        kept[name] = saved_bytes(lambda: layer(x, sequences))  # noqa: B023
    return kept | {"input": x.numel() * x.element_size()}


def test_a_recomputed_layer_keeps_its_input_alone() -> None:
    for kept in run_ranks(8, _kept, (2, 2, 2, 1)):
        assert kept["nothing"] == kept["input"]
        assert kept["input"] < kept["attention"] < kept["everything"] < kept["gathered"]


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute.*'all'"):
        TransformerLayer3D(8, 2, Cube.single(), recompute="all")  # type: ignore[arg-type]

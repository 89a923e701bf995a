"""The projection to a vocabulary that does not divide: its own weight and a tied one, on cubes and one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, Embedding3D, Linear3D, all_reduce_replicated, cross_entropy, gather, local, local_rows, shard
from tensor3d.layers.linear import Projection3D
from tensor3d.sharding.matmul import Reshard
from tests.ranks import run_ranks
from tests.single_device_reference import (
    FOUR_SHAPES,
    TOLERANCE,
    compare,
    error,
    gradient_errors,
    make_twins,
    ranks_of,
    worst,
)
from tools.bench.harness.memory import peak_bytes

Shape = tuple[int, int, int, int]
VOCAB, HIDDEN, ROWS = 13, 16, 32


class Tied(nn.Module):
    """Ids to a loss by one weight in two places."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        self.tokens = Embedding3D(VOCAB, HIDDEN, cube, std=0.5)
        self.head = Projection3D(HIDDEN, VOCAB, cube, bias=True, weight=self.tokens.weight)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Ids and labels of the whole cube to the loss of all."""
        cube = self.cube
        plane = cube.shape.plane_of(cube.rank)
        ids, labels = (t.chunk(cube.shape.planes)[plane] for t in (ids, labels))
        logits = self.head(self.tokens(ids))
        losses, _ = cross_entropy(logits, local_rows(labels, cube, "y"), VOCAB, cube)
        return all_reduce_replicated(losses.sum(), cube.over("data", "x", "z"))


def on_the_cube(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    cube = Cube(*shape)
    own = compare(
        partial(_own, bias=True),
        cube,
        rows=ROWS,
        columns=HIDDEN,
        face_in="z",
        face_out="y",
        dtype=dtype,
    )
    _, module, _, twin = make_twins(Tied, cube)
    ids, labels = torch.randint(0, VOCAB, (2, ROWS), generator=torch.Generator().manual_seed(2))
    ours, theirs = module(ids, labels), twin(ids, labels)
    ours.backward()
    theirs.backward()
    return own | {"loss": error(ours, theirs)} | gradient_errors(module, twin)


def _own(cube: Cube, bias: bool) -> nn.Module:
    return Projection3D(HIDDEN, VOCAB, cube, bias, std=0.3)


@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_on_cubes(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), on_the_cube, shape, torch.float64))
    assert value <= TOLERANCE[torch.float64], f"{name} differs by {value}"


@pytest.mark.slow
def test_on_a_cube_in_fp32() -> None:
    name, value = worst(run_ranks(8, on_the_cube, (2, 2, 2, 1), torch.float32))
    assert value <= TOLERANCE[torch.float32], f"{name} differs by {value}"


# --- the weight stays gathered for backward --------------------------------------------------------------------------

BIG, WIDE = 3000, 64
"""Vocabulary and hidden size, at which the gathered weight is 750 KiB."""


def _one_step(shape: Shape, rows: int, reshard: Reshard) -> tuple[list[Tensor], int, int]:
    """Gradients, bytes received in backward by gathers over x, and the most held at once by the later step that held
    least."""
    cube = Cube(*shape)
    cube.manual_seed(0)
    head = Projection3D(WIDE, BIG, cube, reshard_after_forward=reshard)
    x = shard(torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(1)), cube, "z").requires_grad_()
    labels = local_rows(torch.arange(rows // shape[0]) * 7 % BIG, cube, "y")

    def step() -> None:
        head.zero_grad()
        x.grad = None
        losses, _ = cross_entropy(head(x), labels, BIG, cube)
        losses.sum().backward()

    with cube.traffic.counting() as traffic:
        step()
    # Threads of gloo let go of what has travelled sooner or later: on a busy machine mostly later.
    most = min(peak_bytes(step) for _ in range(8))
    return [x.grad, local(head.weight.grad)], traffic.received["x", "all-gather"], most


def _kept_and_not(shape: Shape, rows: int) -> tuple[bool, int, int, int]:
    """Whether gradients are the same bits; the bytes spared; how much more is held at once; bytes of W'."""
    (ours, fewer, most), (theirs, more, other) = (_one_step(shape, rows, reshard) for reshard in ("input", True))
    return all(map(torch.equal, ours, theirs)), more - fewer, most - other, 4 * BIG * WIDE // (shape[1] * shape[2])


@pytest.mark.parametrize(
    "shape, rows",
    [
        ((2, 1, 1, 1), 96),
        pytest.param((2, 1, 1, 1), 512, marks=pytest.mark.slow),
        ((2, 1, 2, 1), 512),
        pytest.param((2, 1, 2, 1), 96, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_weight_stays_for_backward(shape: Shape, rows: int) -> None:
    """The most held at once grows by the weight at most."""
    for same, spared, grown, weight in run_ranks(ranks_of(shape), _kept_and_not, shape, rows):
        assert same
        assert spared == weight // shape[0]
        assert grown <= 1.02 * weight, f"{grown} bytes more, of a weight of {weight}"


def test_equals_a_linear_layer_of_pytorch() -> None:
    layer = Projection3D(HIDDEN, VOCAB, Cube.single(), bias=True)
    nn.init.normal_(layer.bias)
    x = torch.randn(5, HIDDEN)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-6)
    assert torch.equal(layer(x[None]), layer(x)[None]), "a leading batch dim of 1 comes back"


def test_a_tied_weight_is_one_parameter_that_is_saved_under_both_names() -> None:
    model = Tied(Cube.single())
    assert model.head.weight is model.tokens.weight
    assert [name for name, _ in model.named_parameters()] == ["tokens.weight", "head.bias"]
    assert model.state_dict().keys() == {"tokens.weight", "head.weight", "head.bias"}
    assert "tied" in repr(model.head)
    own = Projection3D(HIDDEN, VOCAB, Cube.single())
    assert own.state_dict().keys() == {"weight"}, "no bias unless it is asked for"
    assert "tied" not in repr(own)


def test_what_cannot_be_is_refused() -> None:
    weight = Embedding3D(VOCAB, HIDDEN, Cube.single()).weight
    with pytest.raises(ValueError, match=r"shape \(14, 16\)\. Got \(13, 16\)"):
        Projection3D(HIDDEN, 14, Cube.single(), weight=weight)
    with pytest.raises(ValueError, match=r"vocab.*1.*0"):
        Projection3D(HIDDEN, 0, Cube.single())
    with pytest.raises(ValueError, match=r"must be True or False, or \"input\" or \"weight\".*Got 'both'"):
        Projection3D(HIDDEN, 14, Cube.single(), reshard_after_forward="both")
    with pytest.raises(ValueError, match=r"holds_weight=False leaves.*Give no weight"):
        Projection3D(HIDDEN, VOCAB, Cube.single(), weight=weight, holds_weight=False)
    none, x = Projection3D(HIDDEN, VOCAB, Cube.single(), holds_weight=False), torch.zeros(2, HIDDEN)
    with pytest.raises(ValueError, match=r"needs the tied weight in each call.*Got none"):
        none(x)
    with pytest.raises(ValueError, match=r"any other has its own\. Got a second one"):
        Projection3D(HIDDEN, VOCAB, Cube.single())(x, weight)
    with pytest.raises(ValueError, match=r"shape \(13, 16\)\. Got \(16, 16\)"):
        none(x, Embedding3D(HIDDEN, HIDDEN, Cube.single()).weight)
    run_ranks(2, _weight_of_the_other_face)


def _weight_of_the_other_face() -> None:
    cube = Cube(1, 2, 1)
    weight = Linear3D(HIDDEN, HIDDEN, cube, "y").weight
    with pytest.raises(ValueError, match=r"meant.*face\?"):
        Projection3D(HIDDEN, HIDDEN, cube, weight=weight)


def _logits(shape: Shape) -> list[int]:
    cube = Cube(*shape)
    x = shard(torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1)), cube, "z")
    logits = _own(cube, False)(x)
    assert gather(logits, cube, "y").shape == (8, VOCAB)
    return list(logits.shape)


def test_slices_are_the_vocabularys_chunks() -> None:
    assert run_ranks(4, _logits, (1, 4, 1, 1)) == [[8, 4], [8, 4], [8, 4], [8, 1]]

"""A lookup is the same whether the table travels over x, its columns, or the rows that are found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, Embedding3D, MixedPrecisionPolicy, Projection3D, local
from tensor3d.cost_model.comm_volume import CommModel, LookupWay, embedding, lookup_way
from tensor3d.distributed.cube_shape import CubeShape
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, ranks_of

Shape = tuple[int, int, int, int]
WAYS: tuple[LookupWay, ...] = get_args(LookupWay)
HIDDEN = 10  # of which x=2 or 4 cuts unequal shares of a column slice
MIXED = MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.float32)


class _Tied(nn.Module):
    """A table that is looked up twice and is a projection's weight, too."""

    def __init__(self, vocab: int, cube: Cube) -> None:
        super().__init__()
        self.tokens = Embedding3D(vocab, HIDDEN, cube, std=0.5)
        self.projection = Projection3D(HIDDEN, vocab, cube, holds_weight=False)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.tokens(ids)
        again: Tensor = checkpoint(self.tokens, ids.flip(0), use_reentrant=False)
        logits: Tensor = self.projection(first * again, self.tokens.weight)
        return logits


def _ids(vocab: int, cube: Cube, *, uneven: bool) -> list[Tensor]:
    """Of each plane. One id stands in most rows, some nowhere, one row is of none; planes may have 1 to 3 times 12."""
    generator = torch.Generator().manual_seed(3)
    planes = [
        torch.randint(0, vocab, (12 * (1 + uneven * (n % 3)),), generator=generator) for n in range(cube.shape.planes)
    ]
    for ids in planes:
        ids[1::2], ids[4], ids[ids == 2] = vocab - 1, -1, 0
    return planes


def _own(whole: Tensor, cube: Cube, face: str = "z") -> Tensor:
    """This rank's block of what a plane's twin gives."""
    rows, columns = (cube.axis("y"), cube.axis("z")) if face == "z" else (cube.axis("z"), cube.axis("y"))
    part, own = whole.chunk(rows.size)[rows.index], columns.index
    step = -(-whole.shape[1] // columns.size)
    return part[:, own * step : (own + 1) * step]


def _wanted(weight: Tensor, ids: Tensor) -> Tensor:
    return weight[ids.clamp(min=0)] * (ids >= 0).unsqueeze(1)


def _directions(planes: list[Tensor], columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(len(ids), columns, generator=generator) for ids in planes]


def _alone(vocab: int, cube: Cube, planes: list[Tensor]) -> dict[str, float]:
    """A lookup by itself: its bits, its gradient in two micro-batches, frozen and without gradients."""
    table = Embedding3D(vocab, HIDDEN, cube, std=0.5)
    weight = full(table.weight).clone().requires_grad_()
    plane = cube.shape.plane_of(cube.rank)
    wanted, directions = [_wanted(weight, ids) for ids in planes], _directions(planes, HIDDEN)
    found = table(planes[plane])
    assert torch.equal(found, _own(wanted[plane], cube)), "other bits"
    with torch.no_grad():
        assert torch.equal(table(planes[plane]), found)
        if len({len(ids) for ids in planes}) == 1:
            with mock.patch("tensor3d.layers.embedding.largest", side_effect=AssertionError("others were asked")):
                assert torch.equal(table(planes[plane][None], planes_alike=True)[0], found)
    found += 0  # may be changed in place
    with cube.no_sync():
        (found * _own(directions[plane], cube)).sum().backward()
    (table(planes[plane].to(torch.int32)) * _own(directions[plane], cube)).sum().backward()
    (2 * sum((each * direction).sum() for each, direction in zip(wanted, directions, strict=True))).backward()
    assert full(table.weight.grad)[2].abs().max() == 0, "a row that nobody uses"
    table.weight.requires_grad_(False)
    assert not table(planes[plane]).requires_grad
    return {"alone": error(full(table.weight.grad), weight.grad)}  # type: ignore[arg-type]


def _tied(vocab: int, cube: Cube, planes: list[Tensor]) -> dict[str, float]:
    model = _Tied(vocab, cube)
    table = model.tokens.weight
    weight = full(table).clone().requires_grad_()
    plane = cube.shape.plane_of(cube.rank)
    directions, errors = _directions(planes, vocab), {}
    wanted = [_wanted(weight, ids) * _wanted(weight, ids.flip(0)) @ weight.t() for ids in planes]
    sum((each * direction).sum() for each, direction in zip(wanted, directions, strict=True)).backward()
    for step in range(2):  # the second has an order of weights to go by
        table.grad = None
        logits = model(planes[plane])
        (logits * _own(directions[plane], cube, "y")).sum().backward()
        errors[f"logits {step}"] = error(logits, _own(wanted[plane], cube, "y"))
        errors[f"gradient {step}"] = error(full(table.grad), weight.grad)  # type: ignore[arg-type]
    return errors


def _narrow(vocab: int, cube: Cube, planes: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Result in bf16, and gradient."""
    table = Embedding3D(vocab, HIDDEN, cube.with_policy(precision=MIXED), std=0.5)
    found = table(planes[cube.shape.plane_of(cube.rank)])
    found.square().sum().backward()
    return found.detach(), local(table.weight.grad)  # type: ignore[arg-type]


def _ways(shape: Shape) -> list[tuple[str, dict[str, float]]]:
    cube, errors = Cube(*shape), []
    narrow: list[tuple[Tensor, Tensor]] = []
    for way in WAYS:
        with mock.patch("tensor3d.layers.embedding.lookup_way", return_value=way):
            for vocab, uneven in ((29, True), (5, False)):  # of the smaller one some ranks hold nothing
                torch.set_default_dtype(torch.float64)
                cube.manual_seed(0)
                planes = _ids(vocab, cube, uneven=uneven)
                errors.append((f"{way} {vocab}", _alone(vocab, cube, planes) | _tied(vocab, cube, planes)))
            torch.set_default_dtype(torch.float32)
            cube.manual_seed(0)
            narrow.append(_narrow(29, cube, _ids(29, cube, uneven=False)))
    for found, gradient in narrow:
        assert torch.equal(found, narrow[0][0]), "other bits in bf16"
        errors.append(("bf16", {"gradient": error(gradient, narrow[0][1]) * 1e-6}))  # sums of fp32 in another order
    return errors


@pytest.mark.parametrize(
    "shape", fast_alone((2, 1, 2, 1), (2, 2, 2, 1), (3, 2, 1, 1), (4, 1, 2, 1), (2, 1, 2, 2), (5, 1, 1, 1))
)
def test_every_way_gives_the_same(shape: Shape) -> None:
    for result in run_ranks(ranks_of(shape), _ways, shape):
        for name, errors in result:
            worst = max(errors.items(), key=lambda item: item[1])
            assert worst[1] < 1e-12, (name, worst)


@pytest.mark.parametrize(
    ("sizes", "tokens", "way"),
    [
        ((2, 2, 2), 64, "rows"),
        ((2, 2, 2), 8192, "rows"),
        ((2, 2, 2), 16384, "columns"),
        ((2, 2, 2), 65536, "table"),
        ((4, 4, 4), 1024, "rows"),
        ((4, 4, 4), 65536, "columns"),
        ((4, 4, 4), 131072, "table"),
        ((1, 4, 4), 64, "table"),
    ],
)
def test_the_way_that_moves_least_is_taken(sizes: tuple[int, int, int], tokens: int, way: LookupWay) -> None:
    shape = CubeShape(x=sizes[0], y=sizes[1], z=sizes[2])
    assert lookup_way(shape, tokens // shape.x, 30522, 1024, 2, 4) == way


def test_the_docs_have_what_each_way_moves() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+x\d+x\d+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for sizes, tokens, *told in rows:
        shape = CubeShape.parse(sizes)
        with mock.patch("tensor3d.cost_model.comm_volume.lookup_way") as choice:
            for choice.return_value, megabytes in zip(WAYS, told, strict=True):
                wire = CommModel(shape=shape, compute=2)
                received = embedding(wire, int(tokens.replace(",", "")) // shape.x, 30522, 1024)
                assert f"{received.total() / 1e6:.1f}" == megabytes, (sizes, tokens)


@pytest.mark.parametrize("vocab", [0, 2**31])
def test_a_vocabulary_that_no_id_can_name_is_refused(vocab: int) -> None:
    with pytest.raises(ValueError, match=rf"at least 1 and below 2\^31. Got {vocab}"):
        Embedding3D(vocab, HIDDEN, Cube.single())


def test_rows_are_added_to_the_gradient_of_a_tied_projection() -> None:
    """And no table of zeros is made for them."""
    cube = Cube.single()
    with mock.patch("tensor3d.layers.embedding.sums_by_row", side_effect=AssertionError("a whole table")):
        errors = _tied(29, cube, _ids(29, cube, uneven=False))
    assert max(errors.values()) < 1e-5

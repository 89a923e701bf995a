"""Rows by their number: selection from a plane, and the change of face, against the full matrix."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d import (
    Cube,
    Embedding3D,
    Face,
    LookupEmbedding3D,
    all_reduce_replicated,
    gather,
    local_rows,
    redistribute,
    select,
    shard,
    spread_rows,
    sum_rows,
    unfold_rows,
)
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.cost_model.comm_volume import unfold_rows as unfolded_bytes
from tensor3d.distributed.comm_stats import CommStats
from tensor3d.sharding.activation_layout import other
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, name_of, ranks_of

Shape = tuple[int, int, int, int]
FACES: tuple[Face, Face] = ("y", "z")
BOXES: list[Shape] = [(1, 2, 4, 1), (1, 3, 2, 1), (2, 2, 2, 1), (1, 8, 1, 1), (1, 2, 2, 2)]
ROWS, COLUMNS = 96, 24  # of the whole job: divide by everything in BOXES


def matrix(salt: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def plane_number(cube: Cube) -> int:
    return cube.shape.plane_of(cube.rank)


# --- select --------------------------------------------------------------------------------------------------------


def chosen(cube: Cube, plane: int, kind: str) -> Tensor:
    """24 row numbers of a plane."""
    held = ROWS // cube.shape.planes
    generator = torch.Generator().manual_seed(plane)
    if kind == "scattered":
        return torch.randperm(held, generator=generator)[:24]
    if kind == "repeated":
        return torch.randint(0, 3, (24,), generator=generator)
    if kind == "nothing":
        return torch.full((24,), -1)
    rows = torch.randint(-1, held, (24,), generator=generator)
    rows[[0, 7, 23]] = torch.tensor([-1, held - 1, -1])
    return rows


def taken(full: Tensor, cube: Cube, kind: str) -> Tensor:
    """What single-device indexing gives, planes one after another."""
    planes = full.chunk(cube.shape.planes)
    numbers = [chosen(cube, i, kind) for i in range(len(planes))]
    return torch.cat([p[rows.clamp_min(0)] * (rows >= 0)[:, None] for p, rows in zip(planes, numbers, strict=True)])


def _select(shape: Shape) -> dict[str, float]:
    cube, errors = Cube(*shape), {}
    for face in FACES:
        for kind in ("scattered", "repeated", "nothing", "mixed"):
            ours, theirs = matrix(1).requires_grad_(), matrix(1).requires_grad_()
            rows = chosen(cube, plane_number(cube), kind)
            if kind == "repeated":
                rows = rows.int()  # as a loader may store them
            result = gather(select(shard(ours, cube, face), rows, cube, face), cube, face)
            wanted = taken(theirs, cube, kind)
            direction = matrix(2, len(wanted))
            result.backward(direction)
            wanted.backward(direction)
            errors[f"{face} {kind}"] = float((result - wanted).detach().abs().max())
            errors[f"{face} {kind} gradient"] = float((ours.grad - theirs.grad).abs().max())  # type: ignore[operator]
    return errors


@pytest.mark.parametrize("shape", BOXES, ids=name_of)
def test_select_is_indexing(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _select, shape):
        assert max(value for name, value in errors.items() if "gradient" not in name) == 0.0, errors
        assert max(errors.values()) <= 1e-13, errors


def _bad_lists() -> list[str]:
    cube, messages = Cube(1, 2, 2), []
    tensor = torch.zeros(4, 6)  # 8 rows in the plane
    lists: tuple[Any, ...] = (
        torch.zeros(4, 1, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([0, 8]),
        torch.tensor([-2, 0]),
        torch.tensor([0.0, 1.0]),
    )
    for rows in lists:
        try:
            select(tensor, rows, cube)
        except ValueError as refusal:
            messages.append(str(refusal))
    select(tensor, torch.tensor([7, -1]), cube)
    return messages


def test_bad_lists_are_refused_on_every_rank() -> None:
    """Row 8 of 8 belongs to no member; a row of zeros in its place would train on nothing, silently."""
    results = run_ranks(4, _bad_lists, timeout=30)
    assert all(messages == results[0] for messages in results)
    square, odd, beyond, below, floats = results[0]
    assert "Got shape (4, 1)" in square
    assert "divide by y=2 and z=2. Got shape (3,). Fill up to 4 with -1 (labels with -100)." in odd
    assert beyond == "selected rows must be at least -1 and below 8. Got values from 0 to 8."
    assert "from -2 to 0" in below
    assert "Got torch.float32" in floats


def _bad_ids() -> list[str]:
    cube, messages = Cube(1, 2, 2), []
    embedding, table = Embedding3D(9, 4, cube), LookupEmbedding3D(9, 4, cube)
    for module, ids in ((embedding, [0, 9]), (embedding, [-2, 0]), (table, [8, 9]), (table, [-1, 0])):
        try:
            module(torch.tensor(ids))
        except ValueError as refusal:
            messages.append(str(refusal))
    embedding(torch.tensor([8, -1]))
    table(torch.tensor([8, 0]))
    return messages


def test_bad_ids_are_refused_on_every_rank() -> None:
    """Also by those that do not hold the row: one rank that stops alone leaves the others waiting."""
    results = run_ranks(4, _bad_ids, timeout=30)
    assert all(messages == results[0] for messages in results)
    assert results[0] == [
        "ids must be at least -1 and below 9. Got values from 0 to 9.",
        "ids must be at least -1 and below 9. Got values from -2 to 0.",
        "row numbers must be at least 0 and below 9. Got values from 8 to 9.",
        "row numbers must be at least 0 and below 9. Got values from -1 to 0.",
    ]


def _spread(shape: Shape) -> tuple[float, bool]:
    """What `spread_rows` gives and passes back, of single ranks' rows beside all rows indexed; the largest error."""
    cube = Cube(*shape)
    columns, slots, rows = 4 * cube.shape.z, 2 * cube.shape.y * cube.shape.z, 3 * cube.shape.y * cube.shape.z
    generator, planes = torch.Generator().manual_seed(3), cube.shape.planes
    whole, weights = (torch.randn(planes * n, columns, generator=generator).double() for n in (slots, rows))
    owner = torch.randint(-1, slots, (planes, rows), generator=generator)
    own = shard(whole, cube, "z").detach().requires_grad_()
    plane = cube.axis("data").index * cube.shape.x + cube.axis("x").index
    found = spread_rows(own, owner[plane], cube)
    (found * shard(weights, cube, "z")).sum().backward()
    whole.requires_grad_()
    chosen = torch.cat([F.pad(part, (0, 0, 0, 1))[each] for part, each in zip(whole.split(slots), owner, strict=True)])
    (chosen * weights).sum().backward()
    assert whole.grad is not None
    assert own.grad is not None
    error = (gather(own.grad, cube, "z") - whole.grad).abs().max().item()
    return error, gather(found.detach(), cube, "z").equal(chosen.detach())


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (2, 1, 2, 1), (1, 2, 1, 2)))
def test_each_row_gets_that_of_its_slot(shape: Shape) -> None:
    for error, same in run_ranks(4, _spread, shape):
        assert same
        assert error < 1e-14


def _bad_ids_of_one_plane(shape: Shape) -> tuple[list[str], list[float], bool]:
    """Of ids, of rows of a small table, of chosen rows and of owners, each wrong on the last rank alone."""
    cube = Cube(*shape)
    cube.manual_seed(0)
    embedding, table = Embedding3D(9, 4, cube), LookupEmbedding3D(9, 4, cube)
    everyone, good = cube.over("data", "x", "y", "z"), torch.tensor([8, 0])
    alone, messages, losses = cube.rank == cube.shape.ranks - 1, [], []

    def loss(ids: Tensor = good, numbers: Tensor = good, rows: Tensor = good // 8, owner: Tensor = good // 8) -> Tensor:
        h = select(embedding(ids) + table(numbers), rows, cube)
        return all_reduce_replicated(sum_rows(h, owner, 2, cube).sum(), everyone)

    bad = torch.tensor([0, 9])
    for which in ("ids", "numbers", "rows", "owner"):
        with cube.no_sync():
            found = loss(**({which: bad} if alone else {}))
            found.backward()
        losses.append(found.item())
        try:
            loss().backward()
        except ValueError as refusal:
            messages.append(str(refusal))
        cube.ledger.discard()
        embedding.zero_grad(), table.zero_grad()
    try:
        with torch.no_grad():
            embedding(bad)
    except ValueError as refusal:
        messages.append(str(refusal))
    loss(**({"ids": bad} if alone else {}))
    cube.ledger.discard()  # a step that is given up before its backward pass
    loss().backward()  # the next pass is a good one
    return messages, losses, all(bool(p.grad.isfinite().all()) for p in (embedding.weight, table.weight))


@pytest.mark.parametrize("shape", fast_alone((1, 1, 1, 2), (2, 1, 1, 1)))
def test_bad_ids_of_one_plane_are_refused_on_every_rank(shape: Shape) -> None:
    """The others have good ones: were it refused where it is seen, they would wait in the next sum over planes."""
    one, other = run_ranks(2, _bad_ids_of_one_plane, shape, timeout=20)
    messages, losses, good_again = one
    assert messages == other[0]
    assert messages == [
        "rank 1: ids must be at least -1 and below 9. Got values from 0 to 9.",
        "rank 1: row numbers must be at least 0 and below 9. Got values from 0 to 9.",
        "rank 1: selected rows must be at least -1 and below 2. Got values from 0 to 9.",
        "rank 1: owner must be at least -1 and below 2. Got values from 0 to 9.",
        "ids must be at least -1 and below 9. Got values from 0 to 9.",  # without gradients, on either for itself
    ]
    for loss in (*losses, *other[1]):
        assert math.isnan(loss)
    assert good_again
    assert other[2]


# --- unfold --------------------------------------------------------------------------------------------------------


LENGTHS = (7, 1, 2, 14)
"""Of a plane's sequences: over edges of ranks and none, shorter than a kernel."""


def _convolved(shape: Shape, kernel: int, face: Face) -> tuple[dict[str, float], bool]:
    """`unfold_rows` times a weight beside Conv1d of each sequence, with gradients; and whether the bytes are told."""
    cube, columns = Cube(*shape), 12
    planes, rows = cube.shape.planes, sum(LENGTHS)
    whole, weight, direction = (
        torch.randn(*size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        for size in ((planes * rows, columns), (3, columns, kernel), (planes * rows, 3))
    )
    own = shard(whole, cube, face).detach().requires_grad_()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with cube.traffic.counting() as count:
        parts = unfold_rows(own, positions, kernel, cube, face)
        # What a product makes of these columns is a part of the sum over the axis that splits them.
        split = cube.axis(face)
        found = parts @ weight.chunk(split.size, 1)[split.index].flatten(1).t()
        (found * local_plane(direction, cube, face)).sum().backward()
    wire = CommModel(shape=cube.shape, rank=cube.rank, compute=8)
    told = {key: value for key, value in unfolded_bytes(wire, columns, kernel, face).items() if value}
    whole.requires_grad_()
    wanted = [
        F.conv1d(one.t().unsqueeze(0), weight, padding=kernel // 2)[0].t() for one in whole.split(planes * LENGTHS)
    ]
    (torch.cat(wanted) * direction).sum().backward()
    assert whole.grad is not None
    assert own.grad is not None
    total = all_reduce_replicated(found.detach(), split)
    errors = {
        "forward": (total - local_plane(torch.cat(wanted).detach(), cube, face)).abs().max().item(),
        "gradient": (own.grad - shard(whole.grad, cube, face)).abs().max().item(),
    }
    return errors, {key: value for key, value in count.received.items() if value} == told


def local_plane(matrix: Tensor, cube: Cube, face: Face) -> Tensor:
    """This rank's rows of it on a face, with all columns."""
    plane = matrix.chunk(cube.shape.planes)[plane_number(cube)]
    return local_rows(plane, cube, face)


@pytest.mark.parametrize("shape", fast_alone((1, 2, 3, 1), (2, 2, 1, 1), (1, 4, 2, 1), (1, 2, 1, 2)), ids=name_of)
def test_unfolded_rows_are_those_of_a_convolution_of_each_sequence(shape: Shape) -> None:
    for errors, told in run_ranks(ranks_of(shape), _convolved_both, shape):
        assert max(errors.values()) < 1e-13, errors
        assert told


def _convolved_both(shape: Shape) -> tuple[dict[str, float], bool]:
    errors, told = {}, True
    for kernel, face in product((1, 3, 5), FACES):
        found, same = _convolved(shape, kernel, face)
        errors |= {f"{kernel} {face} {name}": value for name, value in found.items()}
        told &= same
    return errors, told


def test_what_cannot_be_unfolded_is_refused() -> None:
    cube, rows = Cube.single(), torch.zeros(4, 6)
    for positions, kernel, message in (
        ([0, 1, 2, 3], 2, "kernel must be odd, .*Got 2"),
        ([0, 1, 2], 3, r"place of each row of the plane, 4 of them. Got shape \(3,\)"),
        ([0, 1, 2, 4], 3, "positions must be at least 0 and below 4. Got values from 0 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            unfold_rows(rows, torch.tensor(positions), kernel, cube)
    assert unfold_rows(rows[None], torch.arange(4), 3, cube).shape == (1, 4, 18)


def _too_few_rows() -> str:
    cube = Cube(1, 2, 1)
    with pytest.raises(ValueError, match="at least 2 rows") as refusal:
        unfold_rows(torch.zeros(1, 6), torch.zeros(2, dtype=torch.int64), 5, cube)
    return str(refusal.value)


def test_ranks_with_fewer_rows_than_others_look_at_are_refused() -> None:
    for told in run_ranks(2, _too_few_rows):
        assert told.startswith("unfold_rows with kernel=5 needs at least 2 rows on each rank. Got 1.")


# --- turn ----------------------------------------------------------------------------------------------------------


def _turn(shape: Shape) -> list[tuple[str, dict[str, float], CommStats, int]]:
    cube, full, direction = Cube(*shape), matrix(3), matrix(4)
    found: list[tuple[str, dict[str, float], CommStats, int]] = []
    for face in FACES:
        source = shard(full, cube, face).requires_grad_()
        wanted = shard(full, cube, other(face))
        with cube.traffic.counting() as count:
            result = redistribute(source, cube, other(face))
        result.backward(shard(direction, cube, other(face)))
        errors = {
            "forward": float((result.detach() - wanted).abs().max()),
            "backward": float((source.grad - shard(direction, cube, face)).abs().max()),  # type: ignore[operator]
            "back again": float((redistribute(result, cube, face) - source).detach().abs().max()),
        }
        found.append((face, errors, count, 8 * arriving(cube, face)))
    return found


def arriving(cube: Cube, before: Face) -> int:
    """Elements of the new shard that this rank did not hold, counted on a map of the plane."""
    held = torch.zeros(ROWS // cube.shape.planes, COLUMNS, dtype=torch.bool)
    wanted = torch.zeros_like(held)
    for plane, face in ((held, before), (wanted, other(before))):
        block = plane.chunk(cube.axis(other(face)).size)[cube.axis(other(face)).index]
        block.chunk(cube.axis(face).size, 1)[cube.axis(face).index].fill_(True)
    return int((wanted & ~held).sum())


@pytest.mark.parametrize("shape", BOXES, ids=name_of)
def test_turn_moves_to_the_other_face(shape: Shape) -> None:
    """By moving alone: exact, and nothing arrives that was there already."""
    results = run_ranks(ranks_of(shape), _turn, shape)
    assert sum(wanted for result in results for _, _, _, wanted in result) > 0
    for result in results:
        for face, errors, count, wanted in result:
            assert max(errors.values()) == 0.0, (face, errors)
            assert [(kind, received) for _, kind, received in count.order] == [("all-to-all", wanted)]


def test_turn_on_one_device_sends_nothing() -> None:
    cube, x = Cube.single(), torch.randn(3, 5, requires_grad=True)
    with cube.traffic.counting() as count:
        turned = redistribute(x, cube, "z")
    turned.sum().backward()
    assert count.total_calls == 0
    assert torch.equal(turned, x)
    assert torch.equal(x.grad, torch.ones(3, 5))  # type: ignore[arg-type]


def _bad_turns() -> list[str]:
    cube, messages = Cube(1, 2, 4), []
    # On face y the shards of a plane's (16, 24) are (4, 12).
    for size, to in (((3, 12), "z"), ((4, 9), "z"), ((2, 12), "z"), ((4, 12), "x"), ((48,), "z")):
        try:
            redistribute(torch.zeros(size), cube, to)  # type: ignore[arg-type]
            messages.append(f"{size} was turned")
        except ValueError as refusal:
            messages.append(str(refusal))
    return messages


def test_what_does_not_divide_is_refused() -> None:
    results = run_ranks(8, _bad_turns, timeout=30)
    assert all(messages == results[0] for messages in results)
    odd_rows, odd_columns, fine, face, vector = results[0]
    assert odd_rows == "(3, 12) was turned", "12 rows of the plane divide by 2 and by 4"
    assert "must divide by z=4. Got (16, 18)" in odd_columns
    assert fine == "(2, 12) was turned"
    assert "face must be" in face
    assert "Got shape (48,)" in vector

"""Faces: cutting a matrix and putting it together again are inverse and adjoint, on every box."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, Face, gather, shard
from tensor3d.sharding.activation_layout import check_activation, check_divides, check_face, local_block, other
from tests.ranks import run_ranks
from tests.single_device_reference import SHAPES, name_of, ranks_of

Shape = tuple[int, int, int, int]
FACES: tuple[Face, Face] = ("y", "z")


def matrix(salt: int) -> Tensor:
    return torch.randn(32, 24, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def block_of(full: Tensor, cube: Cube, face: Face) -> Tensor:
    """The definition: rows over data, x and the other axis, columns over the face's."""
    place, shape = cube.coordinate, cube.shape
    rows = other(face)
    number = (place["data"] * shape.x + place["x"]) * shape.size(rows) + place[rows]
    high = full.shape[0] // (shape.data * shape.x * shape.size(rows))
    wide = full.shape[1] // shape.size(face)
    return full[number * high : (number + 1) * high, place[face] * wide : (place[face] + 1) * wide]


def _faces(shape: Shape) -> dict[str, float]:
    """Nothing is added up on the way, so all is exact."""
    cube, full, direction, errors = Cube(*shape), matrix(1), matrix(2), {}
    for face in FACES:
        source = full.clone().requires_grad_()
        block = shard(source, cube, face)
        errors[f"{face} shard"] = difference(block, block_of(full, cube, face))
        block.backward(block_of(direction, cube, face))
        errors[f"{face} shard's gradient"] = difference(source.grad, direction)

        own = block_of(full, cube, face).clone().requires_grad_()
        errors[f"{face} gather"] = difference(gather(own, cube, face), full)
        gather(own, cube, face).backward(direction)
        errors[f"{face} gather's gradient"] = difference(own.grad, block_of(direction, cube, face))
        errors[f"{face} there and back"] = difference(gather(shard(full, cube, face), cube, face), full)
        block.detach().zero_()
        errors[f"{face} writes into its source"] = difference(source, full)
    return errors


def difference(got: Tensor | None, wanted: Tensor) -> float:
    assert got is not None
    assert got.shape == wanted.shape
    return float((got.detach() - wanted).abs().max())


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), *SHAPES], ids=name_of)
def test_shard_and_gather(shape: Shape) -> None:
    for errors in run_ranks(ranks_of(shape), _faces, shape):
        assert max(errors.values()) == 0.0, errors


def _refusals() -> list[str]:
    cube, messages = Cube(1, 2, 2, data=2), []
    for rows, columns, face in ((6, 24, "z"), (8, 23, "y"), (8, 24, "x")):
        try:
            shard(torch.zeros(rows, columns), cube, face)  # type: ignore[arg-type]
        except ValueError as refusal:
            messages.append(str(refusal))
    for call in (shard, gather):
        try:
            call(torch.zeros(8), cube, "z")
        except ValueError as refusal:
            messages.append(str(refusal))
    return messages


def test_what_does_not_divide_is_refused_on_every_rank() -> None:
    results = run_ranks(8, _refusals, timeout=30)
    assert all(messages == results[0] for messages in results)
    rows, columns, face, vector, other_vector = results[0]
    assert rows == "on 2*(1x2x2), face z holds matrices whose rows divide by 4 and columns by 2. Got shape (6, 24)."
    assert "face y" in columns
    assert "Got shape (8, 23)" in columns
    assert 'face must be "y" or "z"' in face
    assert "Got shape (8,)" in vector
    assert "Got shape (8,)" in other_vector


def test_a_gathered_matrix_is_not_its_shard() -> None:
    """On one device both are views or copies; the gradient must flow and the input stay as it is."""
    cube, x = Cube.single(), torch.ones(2, 3, requires_grad=True)
    gather(shard(x, cube, "z").mul_(2), cube, "z").sum().backward()
    assert torch.equal(x.detach(), torch.ones(2, 3))
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]


def test_checks_name_the_number_and_the_remedy() -> None:
    cube = Cube.single()
    with pytest.raises(ValueError, match=r"heads.*y=1.*0"):
        check_divides("heads", 0, cube, "y")
    with pytest.raises(ValueError, match=r"layer.*\(rows, \b8\b/z\) = \(rows, 8\)\..*\(3, 9\)"):
        check_activation(torch.zeros(3, 9), 8, cube, "z", "layer")
    with pytest.raises(ValueError, match=r"Got 'x'"):
        check_face("x")


def own_blocks(shape: tuple[int, int, int, int]) -> None:
    cube = Cube(*shape)
    plane = torch.arange(16.0 * 8).view(16, 8).requires_grad_()
    for face in FACES:
        block = local_block(plane, cube, face)
        whole = gather(block.detach(), cube, face)
        assert torch.equal(whole, plane.detach().repeat(cube.shape.planes, 1))
        plane.grad = None
        block.sum().backward()
        assert plane.grad is not None
        assert int(plane.grad.sum()) == block.numel()  # of its own block alone
    with pytest.raises(ValueError, match=r"plane's.*y=2"):
        local_block(plane[:15], cube, "z")


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 4, 1)], ids=name_of)
def test_a_plane_s_matrix_is_cut_as_the_face_says(shape: tuple[int, int, int, int]) -> None:
    run_ranks(8, own_blocks, shape)

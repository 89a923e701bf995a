"""Faces: the two ways in which an activation lies on the cube (docs/algorithm.md).

| face  | rows split over  | columns split over |
| ----- | ---------------- | ------------------ |
| `"z"` | data, x, then y  | z                  |
| `"y"` | data, x, then z  | y                  |

A face is named after the axis that splits its columns; the other one of y and z splits the rows of a plane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.distributed.collectives import Axis, all_gather
from tensor3d.distributed.cube import Cube
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.sharding.layout_checks import check_matrix, check_origin

Face = Literal["y", "z"]


def other(face: Face) -> Face:
    """The face that a product leads to, which is also the axis that splits the rows of `face` inside a plane."""
    return "y" if face == "z" else "z"


def check_face(face: str) -> None:
    """Raises ValueError unless `face` is one."""
    if face not in ("y", "z"):
        raise ValueError(f'face must be "y" or "z", the axis that splits the columns. Got {face!r}.')


def check_divides(what: str, number: int, cube: Cube, axis: Literal["y", "z"]) -> int:
    """`number` divided by the axis's size. Raises ValueError, naming both, where that leaves a rest."""
    size = cube.axis(axis).size
    if number < 1 or number % size:
        raise ValueError(f"{what} must divide by {axis}={size}. Got {number}. Change {what} or the cube.")
    return number // size


def lies(columns: int, face: Face, cube: Cube) -> str:
    """How a matrix of M rows, those of the cube, lies on this rank: for what layers say of themselves."""
    cut = cube.shape.planes * cube.axis(other(face)).size
    axis = cube.axis(face)
    step = -(-columns // axis.size)
    here = min((axis.index + 1) * step, columns) - min(axis.index * step, columns)
    return f"face {face} ({'M' if cut == 1 else f'M/{cut}'}, {here})"


def check_activation(tensor: Tensor, features: int, cube: Cube, face: Face, layer: str) -> None:
    """Raises ValueError unless `tensor` can be this rank's shard, on `face`, of a matrix with `features` columns."""
    check_matrix(tensor, layer)
    scatter = cube.axis(face).size
    columns = features // scatter
    if tensor.shape[1] != columns:
        raise ValueError(
            f"{layer} reads face {face}: its input must have the local shape (rows, {features}/{face}) = (rows, "
            f"{columns}). Got {tuple(tensor.shape)}. Is it on face {other(face)}? `redistribute` changes the face."
        )
    rows = tensor.shape[0] * cube.axis(other(face)).size
    if rows % scatter:
        raise ValueError(
            f"{layer}: the {rows} rows of a plane must divide by {face}={scatter}, over which the result's rows are "
            f"split. Got {tensor.shape[0]} on each rank. Choose a number of rows that divides by both y and z."
        )


def in_batch(layer: Callable[[Tensor], Tensor], batch: Tensor, what: str) -> Tensor:
    """Calls `layer` without the batch dim of size 1, and puts it back: so models written for (batch, sequence, hidden)
    run on packs, as (1, rows, hidden).

    Raises:
        ValueError: a batch of several entries.
    """
    if batch.shape[0] != 1:
        raise ValueError(
            f"{what} reads the packed rows of a plane, alone or as a batch of one: (1, rows, ...). Got shape "
            f"{tuple(batch.shape)}. Pack a padded batch first (tensor3d.pack_padded)."
        )
    return layer(batch.squeeze(0)).unsqueeze(0)


@out_of_graphs
def local_block(matrix: Tensor, cube: Cube, face: Face) -> Tensor:
    """This rank's block, on `face`, of a plane's matrix that every rank of the plane holds whole.

    For what comes from outside, such as patches of images or results of a layer that is not split: slices, so nothing
    is sent, and each rank's gradient is that of its own block. (`shard` cuts the matrix of the whole cube.)

    Args:
        matrix: (M/x, H): the plane's rows, all columns. Rows divide by the other axis of the plane, columns by `face`.

    Returns:
        (M/xy, H/z) on face z; y and z swapped on face y.

    Raises:
        ValueError: not a matrix, or sizes that do not divide.
    """
    check_face(face)
    if matrix.dim() == 3:
        return in_batch(lambda one: local_block(one, cube, face), matrix, "local_block")
    rows, columns = cube.axis(other(face)), cube.axis(face)
    if matrix.dim() != 2 or matrix.shape[0] % rows.size or matrix.shape[1] % columns.size:
        raise ValueError(
            f"a plane's matrix needs rows that divide by {rows.name}={rows.size} and columns that divide by "
            f"{columns.name}={columns.size} to lie on face {face}. Got shape {tuple(matrix.shape)}. Fill up the rows, "
            "or choose another cube."
        )
    return matrix.chunk(rows.size, 0)[rows.index].chunk(columns.size, 1)[columns.index].contiguous()


@out_of_graphs
def shard(tensor: Tensor, cube: Cube, face: Face) -> Tensor:
    """This rank's shard of a full matrix that every rank holds; differentiable (the gradient is gathered).

    Args:
        tensor: (rows, columns); rows divide by data*x*rows-axis, columns by the face's axis.

    Raises:
        ValueError: not a matrix, or sizes that do not divide.
    """
    check_face(face)
    rows, columns = cube.shape.planes * cube.axis(other(face)).size, cube.axis(face).size
    if tensor.dim() != 2 or tensor.shape[0] % rows or tensor.shape[1] % columns:
        raise ValueError(
            f"on {cube.shape}, face {face} holds matrices whose rows divide by {rows} and columns by {columns}. Got "
            f"shape {tuple(tensor.shape)}."
        )
    return _Shard.apply(tensor, cube, face)


@out_of_graphs
def gather(tensor: Tensor, cube: Cube, face: Face) -> Tensor:
    """The full matrix, on every rank, of which `tensor` is this rank's shard; differentiable, as copies are.

    Meant for looking at results and for small outputs: a full hidden state is what the cube exists to avoid. Columns
    may be cut unevenly, as the logits of an odd vocabulary are; the widths are gathered first, and waited for.

    Raises:
        ValueError: not a matrix.
    """
    check_face(face)
    if tensor.dim() != 2:
        raise ValueError(f"a shard is a matrix (rows, columns). Got shape {tuple(tensor.shape)}.")
    check_origin(tensor, face, cube, "gather")
    return _Gather.apply(tensor, cube, face)


def _shard(tensor: Tensor, cube: Cube, face: Face, widths: list[int]) -> Tensor:
    rows, columns = other(face), face
    for axis in (cube.axis("data"), cube.axis("x"), cube.axis(rows)):
        tensor = tensor.chunk(axis.size, 0)[axis.index]
    return tensor.split(widths, 1)[cube.axis(columns).index].contiguous()


def _gather(tensor: Tensor, cube: Cube, face: Face, widths: list[int]) -> Tensor:
    tensor = _gather_columns(tensor, cube.axis(face), widths)
    for axis in (cube.axis(other(face)), cube.axis("x"), cube.axis("data")):
        tensor = all_gather(tensor, axis).wait()
    return tensor


def _gather_columns(tensor: Tensor, axis: Axis, widths: list[int]) -> Tensor:
    padded = F.pad(tensor, (0, max(widths) - tensor.shape[1]))  # a collective needs even shards
    parts = all_gather(padded, axis).wait().chunk(axis.size, 0)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)


def _widths(tensor: Tensor, axis: Axis) -> list[int]:
    """Columns of each member's shard."""
    own = torch.tensor([tensor.shape[1]], device=tensor.device)
    widths: list[int] = all_gather(own, axis).wait().tolist()
    return widths


class _Shard(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cube: Cube, face: Face) -> Tensor:
        members = cube.axis(face).size
        ctx.cube, ctx.face, ctx.widths = cube, face, [tensor.shape[1] // members] * members
        ctx.result_face, ctx.made = face, "shard"
        return _shard(tensor, cube, face, ctx.widths).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.cube, ctx.face, ctx.widths), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cube: Cube, face: Face) -> Tensor:
        ctx.cube, ctx.face, ctx.widths = cube, face, _widths(tensor, cube.axis(face))
        return _gather(tensor, cube, face, ctx.widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _shard(gradient, ctx.cube, ctx.face, ctx.widths), None, None


@out_of_graphs
def gather_plane(tensor: Tensor, cube: Cube, face: Face) -> Tensor:
    """The plane's matrix, on each of its ranks, of which `tensor` is this rank's block; differentiable, as copies are.

    As `gather` within one plane: rows and columns of y and z, not those of other planes.
    """
    return _GatherPlane.apply(tensor, cube, face)


class _GatherPlane(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cube: Cube, face: Face) -> Tensor:
        columns, rows = cube.axis(face), cube.axis(other(face))
        ctx.columns, ctx.rows, ctx.widths = columns, rows, _widths(tensor, columns)
        return all_gather(_gather_columns(tensor, columns, ctx.widths), rows).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient.chunk(ctx.rows.size)[ctx.rows.index]
        return own.split(ctx.widths, 1)[ctx.columns.index].contiguous(), None, None


@out_of_graphs
def gather_rows(values: Tensor, cube: Cube, face: Face) -> Tensor:
    """Values of this rank's rows, (R', ...), such as a narrow head gives, to those of all rows of the plane, (R, ...).

    The members of the face's own axis must have the same values, as they have behind `SmallHead3D`. Differentiable:
    each rank must compute the same from the result, and takes its own rows of the gradient.

    Elements received: `(n-1)/n` of the result forward, none backward; n members of the axis that splits the rows.
    """
    check_face(face)
    return gather_over(values, cube.axis(other(face)))


@out_of_graphs
def gather_over(values: Tensor, axis: Axis) -> Tensor:
    """The members' values, (R', ...) each, one after another, (n*R', ...), on all of them. Differentiable: each member
    must compute the same from the result, and takes its own part of the gradient.

    Elements received: `(n-1)/n` of the result forward, none backward.
    """
    return _GatherRows.apply(values, axis)


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.result_face, ctx.made = None, "a gather over ranks"
        return all_gather(values, axis).wait() if axis.size > 1 else values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.axis.size)[ctx.axis.index].contiguous(), None

"""What `check_layer` feeds: one full input, and the part of it that each rank of a cube is given.

M tokens of the cube, H columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import CubeShape, chunk_bounds
from tensor3d.sharding.activation_layout import Face, check_face, other


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A full matrix (M, H) of which each rank is given its block on `face`, and whose gradient is compared."""

    tensor: Tensor
    face: Face


@dataclass(frozen=True, kw_only=True)
class PerToken:
    """(M, ...): each rank is given the values of its plane's rows."""

    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """Anything that every rank is given as it is."""

    value: Any


def on_face(tensor: Tensor, face: Face) -> Sharded:
    """An input of `check_layer` that lies on a face of its own: a full matrix (rows, columns).

    Raises:
        ValueError: an unknown face, or no matrix of floating-point numbers.
    """
    check_face(face)
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ValueError(
            f"an activation is a matrix (rows, columns) of floating-point numbers. Got {_described(tensor)}. For "
            "values of rows (ids, labels) use per_row, for what every rank is to get whole use whole."
        )
    return Sharded(tensor=tensor, face=face)


def per_row(tensor: Tensor) -> PerToken:
    """An input of `check_layer` with a value for each row, (M, ...): a rank is given those of all rows of its plane.

    As `Embedding3D` takes its ids. A layer finds its own rows among them by `local_rows`.

    Raises:
        ValueError: a scalar.
    """
    if tensor.dim() == 0:
        raise ValueError(f"values of rows need a dim for the rows. Got {_described(tensor)}.")
    return PerToken(tensor=tensor)


def whole(value: Any) -> Replicated:
    """An input of `check_layer` that every rank is given as it is."""
    return Replicated(value=value)


Input = Sharded | PerToken | Replicated | Sequences


def read_inputs(inputs: Any, face: Face, dtype: torch.dtype) -> tuple[Input, ...]:
    """What the caller wrote, as records; floating-point numbers in the type of the comparison.

    Raises:
        ValueError: a tensor that may be meant in several ways.
    """
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    return tuple(_read(number, value, face, dtype) for number, value in enumerate(given))


def _read(number: int, value: Any, face: Face, dtype: torch.dtype) -> Input:
    if isinstance(value, Tensor):
        if value.dim() != 2 or not value.is_floating_point():
            raise ValueError(
                f"input {number} is {_described(value)}, which is no activation (rows, columns). Wrap it: "
                "per_row(...) for a value a row (ids, labels), whole(...) for what every rank is to get as it is."
            )
        value = Sharded(tensor=value, face=face)
    if isinstance(value, Sharded):
        return Sharded(tensor=value.tensor.detach().to(dtype), face=value.face)
    if isinstance(value, PerToken):
        tensor = value.tensor.detach()
        return PerToken(tensor=tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return value if isinstance(value, (Replicated, Sequences)) else Replicated(value=value)


def check_inputs(inputs: Sequence[Input], shape: CubeShape, needed_rows: int, needed_columns: int) -> None:
    """Raises ValueError where an input cannot be laid on the cube.

    Args:
        needed_rows, needed_columns: what the sizes would have to divide by for every cube, for the remedy.
    """
    planes = shape.planes
    for number, given in enumerate(inputs):
        if isinstance(given, (Sharded, PerToken)):
            high = given.tensor.shape[0]
            if high % planes or (
                isinstance(given, Sharded) and (high % (planes * shape.y) or high % (planes * shape.z))
            ):
                raise ValueError(
                    f"input {number} has {high} rows, which cannot be spread over the cube {shape}. Give it a number "
                    f"of rows that divides by {needed_rows}: that does for all the cubes."
                )
        if isinstance(given, Sharded) and given.tensor.shape[1] % shape.size(given.face):
            raise ValueError(
                f"input {number} has {given.tensor.shape[1]} columns, which must divide by "
                f"{given.face}={shape.size(given.face)} on the cube {shape}. {needed_columns} does for all the cubes."
            )
        if isinstance(given, Sequences):
            for rank in range(shape.ranks):
                _own_lengths(given, shape, rank)


def here(given: Input, cube: Cube) -> Any:
    """What this rank is given of an input."""
    if isinstance(given, Sharded):
        return given.tensor[block(given.tensor.shape, given.face, cube.shape, cube.rank)].clone()
    if isinstance(given, PerToken):
        return given.tensor.chunk(cube.shape.planes)[cube.shape.plane_of(cube.rank)]
    if isinstance(given, Sequences):
        return Sequences.from_lengths(_own_lengths(given, cube.shape, cube.rank), given.device)
    return given.value


def block(sizes: Sequence[int], face: Face, shape: CubeShape, rank: int) -> tuple[slice, ...]:
    """Where a rank's block of a matrix on `face` lies; of a tensor of another number of dims its rows."""
    place, rows = shape.coordinate(rank), slice(0, sizes[0])
    for axis in ("data", "x", other(face)):
        first, last = chunk_bounds(rows.stop - rows.start, shape.size(axis), place[axis])
        rows = slice(rows.start + first, rows.start + last)
    if len(sizes) != 2:
        return (rows,)
    return rows, slice(*chunk_bounds(sizes[1], shape.size(face), place[face]))


def _own_lengths(sequences: Sequences, shape: CubeShape, rank: int) -> list[int]:
    """Lengths of the sequences in the rows of a rank on face y.

    Raises:
        ValueError: the rows do not divide, or a sequence crosses the border between two ranks.
    """
    parts = shape.planes * shape.z
    part = shape.plane_of(rank) * shape.z + shape.coordinate(rank)["z"]
    ends = list(accumulate(sequences.lengths, initial=0))
    first, last = ends[-1] * part // parts, ends[-1] * (part + 1) // parts
    if ends[-1] % parts or first not in ends or last not in ends:
        remedy = f"Choose lengths of which some end at every {ends[-1] // parts} rows."
        if ends[-1] % parts:
            remedy = f"Choose a number of rows that divides by {parts}."
        raise ValueError(
            f"on face y of the cube {shape} each of {parts} groups of ranks holds 1/{parts} of the rows, in whole "
            f"sequences. Got the lengths {sequences.lengths}. {remedy}"
        )
    return list(sequences.lengths[ends.index(first) : ends.index(last)])


def _described(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}"

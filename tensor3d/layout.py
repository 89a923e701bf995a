"""How a parameter lies on the cube: stated once, read by initialisation, gradients, norms and checkpoints.

    N output features, K input features, H hidden size, V vocabulary, C classes

| layout         | for                                           | local shape        | gradient summed over |
| -------------- | --------------------------------------------- | ------------------ | -------------------- |
| matrix("z")    | weight (N, K) of a product that reads face z  | (N/yx, K/z)        | data (x: the product)|
| matrix("y")    | weight (N, K) of a product that reads face y  | (N/zx, K/y)        | data (x: the product)|
| vector(face)   | bias, LayerNorm on that face                  | (H/face,)          | data, x, rows axis   |
| table(face)    | small table (T, H) of rows added on that face | (T, H/face)        | data, x, rows axis   |
| narrow(face)   | weight (C, K) of a head that reads that face  | (C, K/face)        | data, x, rows axis   |
| copies(face)   | small vector used beside a narrow head        | whole              | data, x, rows axis   |

The rows axis of face z is y, that of face y is z. A gradient is *not* summed over the axes where it is already equal
(the columns axis of a narrow head), so the sum is stated and never inferred from "replicated".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tensor3d.cube import Cube
from tensor3d.faces import Face, other
from tensor3d.shape import MESH_AXES, AxisName, check_axes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which dim of a tensor each axis cuts, and over which axes its local gradients are summed.

    Raises:
        ValueError: a name that is not an axis, or an axis named twice: what an axis cuts has no sum over it, and what
            it cuts once it cannot cut again.
    """

    cut: tuple[tuple[AxisName, int], ...] = ()
    sum_over: tuple[AxisName, ...]

    def __post_init__(self) -> None:
        named = (*(axis for axis, _ in self.cut), *self.sum_over)
        check_axes(named)
        if len(set(named)) != len(named):
            raise ValueError(f"a layout names each axis at most once. Got cut={self.cut}, sum_over={self.sum_over}.")

    def dim_cut_by(self, axis: AxisName) -> int | None:
        return dict(self.cut).get(axis)

    @property
    def face(self) -> Face | None:
        """The face whose columns it shares: of vectors and tables, which one of y and z cuts alone."""
        cutting = [axis for axis, _ in self.cut if axis in ("y", "z")]
        if len(cutting) != 1:
            return None
        return "y" if cutting == ["y"] else "z"

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """DTensor's, in the order of the cube's mesh."""
        dims = (self.dim_cut_by(axis) for axis in MESH_AXES)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)

    def slices(self, shape: torch.Size | tuple[int, ...], cube: Cube) -> tuple[slice, ...]:
        """The block of a tensor of `shape` that this rank holds: nested chunks, as DTensor cuts them."""
        bounds = [(0, size) for size in shape]
        for axis in MESH_AXES:
            dim = self.dim_cut_by(axis)
            if dim is not None:
                start, stop = bounds[dim]
                first, last = chunk_bounds(stop - start, cube.axis(axis).size, cube.axis(axis).index)
                bounds[dim] = (start + first, start + last)
        return tuple(slice(*bound) for bound in bounds)


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where chunk `index` of `parts` starts and ends: ceil(size/parts) each, the last ones shorter or empty."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


# Cached: layers ask for them at every use, in every step.
@cache
def matrix(face: Face) -> Layout:
    """The weight of a product that reads `face`, stored as [out, in]."""
    return Layout(cut=((other(face), 0), (face, 1), ("x", 0)), sum_over=("data",))


@cache
def vector(face: Face) -> Layout:
    """A vector along the columns of `face`."""
    return Layout(cut=((face, 0),), sum_over=("data", "x", other(face)))


@cache
def table(face: Face) -> Layout:
    """A small table whose rows are added to the rows of `face`: positions, token types."""
    return Layout(cut=((face, 1),), sum_over=("data", "x", other(face)))


def narrow(face: Face) -> Layout:
    """The weight [classes, in] of a head that multiplies its own columns of `face`."""
    return table(face)


@cache
def copies(face: Face) -> Layout:
    """A small tensor, whole on every rank, that meets rows of `face` which are equal over the face's columns axis."""
    return Layout(sum_over=("data", "x", other(face)))


def local(tensor: Tensor) -> Tensor:
    """This rank's block of a parameter or gradient, for DTensors and plain tensors alike. Not differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def block(parameter: Tensor) -> str:
    """Logical and local shape, for what layers say of themselves."""
    whole, here = tuple(parameter.shape), tuple(local(parameter).shape)
    return f"weight {whole}" + ("" if here == whole else f" here {here}")


def check_layout(parameter: Tensor, layout: Layout, cube: Cube) -> None:
    """Raises ValueError unless `parameter` lies on the cube as `layout` says: sizes alone may fit by chance.

    And unless it is a leaf: its gradient goes to the ledger and by no other way to what it was computed from.
    """
    shape = tuple(parameter.shape)
    if not parameter.is_leaf:
        raise ValueError(
            f"a parameter of shape {shape} was computed from others, which would get no gradient. Pass the parameter "
            "itself; for arithmetic on its values, take them by tensor3d.use."
        )
    if cube.mesh is None:
        return
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"a parameter of shape {shape} is a plain tensor on {cube.shape}. Make it with "
            "tensor3d.constant, tensor3d.normal or tensor3d.distribute, which put it on the cube."
        )
    for axis, found, wanted in zip(MESH_AXES, parameter.placements, layout.placements, strict=True):
        if cube.axis(axis).size > 1 and found != wanted:
            raise ValueError(
                f"a parameter of shape {shape} lies on axis {axis} as {found}, and {wanted} is needed here. Make it "
                "with the layout of its use: is it meant for the other face?"
            )


def is_counted_here(parameter: Tensor, cube: Cube) -> bool:
    """Whether this rank is the one that stands for its block where several hold copies (norms, counts)."""
    if not isinstance(parameter, DTensor):
        return cube.rank == 0
    return all(
        not placement.is_replicate() or cube.axis(axis).index == 0
        for axis, placement in zip(MESH_AXES, parameter.placements, strict=True)
    )


def as_parameter(block: Tensor, shape: torch.Size | tuple[int, ...], layout: Layout, cube: Cube) -> nn.Parameter:
    """Wraps this rank's block as a parameter: a DTensor on the cube's mesh, or as it is where there is no mesh."""
    if cube.mesh is None:
        return nn.Parameter(block)
    full = torch.empty(shape, device="meta")
    return nn.Parameter(
        DTensor.from_local(block, cube.mesh, layout.placements, run_check=False, shape=full.shape, stride=full.stride())
    )


def distribute(tensor: Tensor, layout: Layout, cube: Cube) -> nn.Parameter:
    """A parameter from the full tensor, which every rank holds: for imported weights and for tests."""
    block = tensor[layout.slices(tensor.shape, cube)].contiguous().clone().to(cube.device)
    return as_parameter(block, tensor.shape, layout, cube)

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
| replicated()   | small vector that meets what all ranks differ in | whole           | data, x, y, z        |

The rows axis of face z is y, that of face y is z. A gradient is *not* summed over the axes where it is already equal
(the columns axis of a narrow head), so the sum is stated and never inferred from "replicated".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import MESH_AXES, AxisName, check_axes, chunk_bounds
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.seeds import mix
from tensor3d.sharding.activation_layout import Face, other
from tensor3d.torch_private import as_dtensor, local_tensor, storage_id

_LIES_IN = "_tensor3d_lies_in"
"""Kept on a parameter: its own address, by which a copy tells that it is one, and its storage."""


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


def _by_face(make: Callable[[Face], Layout]) -> Callable[[Face], Layout]:
    """Each is made once: layers ask for them at every use, in every step."""
    known = cache(make)

    @out_of_graphs  # torch.compile looks through caches, with a warning
    @wraps(make)
    def layout(face: Face) -> Layout:
        return known(face)

    return layout


@_by_face
def matrix(face: Face) -> Layout:
    """The weight of a product that reads `face`, stored as [out, in]."""
    return Layout(cut=((other(face), 0), (face, 1), ("x", 0)), sum_over=("data",))


@_by_face
def vector(face: Face) -> Layout:
    """A vector along the columns of `face`."""
    return Layout(cut=((face, 0),), sum_over=("data", "x", other(face)))


@_by_face
def table(face: Face) -> Layout:
    """A small table whose rows are added to the rows of `face`: positions, token types."""
    return Layout(cut=((face, 1),), sum_over=("data", "x", other(face)))


def narrow(face: Face) -> Layout:
    """The weight [classes, in] of a head that multiplies its own columns of `face`."""
    return table(face)


@_by_face
def copies(face: Face) -> Layout:
    """A small tensor, whole on every rank, that meets rows of `face` which are equal over the face's columns axis."""
    return Layout(sum_over=("data", "x", other(face)))


@out_of_graphs
def replicated() -> Layout:
    """A small tensor, whole on every rank, that meets other numbers on each: rows over data and x, columns over y, rows
    or columns over z. A gain of all heads of attention is one."""
    return _REPLICATED


_REPLICATED = Layout(sum_over=("data", "x", "y", "z"))


@out_of_graphs
def local(tensor: Tensor) -> Tensor:
    """This rank's block of a parameter or gradient, for DTensors and plain tensors alike. Not differentiable."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`; of a DTensor by no operator.

    For the first `detach` of each shape DTensor makes a plan, and from torch 2.15 on it goes through all placements for
    that: half a second on a mesh of four axes.

    A DTensor's has a version counter of its own: who writes to it increments that of `tensor` (`increment_version`).
    """
    return as_dtensor(local_tensor(tensor).detach(), tensor) if isinstance(tensor, DTensor) else tensor.detach()


def zeros_like(tensor: Tensor) -> Tensor:
    """`torch.zeros_like(tensor)`; of a DTensor by no operator, see `detached`."""
    zeros = torch.zeros_like(local(tensor), requires_grad=False)
    return as_dtensor(zeros, tensor) if isinstance(tensor, DTensor) else zeros


def local_slices(tensor: Tensor, cube: Cube) -> tuple[slice, ...]:
    """Where this rank's block of a parameter or gradient lies in the full one: all of it, of a plain tensor."""
    cut: tuple[tuple[AxisName, int], ...] = ()
    if isinstance(tensor, DTensor):
        placements = zip(MESH_AXES, tensor.placements, strict=True)
        cut = tuple((axis, placement.dim) for axis, placement in placements if isinstance(placement, Shard))
    return Layout(cut=cut, sum_over=()).slices(tensor.shape, cube)


def cut_rows(whole: Tensor, slices: tuple[slice, ...], permute_rows: Tensor | None) -> Tensor:
    """A block of `whole`, or, where `permute_rows` (rows,) is given, of the tensor whose row `i` is row
    `permute_rows[i]` of it."""
    if permute_rows is None:
        return whole[slices]
    all_rows = (slice(None), *slices[1:])
    return whole[all_rows].index_select(0, permute_rows[slices[0]].to(whole.device))


def block(parameter: Tensor) -> str:
    """Logical and local shape, for what layers say of themselves."""
    whole, here = tuple(parameter.shape), tuple(local(parameter).shape)
    return f"weight {whole}" + ("" if here == whole else f" here {here}")


def check_layout(parameter: Tensor, layout: Layout, cube: Cube) -> None:
    """Raises ValueError unless `parameter` lies on the cube as `layout` says: sizes alone may fit by chance.

    And unless it is a leaf: its gradient goes to the ledger and by no other way to what it was computed from. And where
    its data was replaced, see `refuse_replaced`.
    """
    refuse_replaced(parameter)
    if isinstance(parameter, DTensor) and parameter.placements == layout.placements and parameter.is_leaf:
        return  # by far most often
    shape = tuple(parameter.shape)
    if not parameter.is_leaf:
        raise ValueError(
            f"a parameter of shape {shape} was computed from others, as parametrizations and pruning of torch.nn.utils "
            "do, and these would get no gradient. Pass the parameter itself; for arithmetic on its values, take them "
            "by tensor3d.local_param."
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


def refuse_replaced(parameter: Tensor) -> None:
    """Raises ValueError for a DTensor whose data was replaced since it was made or first used: PyTorch replaces that of
    the shell and leaves the block as it was, so that layers would go on with the old values without a word."""
    if not isinstance(parameter, DTensor):
        return
    lies, kept = (id(parameter), storage_id(parameter)), vars(parameter).get(_LIES_IN)
    if kept == lies:
        return
    if kept is not None and kept[0] == lies[0]:
        raise ValueError(
            f"the data of a parameter of shape {tuple(parameter.shape)} was replaced (parameter.data = ..., or "
            "vector_to_parameters), which leaves the block of this rank as it was. Write into it: parameter.copy_(...) "
            "under torch.no_grad(), or tensor3d.init_parameter."
        )
    vars(parameter)[_LIES_IN] = lies


def owns_for_norm(parameter: Tensor, cube: Cube, *, of_all: bool = True) -> bool:
    """Whether this rank is the one that stands for its block where several hold copies (norms, counts).

    Args:
        of_all: among all ranks. Otherwise among those that share a copy of the model, one along each place of data.
    """
    axes = [axis for axis in MESH_AXES if of_all or axis != "data"]
    if not isinstance(parameter, DTensor):
        return all(cube.axis(axis).index == 0 for axis in axes)
    placements = dict(zip(MESH_AXES, parameter.placements, strict=True))
    return all(cube.axis(axis).index == 0 or not placements[axis].is_replicate() for axis in axes)


def as_parameter(block: Tensor, shape: torch.Size | tuple[int, ...], layout: Layout, cube: Cube) -> nn.Parameter:
    """Wraps this rank's block as a parameter: a DTensor on the cube's mesh, or as it is where there is no mesh."""
    if cube.mesh is None:
        return nn.Parameter(block)
    full = torch.empty(shape, device="meta")
    whole = DTensor.from_local(
        block.detach(), cube.mesh, layout.placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    # All that nn.Parameter does with a DTensor but one `detach`, for which DTensor makes a plan for each shape anew:
    # that was most of what making a model took.
    parameter = cast(nn.Parameter, whole.requires_grad_())
    parameter._is_param = True
    cube.numbers.add(parameter)
    refuse_replaced(parameter)  # which takes note of where it lies
    return parameter


def distribute(tensor: Tensor, layout: Layout, cube: Cube) -> nn.Parameter:
    """A parameter from the full tensor, which every rank holds: for imported weights and for tests."""
    block = tensor[layout.slices(tensor.shape, cube)].contiguous().clone().to(cube.device)
    return as_parameter(block, tensor.shape, layout, cube)


# --- Makes parameters, the same logical tensor on every cube, and lets any module use one in its own arithmetic -------

# Initialisation draws a tensor tile by tile, each tile from its own seed: a rank makes the tiles that touch its block
# and never more than one at a time, and the values do not depend on how the tensor is cut.
_TILE = 256


def normal(shape: tuple[int, int], layout: Layout, cube: Cube, std: float) -> nn.Parameter:
    """A matrix of normal(0, std) entries, drawn in fp32: the same on every cube for the same `Cube.manual_seed`."""
    rows, columns = layout.slices(shape, cube)
    if cube.is_blank:
        return _finish(torch.empty(rows.stop - rows.start, columns.stop - columns.start), shape, layout, cube)
    block = _normal_block(shape, rows, columns, cube.next_seed()).mul_(std)
    return _finish(block, shape, layout, cube)


@out_of_graphs
def logical_block(like: Tensor, fill: Callable[[Tensor], object], cube: Cube) -> Tensor:
    """This rank's block of a logical tensor that `fill` fills, the same on every cube and equal on ranks that hold
    copies: for random numbers of your own, which torch's functions draw on each rank for itself.

    One whole tensor of that shape is made on the host. Every rank calls it alike, after `Cube.manual_seed`; a generator
    that `fill` is given from outside must be alike on all ranks.

    Args:
        like: a parameter or a gradient: logical shape, cut and type are its own.
        fill: such as `torch.nn.init.orthogonal_`, or `lambda whole: whole.normal_(std=0.1)`.
    """
    whole = torch.zeros(like.shape, dtype=like.dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(cube.next_seed())
        fill(whole)
    return whole[local_slices(like, cube)].to(device=cube.device, copy=True)


def init_parameter(parameter: nn.Parameter, fill: Callable[[Tensor], object], cube: Cube) -> None:
    """Fills a parameter as `fill` fills the whole one: `init_parameter(layer.weight, torch.nn.init.xavier_uniform_,
    cube)`. The same on every cube for the same `Cube.manual_seed`; see `logical_block`.

    Where `cube.skip_init` says that weights are loaded right after, nothing is done.
    """
    if not cube.is_blank:
        block = logical_block(parameter, fill, cube)
        with torch.no_grad():
            local(parameter).copy_(block)
        torch.autograd.graph.increment_version(parameter)


def constant(shape: tuple[int, ...], layout: Layout, cube: Cube, value: float) -> nn.Parameter:
    """A tensor of equal entries: biases at 0, gains at 1."""
    sizes = [part.stop - part.start for part in layout.slices(shape, cube)]
    return _finish(torch.full(sizes, value), shape, layout, cube)


@out_of_graphs
def local_param(parameter: nn.Parameter, layout: Layout, cube: Cube) -> Tensor:
    """This rank's block of `parameter`, for use in any arithmetic; its gradient goes to the ledger.

    For parameters of your own: state with `layout` how the parameter is cut and over which axes its gradient is summed.
    What y or z alone cuts is taken to lie along the columns of that face.

    Raises:
        ValueError: a plain parameter on a cube of several ranks (nothing would keep its copies equal), one that was
            made with another layout, or one that is not a leaf of the graph.
    """
    check_layout(parameter, layout, cube)
    cube.over(*layout.sum_over)  # its process groups must exist before a backward pass needs them
    return _Use.apply(parameter, layout, cube)


class _Use(Function):
    """Forward: the block. Backward: the block's gradient is handed to the ledger. No communication, nothing saved."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, layout: Layout, cube: Cube) -> Tensor:
        cube.ledger.forget_failed_passes()
        ctx.parameter, ctx.layout, ctx.cube = parameter, layout, cube
        ctx.result_face, ctx.made = layout.face, f"a parameter of shape {tuple(parameter.shape)}"
        block = local(parameter)
        return block.view_as(block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if all(asked_for(ctx, ctx.parameter)):
            ctx.cube.ledger.accumulate_grad(ctx.parameter, gradient, ctx.cube.over(*ctx.layout.sum_over))
        return None, None, None


def _normal_block(shape: tuple[int, int], rows: slice, columns: slice, seed: int) -> Tensor:
    block = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.float32)
    generator = torch.Generator()
    for top in range(rows.start - rows.start % _TILE, rows.stop, _TILE):
        for left in range(columns.start - columns.start % _TILE, columns.stop, _TILE):
            size = (min(_TILE, shape[0] - top), min(_TILE, shape[1] - left))
            tile = torch.randn(size, generator=generator.manual_seed(mix(seed, top, left)), dtype=torch.float32)
            wanted_rows = slice(max(top, rows.start), min(top + size[0], rows.stop))
            wanted_columns = slice(max(left, columns.start), min(left + size[1], columns.stop))
            block[_shift(wanted_rows, rows.start), _shift(wanted_columns, columns.start)] = tile[
                _shift(wanted_rows, top), _shift(wanted_columns, left)
            ]
    return block


def _shift(part: slice, origin: int) -> slice:
    return slice(part.start - origin, part.stop - origin)


def _finish(block: Tensor, shape: tuple[int, ...], layout: Layout, cube: Cube) -> nn.Parameter:
    if block.is_meta and cube.device.type != "meta":
        raise ValueError(
            f"a parameter of shape {tuple(shape)} is made on the meta device, where it has no values. Make layers "
            'outside torch.device("meta"): each rank holds its blocks alone, on cube.device, and inside `with '
            "cube.skip_init():` matrices stay unfilled until weights are loaded."
        )
    cube.over(*layout.sum_over)  # see `local_param`
    block = block.to(device=cube.device, dtype=torch.get_default_dtype())
    return as_parameter(block, shape, layout, cube)

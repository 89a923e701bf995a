"""Makes parameters, the same logical tensor on every cube, and lets any module use one in its own arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tensor3d.cube import Cube
from tensor3d.layout import Layout, as_parameter, check_layout, local
from tensor3d.ledger import asked_for
from tensor3d.seeds import mix

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


def constant(shape: tuple[int, ...], layout: Layout, cube: Cube, value: float) -> nn.Parameter:
    """A tensor of equal entries: biases at 0, gains at 1."""
    sizes = [part.stop - part.start for part in layout.slices(shape, cube)]
    return _finish(torch.full(sizes, value), shape, layout, cube)


def use(parameter: nn.Parameter, layout: Layout, cube: Cube) -> Tensor:
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


class _Use(torch.autograd.Function):
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
            ctx.cube.ledger.hand_in(ctx.parameter, gradient, ctx.cube.over(*ctx.layout.sum_over))
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
    cube.over(*layout.sum_over)  # see `use`
    block = block.to(device=cube.device, dtype=torch.get_default_dtype())
    return as_parameter(block, shape, layout, cube)

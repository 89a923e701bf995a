"""What lies between products of a block, as functions of one region in each direction, on a cube that compiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tensor3d.activation import Activation, biased, biased_backward
from tensor3d.cube import Cube
from tensor3d.dropping import draw_kept, dropped, scale_of
from tensor3d.faces import Face
from tensor3d.layers.dropout import check_dropout
from tensor3d.layout import local, vector
from tensor3d.ledger import asked_for


def add_bias_and_activate(x: Tensor, bias: nn.Parameter, name: Activation, cube: Cube, face: Face) -> Tensor:
    """activation(x + bias) of a product (M', N') on `face`. Sends nothing; saves x, or relu's result."""
    return _BiasActivation.apply(x, bias, name, cube, face)


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: nn.Parameter, name: Activation, cube: Cube, face: Face) -> Tensor:
        cube.ledger.forget_failed_passes()
        result = cube.regions(biased, x, local(bias), name)
        ctx.save_for_backward(result if name == "relu" else x, bias)
        ctx.bias, ctx.name, ctx.cube, ctx.face = bias, name, cube, face
        ctx.result_face, ctx.made = face, f"{name} of {bias.shape[0]} columns"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        saved, bias = ctx.saved_tensors
        cube = ctx.cube
        dx, dbias = cube.regions(biased_backward, dy, saved, local(bias), ctx.name)
        if all(asked_for(ctx, ctx.bias)):
            cube.ledger.hand_in(ctx.bias, dbias, cube.over(*vector(ctx.face).sum_over))
        return dx, None, None, None, None


def add_dropped(residual: Tensor, x: Tensor, dropout: float, cube: Cube, face: Face) -> Tensor:
    """residual + dropout(x) on `face`. Sends nothing; saves a byte an element."""
    check_dropout(dropout, cube)
    return _AddDropped.apply(residual, x, draw_kept(x, dropout), dropout, cube, face)


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, kept: Tensor, dropout: float, cube: Cube, face: Face) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.dropout, ctx.cube = dropout, cube
        ctx.result_face, ctx.made = face, "a residual sum"
        return cube.regions(_added, residual, x, kept, scale_of(dropout, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return dy, ctx.cube.regions(dropped, dy, kept, scale_of(ctx.dropout, dy)), None, None, None, None


def _added(residual: Tensor, x: Tensor, kept: Tensor, scale: Tensor) -> Tensor:
    return residual + dropped(x, kept, scale)

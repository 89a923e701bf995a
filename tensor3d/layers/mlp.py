"""The gated feed-forward block.

M tokens of the cube, H hidden size, I inner size
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle
from tensor3d.distributed.cube import Cube
from tensor3d.layers.dropout import Dropout3D, check_dropout
from tensor3d.layers.linear import Linear3D
from tensor3d.ops.activations import Activation, activated, biased, biased_backward, gated, gated_backward
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.dropout import draw_of, dropped, mask_of, scale_of
from tensor3d.sharding.activation_layout import Face, check_divides, in_batch
from tensor3d.sharding.param_layout import check_layout, local, vector

# ----------------------------------------------------------------------------------------------------------------------
# What lies between products of a block, as functions of one region in each direction, on a cube that compiles.


def add_bias_and_activate(x: Tensor, bias: nn.Parameter, name: Activation, cube: Cube, face: Face) -> Tensor:
    """activation(x + bias) of a product (M', N') on `face`. Sends nothing; saves x, or relu's result."""
    check_layout(bias, vector(face), cube)
    return _BiasActivation.apply(x, bias, name, cube, face)


class _BiasActivation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: nn.Parameter, name: Activation, cube: Cube, face: Face) -> Tensor:
        cube.ledger.forget_failed_passes()
        result = cube.regions(biased, x, local(bias), name)
        ctx.save_for_backward(result if name == "relu" else x, bias)
        ctx.bias, ctx.activation, ctx.cube, ctx.face = bias, name, cube, face
        ctx.result_face, ctx.made = face, f"{name} of {bias.shape[0]} columns"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        saved, bias = ctx.saved_tensors
        cube = ctx.cube
        dx, dbias = cube.regions(biased_backward, dy, saved, local(bias), ctx.activation)
        if all(asked_for(ctx, ctx.bias)):
            cube.ledger.accumulate_grad(ctx.bias, CommHandle(dbias), cube.over(*vector(ctx.face).sum_over))
        return dx, None, None, None, None


def add_dropped(residual: Tensor, x: Tensor, dropout: float, cube: Cube, face: Face) -> Tensor:
    """residual + dropout(x) on `face`. Sends nothing; saves a byte an element."""
    check_dropout(dropout, cube)
    return _AddDropped.apply(residual, x, draw_of(x, dropout, cube.regions), dropout, cube, face)


class _AddDropped(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, draw: Tensor, dropout: float, cube: Cube, face: Face) -> Tensor:
        total, kept = cube.regions(_added, residual, x, draw, scale_of(dropout, x, cube.regions))
        ctx.save_for_backward(draw if kept is None else kept)
        ctx.dropout, ctx.cube = dropout, cube
        ctx.result_face, ctx.made = face, "a residual sum"
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), regions = ctx.saved_tensors, ctx.cube.regions
        return dy, regions(dropped, dy, kept, scale_of(ctx.dropout, dy, regions)), None, None, None, None


def _added(residual: Tensor, x: Tensor, draw: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    kept = mask_of(draw, x)
    return residual + dropped(x, kept, scale), None if kept is draw else kept


class _Gate(Function):
    """activation(gate) * up of their product (M', 2I') on face y. Sends nothing; saves the product alone."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, name: Activation, cube: Cube) -> Tensor:
        ctx.save_for_backward(fused)
        ctx.activation, ctx.cube = name, cube
        ctx.result_face, ctx.made = "y", f"a gate of {name}"
        return cube.regions(gated, fused, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (fused,) = ctx.saved_tensors
        return ctx.cube.regions(gated_backward, dy, fused, ctx.activation), None, None


# --- The gated feed-forward block -------------------------------------------------------------------------------------

GatedActivation = Literal["silu", "gelu", "gelu_tanh"]
"""`"silu"`: SwiGLU. `"gelu"`: GeGLU, with the exact GELU. `"gelu_tanh"`: with its approximation by tanh."""


class GatedMLP3D(nn.Module):
    """`down(activation(gate(x)) * up(x))`, face z to face z (Shazeer 2020, arXiv 2002.05202, §2).

    Gate and up are one product (z to y) of 2I rows, so that the input is gathered once; down (y to z) as in `MLP3D`.
    Rows of the fused weight are ordered (inner unit, gate/up), so that a cut over y takes both of a unit, and what is
    between the products sends nothing; `to_fused_rows` and `from_fused_rows` turn a stack of gate and up into it and
    back.

        gate_up.weight  (2I/yx, H/z)      down.weight  (H/zx, I/y)

    Args:
        hidden: H, divides by z (and by y for other layers beside it).
        inner: I, divides by y.
        activation: of the gate.
        bias: of gate and up, and of down unless `down_bias` says otherwise.
        dropout: of what the gate lets through.
        reshard_after_forward: as in `Linear3D`.

    Raises:
        ValueError: sizes that do not divide, named with the axis, an unknown activation, or a dropout as `Dropout3D`
            refuses it.
    """

    def __init__(
        self,
        hidden: int,
        cube: Cube,
        inner: int,
        activation: GatedActivation = "silu",
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        dropout: float = 0.0,
        std: float = 0.02,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        if activation not in get_args(GatedActivation):
            raise ValueError(f"activation must be one of {', '.join(get_args(GatedActivation))}. Got {activation!r}.")
        check_divides("hidden", hidden, cube, "z")
        check_divides("inner", inner, cube, "y")
        self.activation: GatedActivation = activation
        self.cube = cube
        reshard = reshard_after_forward
        self.gate_up = Linear3D(hidden, 2 * inner, cube, "z", bias, std=std, reshard_after_forward=reshard)
        last = bias if down_bias is None else down_bias
        self.down = Linear3D(inner, hidden, cube, "y", last, std=std, reshard_after_forward=reshard)
        self.dropout = Dropout3D(dropout, cube)

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(M/xy, H/z) on face z, to the same."""
        return self.down(self.dropout(self._opened(self.gate_up(x))))

    def _opened(self, fused: Tensor) -> Tensor:
        """activation(gate) * up of the product (M/xz, 2I/y): (M/xz, I/y) on face y."""
        if self.cube.speed.compile and self.cube.regions.with_activations:
            if fused.dim() == 3:
                return in_batch(self._opened, fused, "GatedMLP3D")
            return _Gate.apply(fused, self.activation, self.cube)
        gate, up = fused.unflatten(-1, (-1, 2)).unbind(-1)
        return activated(gate, self.activation) * up

    def extra_repr(self) -> str:
        return f"activation={self.activation}"

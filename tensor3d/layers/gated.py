"""The gated feed-forward block.

M tokens of the cube, H hidden size, I inner size
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d.cube import Cube
from tensor3d.faces import check_divides
from tensor3d.layers.linear import Linear3D

Activation = Literal["silu", "gelu"]
"""`"silu"`: SwiGLU. `"gelu"`: GeGLU, with the exact GELU."""


class GatedMLP3D(nn.Module):
    """`down(activation(gate(x)) * up(x))`, face z to face z (Shazeer 2020, arXiv 2002.05202, §2).

    Gate and up are one product (z to y) of 2I rows, so that the input is gathered once; down (y to z) as in `MLP3D`.
    Rows of the fused weight are ordered (inner unit, gate/up), so that a cut over y takes both of a unit, and what is
    between the products sends nothing.

        gate_up.weight  (2I/yx, H/z)      down.weight  (H/zx, I/y)

    Args:
        hidden: H, divides by z (and by y for other layers beside it).
        inner: I, divides by y.
        activation: of the gate.
        reshard_after_forward: as in `Linear3D`.

    Raises:
        ValueError: sizes that do not divide, named with the axis, or an unknown activation.
    """

    def __init__(
        self,
        hidden: int,
        cube: Cube,
        inner: int,
        activation: Activation = "silu",
        *,
        bias: bool = False,
        std: float = 0.02,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}. Got {activation!r}.")
        check_divides("hidden", hidden, cube, "z")
        check_divides("inner", inner, cube, "y")
        self.activation = activation
        reshard = reshard_after_forward
        self.gate_up = Linear3D(hidden, 2 * inner, cube, "z", bias, std=std, reshard_after_forward=reshard)
        self.down = Linear3D(inner, hidden, cube, "y", bias, std=std, reshard_after_forward=reshard)

    def forward(self, x: Tensor) -> Tensor:
        """(M/xy, H/z) on face z, to the same."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)  # (M/xz, I/y) each
        opened = F.silu(gate) if self.activation == "silu" else F.gelu(gate)
        return self.down(opened * up)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"

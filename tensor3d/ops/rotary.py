"""Rotary positions (Su et al. 2021, arXiv 2104.09864, §3.2): queries and keys turned by angles that tell their place.

T rows of a rank, h heads of a rank, d head dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs


@out_of_graphs
def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Turns the pair (i, i + d/2) of each row by the angle `position * base**(-2i/d)`, as LLaMA and GPT-NeoX pair them.

    The product of a turned query and a turned key depends on the distance of their positions alone. Rows and heads are
    turned one by one, so nothing is sent. Angles are fp32, as where published weights come from, also where x is wider;
    the turn is computed in fp32 at least. Saved for backward: `positions`, never the angles; the gradient is the turn
    back.

    Args:
        x: (T, h, d); d is even.
        positions: (T,) integers, the place of each row in its sequence (`Sequences.positions`).
        base: above 0; the larger, the longer the slowest wave.

    Returns:
        (T, h, d), of the type of x.

    Raises:
        ValueError: shapes that do not fit, an odd d, or a base that is not above 0.
    """
    if x.dim() != 3 or positions.shape != x.shape[:1]:
        raise ValueError(
            "rotary needs x (rows, heads, head dimension) and positions (rows,). Got "
            f"{tuple(x.shape)} and {tuple(positions.shape)}."
        )
    check_rotary(x.shape[-1], base)
    return _Rotary.apply(x, positions, base)


def check_rotary(head_dim: int, base: float) -> None:
    """Raises ValueError for a head dimension that has no pairs, or a base without angles."""
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs, so the head dimension must be even. Got {head_dim}.")
    if not base > 0:
        raise ValueError(f"the base of rotary positions must be above 0. Got {base}.")


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, base: float) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.base = base
        return _turned(x, positions, base, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return _turned(gradient, positions, ctx.base, -1.0), None, None


def _turned(x: Tensor, positions: Tensor, base: float, direction: float) -> Tensor:
    dim = x.shape[-1]
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim
    angles = positions.float()[:, None] * (1.0 / base**exponents)  # (T, d/2)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(wide)[:, None], angles.sin().to(wide)[:, None] * direction
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

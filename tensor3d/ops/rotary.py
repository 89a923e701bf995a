"""Rotary positions (Su et al. 2021, arXiv 2104.09864, §3.2): queries and keys turned by angles that tell their place.

T rows of a rank, h heads of a rank, d head dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.compiled_regions import CompiledRegions


@out_of_graphs
def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0, factor: float = 1.0) -> Tensor:
    """Turns the pair (i, i + d/2) of each row by the angle `position / factor * base**(-2i/d)`, as LLaMA and GPT-NeoX
    pair them.

    The product of a turned query and a turned key depends on the distance of their positions alone. Rows and heads are
    turned one by one, so nothing is sent. Angles are fp32, as where published weights come from, also where x is wider;
    the turn is computed in fp32 at least. Saved for backward: `positions`, never the angles; the gradient is the turn
    back.

    Args:
        x: (T, h, d); d is even.
        positions: (T,) integers, the place of each row in its sequence (`Sequences.positions`).
        base: above 0; the larger, the longer the slowest wave.
        factor: above 0; positions are divided by it, as for sequences that are so much longer than those learnt from
            (Chen et al. 2023, arXiv 2306.15595, §2.3: position interpolation, which is called linear scaling).

    Returns:
        (T, h, d), of the type of x.

    Raises:
        ValueError: shapes that do not fit, an odd d, or a base or a factor that is not above 0.
    """
    if x.dim() != 3 or positions.shape != x.shape[:1]:
        raise ValueError(
            "rotary needs x (rows, heads, head dimension) and positions (rows,). Got "
            f"{tuple(x.shape)} and {tuple(positions.shape)}."
        )
    check_rotary(x.shape[-1], base, factor)
    return _Rotary.apply(x, positions, base, factor)


def check_rotary(head_dim: int, base: float, factor: float = 1.0) -> None:
    """Raises ValueError for a head dimension that has no pairs, or a base or a factor without angles."""
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs, so the head dimension must be even. Got {head_dim}.")
    if not base > 0:
        raise ValueError(f"the base of rotary positions must be above 0. Got {base}.")
    if not factor > 0:
        raise ValueError(f"the factor of rotary positions must be above 0. Got {factor}.")


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, base: float, factor: float) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.base, ctx.factor = base, factor
        return _turned(x, positions, base, factor, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        return _turned(gradient, positions, ctx.base, ctx.factor, -1.0), None, None, None


def _turned(x: Tensor, positions: Tensor, base: float, factor: float, direction: float) -> Tensor:
    cos, sin = cos_and_sin(positions, frequencies(base, x.shape[-1], factor, device=x.device))
    return _turn(x, cos.unsqueeze(1), sin.unsqueeze(1) * direction)


def frequencies(base: float, d: int, factor: float = 1.0, *, device: torch.device) -> Tensor:
    """fp32 (d/2,): by how much each pair turns from a position to the next."""
    found = 1.0 / base ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
    return found if factor == 1.0 else found / factor


def cos_and_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Of the angles: fp32 (T, d/2) each. In no region: a compiler's cosines have another last bit, also in models of
    fp64."""
    angles = positions.unsqueeze(1).float() * frequencies
    return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide), sin.to(wide)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


# --- Queries, keys and values of one product at once, of a few regions ------------------------------------------------


@out_of_graphs
def rotary_of_parts(
    qkv: Tensor, positions: Tensor, base: float, regions: CompiledRegions, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary` of the queries and keys that lie in the product of an attention, and its values as they are: on a cube
    that compiles. Saved for backward: `positions`.

    Args:
        qkv: (T, g, h/g + 2, d): of each head of keys its heads of queries, k and v.

    Returns:
        q (T, h, d), k and v (T, g, d).
    """
    check_rotary(qkv.shape[-1], base, factor)
    return _RotaryOfParts.apply(qkv, positions, (base, qkv.shape[-1], factor), regions)


class _RotaryOfParts(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, positions: Tensor, waves: tuple[float, int, float], regions: CompiledRegions
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(positions)
        ctx.waves, ctx.regions, ctx.shape = waves, regions, qkv.shape[1:]
        angles = cos_and_sin(positions, regions.constant(frequencies, *waves))
        parts = regions(turned_parts, qkv.flatten(1), *angles, qkv.shape[2])
        return tuple(part.unflatten(1, (-1, qkv.shape[3])) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        regions, flat = ctx.regions, [each.flatten(1) for each in gradients]
        angles = cos_and_sin(positions, regions.constant(frequencies, *ctx.waves))
        product = regions(turned_back, *flat, *angles, ctx.shape[1])
        return product.unflatten(1, ctx.shape), None, None, None


def turned_parts(qkv: Tensor, cos: Tensor, sin: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of (T, g * parts * d) turned queries (T, h * d), turned keys and values (T, g * d): a region."""
    q, k, v = qkv.unflatten(1, (-1, parts, 2 * cos.shape[1])).split([parts - 2, 1, 1], 2)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return _turn_in_kernel(q, cos, sin).flatten(1), _turn_in_kernel(k, cos, sin).flatten(1), v.clone().flatten(1)


def turned_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
    """The gradient of their product, (T, g * parts * d): a region."""
    d = 2 * cos.shape[1]
    q, k, v = dq.unflatten(1, (-1, parts - 2, d)), dk.unflatten(1, (-1, 1, d)), dv.unflatten(1, (-1, 1, d))
    cos, sin = cos[:, None, None], -sin[:, None, None]
    return torch.cat([_turn_in_kernel(q, cos, sin), _turn_in_kernel(k, cos, sin), v], 2).flatten(1)


def _turn_in_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `_turn`. What is put together has the type of x, of which Inductor writes nothing down in between."""
    first, second = x.chunk(2, -1)
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)], -1)

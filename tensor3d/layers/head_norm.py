"""RMSNorm of each head's queries and keys, before positions turn them.

T rows of a rank on face y, h heads of a rank, g heads of keys and values, d head dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle
from tensor3d.distributed.cube import Cube
from tensor3d.layers.norm_kernels import gain_of, widened
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.rotary import check_rotary, cos_and_sin, frequencies
from tensor3d.sharding.param_layout import check_layout, constant, replicated
from tensor3d.torch_private import is_plain


class HeadNorm3D(nn.Module):
    """RMSNorm over the columns of each head alone: `x / sqrt(mean(x^2) + eps) * weight`, with one gain for all heads.

    What keeps scores of attention from growing with the norms of queries and keys (Henry et al. 2020, arXiv 2010.04245;
    Dehghani et al. 2023, arXiv 2302.05442, §2: QK normalization). A rank holds whole heads on face y, so nothing is
    sent but the gain's gradient, which all ranks sum once a step. Saved for backward: the input and a number a head and
    row.

        weight   (d,), whole on every rank

    Args:
        head_dim: d.
        eps: added to the mean of squares.
        zero_centered: the weight begins at 0, and 1 + weight is what multiplies (`RMSNorm3D`).
    """

    def __init__(self, head_dim: int, cube: Cube, *, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        if head_dim < 1:
            raise ValueError(f"head_dim must be at least 1. Got {head_dim}.")
        self.head_dim, self.cube, self.eps, self.zero_centered = head_dim, cube, eps, zero_centered
        self.weight = constant((head_dim,), replicated(), cube, 0.0 if zero_centered else 1.0)

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(T, h, d) of this rank's heads, to the same.

        Raises:
            ValueError: another shape.
        """
        if x.dim() != 3 or x.shape[2] != self.head_dim:
            raise ValueError(f"HeadNorm3D needs (rows, heads, {self.head_dim}). Got {tuple(x.shape)}.")
        check_layout(self.weight, replicated(), self.cube)
        return _HeadNorm.apply(x, self.weight, self.cube, self.eps, self.zero_centered)

    def extra_repr(self) -> str:
        centered = ", zero_centered=True" if self.zero_centered else ""
        return f"{self.head_dim}, eps={self.eps}{centered}"


class _HeadNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, cube: Cube, eps: float, zero_centered: bool) -> Tensor:
        cube.ledger.forget_failed_passes()
        wide = widened(x)
        rrms = (wide.square().mean(2, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rrms)
        ctx.weight, ctx.cube, ctx.zero_centered = weight, cube, zero_centered
        ctx.result_face, ctx.made = "y", f"HeadNorm3D of {weight.shape[0]} columns"
        return (wide * rrms).mul_(gain_of(weight, zero_centered)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight, rrms = ctx.saved_tensors
        wide_dy, normal = dy.to(rrms.dtype), x.to(rrms.dtype) * rrms
        if all(asked_for(ctx, ctx.weight)):
            gradient = CommHandle((wide_dy * normal).sum((0, 1)))
            ctx.cube.ledger.accumulate_grad(ctx.weight, gradient, ctx.cube.over(*replicated().sum_over))
        g = wide_dy * gain_of(weight, ctx.zero_centered)
        mean = (g * normal).mean(2, keepdim=True)
        return g.sub_(normal.mul_(mean)).mul_(rrms).to(dy.dtype), None, None, None, None


# --- Norms and rotary positions of one product at once, of a few regions ----------------------------------------------


def are_as_one(norms: tuple[HeadNorm3D, HeadNorm3D], head_dim: int) -> bool:
    """Whether both may be computed by `normed_and_turned`: nobody waits for either, and they differ in their weights
    alone."""
    if not all(is_plain(each, HeadNorm3D) for each in norms):
        return False
    of_queries, of_keys = ((each.head_dim, each.eps, each.zero_centered) for each in norms)
    return of_queries == of_keys and of_queries[0] == head_dim


@out_of_graphs
def normed_and_turned(
    qkv: Tensor, positions: Tensor, norms: tuple[HeadNorm3D, HeadNorm3D], base: float, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary` of the normed queries and keys that lie in the product of an attention, and its values as they are: on a
    cube that compiles. Saved for backward: the product, `positions`, and a number a head and row.

    Args:
        qkv: (T, g, h/g + 2, d): of each head of keys its heads of queries, k and v.
        norms: of queries, and of keys, which `are_as_one`.

    Returns:
        q (T, h, d), k and v (T, g, d).
    """
    of_queries, of_keys = norms
    check_rotary(qkv.shape[-1], base, factor)
    for each in norms:
        check_layout(each.weight, replicated(), each.cube)
    how = (of_queries.eps, of_queries.zero_centered, (base, qkv.shape[-1], factor))
    return _NormedAndTurned.apply(qkv, positions, of_queries.weight, of_keys.weight, of_queries.cube, how)


class _NormedAndTurned(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        positions: Tensor,
        q_weight: nn.Parameter,
        k_weight: nn.Parameter,
        cube: Cube,
        how: tuple[float, bool, tuple[float, int, float]],
    ) -> tuple[Tensor, ...]:
        cube.ledger.forget_failed_passes()
        eps, zero_centered, waves = how
        angles, gains = _angles(positions, cube, waves), [gain_of(each, zero_centered) for each in (q_weight, k_weight)]
        *parts, q_rrms, k_rrms = cube.regions(norm_and_turn, qkv.flatten(1), *gains, *angles, qkv.shape[2], eps)
        # The weights, too, by which torch knows that nobody has changed them since.
        ctx.save_for_backward(qkv, positions, q_rrms, k_rrms, q_weight, k_weight)
        ctx.q_weight, ctx.k_weight, ctx.cube, ctx.how = q_weight, k_weight, cube, how
        ctx.result_face, ctx.made = "y", f"norms of heads of {qkv.shape[3]} columns"
        return tuple(part.unflatten(1, (-1, qkv.shape[3])) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv, positions, *rrms, q_weight, k_weight = ctx.saved_tensors
        cube, (_, zero_centered, waves), parameters = ctx.cube, ctx.how, (ctx.q_weight, ctx.k_weight)
        angles, gains = _angles(positions, cube, waves), [gain_of(each, zero_centered) for each in (q_weight, k_weight)]
        product, *of_weights = cube.regions(
            norm_and_turn_back,
            *(each.flatten(1) for each in gradients),
            qkv.flatten(1),
            *rrms,
            *gains,
            *angles,
            qkv.shape[2],
        )
        asked, over = asked_for(ctx, *parameters), cube.over(*replicated().sum_over)
        for parameter, gradient, is_asked in zip(parameters, of_weights, asked, strict=True):
            if is_asked:
                cube.ledger.accumulate_grad(parameter, CommHandle(gradient), over)
        return product.unflatten(1, qkv.shape[1:]), None, None, None, None, None


def _angles(positions: Tensor, cube: Cube, waves: tuple[float, int, float]) -> tuple[Tensor, Tensor]:
    return cos_and_sin(positions, cube.regions.constant(frequencies, *waves))


def norm_and_turn(
    qkv: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, parts: int, eps: float
) -> tuple[Tensor, ...]:
    """Of (T, g * parts * d) normed and turned queries (T, h * d) and keys, and values (T, g * d); and of queries and
    keys 1/sqrt(mean of squares), (T, h) and (T, g): a region."""
    q, k, v = qkv.unflatten(1, (-1, parts, 2 * cos.shape[1])).split([parts - 2, 1, 1], 2)
    cos, sin, turned, rrms = cos[:, None, None], sin[:, None, None], [], []
    for each, gain in ((q, q_gain), (k, k_gain)):
        wide = widened(each)
        of_each = (wide.square().mean(3, keepdim=True) + eps).rsqrt()
        normal = wide * of_each * gain
        turned.append(_turned(normal, cos, sin, each.dtype).flatten(1))
        rrms.append(of_each.flatten(1))
    return (*turned, v.clone().flatten(1), *rrms)


def norm_and_turn_back(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_rrms: Tensor,
    k_rrms: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    parts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of their product, (T, g * parts * d), and of both weights, (d,): a region."""
    d = 2 * cos.shape[1]
    q, k, _ = qkv.unflatten(1, (-1, parts, d)).split([parts - 2, 1, 1], 2)
    cos, sin, found, of_weights = cos[:, None, None], -sin[:, None, None], [], []
    for gradient, each, of_each, gain in ((dq, q, q_rrms, q_gain), (dk, k, k_rrms, k_gain)):
        rrms = of_each.unflatten(1, (-1, each.shape[2], 1))
        # Of the type that `rotary` gives, too.
        wide = _turned(gradient.unflatten(1, (-1, each.shape[2], d)), cos, sin, gradient.dtype).to(rrms.dtype)
        normal = each.to(rrms.dtype) * rrms
        of_weights.append((wide * normal).sum((0, 1, 2)))
        g = wide * gain
        mean = (g * normal).mean(3, keepdim=True)
        found.append(((g - normal * mean) * rrms).to(each.dtype))
    return torch.cat([*found, dv.unflatten(1, (-1, 1, d))], 2).flatten(1), of_weights[0], of_weights[1]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """`rotary`, where each half gets its type before they are put together: Inductor writes less down in between."""
    first, second = x.chunk(2, -1)
    return torch.cat([(first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)], -1)

"""Sum, dropout and LayerNorm as one function, of a few regions, and RMSNorm: what `LayerNorm3D` and `RMSNorm3D` are on
a cube that compiles.

M' rows of this rank, H columns of the cube, H' = H/face columns of this rank, n members of the face's axis
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle, all_reduce, gather_statistics
from tensor3d.distributed.cube import Cube
from tensor3d.ops.as_type import as_type
from tensor3d.ops.autograd_function import Function, once_differentiable
from tensor3d.ops.dropout import draw_of, dropped, mask_of, scale_of
from tensor3d.sharding.activation_layout import Face
from tensor3d.sharding.param_layout import local, vector

# --- Mean and variance of rows whose columns lie on several ranks, in steps between which something is sent -----------
#
# M' rows of this rank, H' columns of this rank, n members of the axis that splits the columns


def widened(x: Tensor) -> Tensor:
    """In at least fp32, in which statistics are computed."""
    return as_type(x, torch.promote_types(x.dtype, torch.float32))


def local_moments(x: Tensor) -> Tensor:
    """Of the own columns of x (M', H'), wide: (M', 3) mean, what rounding left of it, sum of squared deviations."""
    mean = x.mean(1, keepdim=True)
    centered = x - mean
    rest = centered.mean(1, keepdim=True)
    squares = centered.square_().sum(1, keepdim=True)
    return torch.cat([mean, rest, squares], 1)


def combined_moments(moments: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """All members' moments (n, M', 3), each of so many columns, to (M', 1) each: a center, the mean's offset from it,
    and the variance.

    Chan, Golub & LeVeque's combination of (count, mean, M2), but around the first member's mean and with the rounding
    error of each mean carried along: at a mean of 1000 in fp32 the plain form loses the digits that matter.
    """
    means, rests, squares = moments.unsqueeze(-1).unbind(2)
    center = means[0]
    offsets = (means - center) + rests
    offset = offsets.mean(0)
    second = (squares - columns * rests.square() + columns * (offsets - offset).square()).sum(0)
    return center, offset, second / (columns * moments.shape[0])


def normalised(x: Tensor, center: Tensor, offset: Tensor, rstd: Tensor) -> Tensor:
    """(M', H') with a mean of 0 and a variance of 1 over all members' columns."""
    return (x - center).sub_(offset).mul_(rstd)


# --- Sum, dropout and LayerNorm as one function -----------------------------------------------------------------------


def add_and_norm(
    addends: Sequence[Tensor],
    weight: nn.Parameter | None,
    bias: nn.Parameter | None,
    cube: Cube,
    face: Face,
    *,
    eps: float,
    dropout: float = 0.0,
    zero_centered: bool = False,
) -> Tensor:
    """LayerNorm of the sum of `addends`, (M', H') each, the last of them after dropout.

    Sends what `LayerNorm3D` does. Saved for backward: the sum (a single addend: itself), three numbers a row, and with
    dropout a byte an element.
    """
    draw = draw_of(addends[-1], dropout, cube.regions) if dropout else None
    return _AddAndNorm.apply(weight, bias, cube, face, eps, draw, dropout, zero_centered, *addends)


class _AddAndNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        cube: Cube,
        face: Face,
        eps: float,
        draw: Tensor | None,
        dropout: float,
        zero_centered: bool,
        *addends: Tensor,
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        axis, scale = cube.axis(face), None if draw is None else scale_of(dropout, addends[-1], cube.regions)
        gain, shift = gain_for(addends[0], weight, zero_centered), None if bias is None else local(bias)
        if axis.size == 1:
            total, kept, result, *rows = cube.regions(norm_alone, draw, scale, gain, shift, eps, *addends)
        else:
            total, kept, moments = cube.regions(add_and_measure, draw, scale, *addends)
            total = addends[0] if total is None else total
            gathered = gather_statistics(moments, axis)
            result, *rows = cube.regions(norm_by, total, gathered, gain, shift, eps)
        total = addends[0] if total is None else total
        ctx.save_for_backward(total, weight, draw if kept is None else kept, *rows)
        ctx.weight, ctx.bias, ctx.cube, ctx.face, ctx.dropout = weight, bias, cube, face, dropout
        ctx.zero_centered = zero_centered
        ctx.result_face, ctx.made = face, f"LayerNorm3D of {total.shape[1] * axis.size} columns"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, kept, *rows = ctx.saved_tensors
        cube, axis, over = ctx.cube, ctx.cube.axis(ctx.face), ctx.cube.over(*vector(ctx.face).sum_over)
        inputs = (dy, total, *rows, gain_for(total, weight, ctx.zero_centered))
        scale = None if kept is None else scale_of(ctx.dropout, dy, cube.regions)
        if axis.size == 1:
            dx, ddropped, dgain, dshift = cube.regions(norm_alone_backward, *inputs, kept, scale)
        else:
            sums, dgain, dshift = cube.regions(norm_sums, *inputs)
            summing = all_reduce(sums, axis)
        needs_weight, needs_bias = asked_for(ctx, ctx.weight, ctx.bias)
        if needs_weight:
            cube.ledger.accumulate_grad(ctx.weight, CommHandle(dgain), over)
        if needs_bias:
            cube.ledger.accumulate_grad(ctx.bias, CommHandle(dshift), over)
        if axis.size > 1:
            dx, ddropped = cube.regions(norm_input, *inputs, summing.wait(), axis.size, kept, scale)
        addends = len(ctx.needs_input_grad) - 8
        return (*[None] * 8, *[dx] * (addends - 1), dx if ddropped is None else ddropped)


# --- regions --------------------------------------------------------------------------------------------------------


def add_and_measure(
    draw: Tensor | None, scale: Tensor | None, *addends: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The sum of `addends`, of the last one what dropout leaves (`mask_of`), times `scale`; the mask; and the sum's
    `local_moments`, (M', 3).

    The sum of one addend without dropout is None, and so is a mask that was given: a region returns no input.
    """
    total, kept = _sum_of(draw, scale, *addends)
    return total, kept, local_moments(widened(addends[0] if total is None else total))


def _sum_of(draw: Tensor | None, scale: Tensor | None, *addends: Tensor) -> tuple[Tensor | None, Tensor | None]:
    total, last = addends[0], addends[-1]
    if draw is None and len(addends) == 1:
        return None, None
    kept = None if draw is None else mask_of(draw, last)
    if kept is not None:
        last = dropped(last, kept, scale)
    for each in addends[1:-1]:
        total = total + each
    return total + last if len(addends) > 1 else last, None if kept is draw else kept


def norm_by(
    x: Tensor, moments: Tensor, gain: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm by all members' moments (n, M', 3); with it a center, the mean's offset from it, and 1/deviation."""
    center, offset, variance = combined_moments(moments, x.shape[1])
    rstd = (variance + eps).rsqrt()
    result = normalised(widened(x), center, offset, rstd) * gain
    return (result if shift is None else result + shift).to(x.dtype), center.clone(), offset, rstd


def norm_alone(
    draw: Tensor | None, scale: Tensor | None, gain: Tensor, shift: Tensor | None, eps: float, *addends: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, Tensor]:
    """Both of the above, where one member has all columns: without moments put together for others, which would part
    the kernel in two."""
    total, kept = _sum_of(draw, scale, *addends)
    x = addends[0] if total is None else total
    wide = widened(x)
    center = wide.mean(1, keepdim=True)
    centered = wide - center
    offset = centered.mean(1, keepdim=True)
    deviation = centered - offset
    rstd = (deviation.square().mean(1, keepdim=True) + eps).rsqrt()
    result = deviation * rstd * gain
    result = (result if shift is None else result + shift).to(x.dtype)
    if x.dtype.itemsize < 4:
        # Its own steps are so wide that backward needs no more of the mean than fp32 holds; and Inductor makes one
        # kernel of `norm_alone_backward` where that reads no more than ten tensors.
        return total, kept, result, center + offset, None, rstd
    return total, kept, result, center, offset, rstd


def norm_sums(
    dy: Tensor, x: Tensor, center: Tensor, offset: Tensor, rstd: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the own columns the sums of g and of g * normal, (M', 2), with g = dy * gain; and the gradients of gain and
    shift."""
    wide, normal = dy.to(rstd.dtype), normalised(x.to(rstd.dtype), center, offset, rstd)
    g = wide * gain
    # Of sums over rows and columns of one product Inductor would write that product down first.
    sums = torch.stack([g.sum(1), (g * normal).sum(1)], 1)
    return sums.to(rstd.dtype), (wide * normal).sum(0), wide.sum(0)


def norm_input(
    dy: Tensor,
    x: Tensor,
    center: Tensor,
    offset: Tensor,
    rstd: Tensor,
    gain: Tensor,
    sums: Tensor,
    members: int,
    kept: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, by the sums over all members' columns, and what of it reaches the addend that was `kept`."""
    means = sums / (x.shape[1] * members)
    normal = normalised(x.to(rstd.dtype), center, offset, rstd)
    dx = ((dy.to(rstd.dtype) * gain - means[:, :1] - normal * means[:, 1:]) * rstd).to(dy.dtype)
    return dx, None if kept is None else dropped(dx, kept, scale)


def norm_alone_backward(
    dy: Tensor,
    x: Tensor,
    center: Tensor,
    offset: Tensor | None,
    rstd: Tensor,
    gain: Tensor,
    kept: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Both of the above, where one member has all columns: one kernel for the rows, another for sums over them."""
    wide, centered = dy.to(rstd.dtype), x.to(rstd.dtype) - center
    normal = (centered if offset is None else centered - offset) * rstd
    g = wide * gain
    means = g.mean(1, keepdim=True), (g * normal).mean(1, keepdim=True)
    dx = ((g - means[0] - normal * means[1]) * rstd).to(dy.dtype)
    return dx, None if kept is None else dropped(dx, kept, scale), (wide * normal).sum(0), wide.sum(0)


# --- RMSNorm ----------------------------------------------------------------------------------------------------------


def gain_of(weight: Tensor, zero_centered: bool) -> Tensor:
    """What a norm multiplies by: this rank's block of its weight, or 1 and that, in at least fp32: of 16 bits the sum
    would lose what a small weight says."""
    return widened(local(weight)) + 1 if zero_centered else local(weight)


def gain_for(x: Tensor, weight: Tensor | None, zero_centered: bool) -> Tensor:
    """The gain of x (M', H'), (H',): `gain_of`, and of a norm without a weight 1."""
    if weight is None:
        return torch.ones(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return gain_of(weight, zero_centered)


def rms_norm(
    x: Tensor, weight: nn.Parameter | None, cube: Cube, face: Face, *, eps: float, zero_centered: bool = False
) -> Tensor:
    """RMSNorm of (M', H'). Sends and saves what `RMSNorm3D` does."""
    return _RMSNormByRegions.apply(x, weight, cube, face, eps, zero_centered)


class _RMSNormByRegions(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter | None, cube: Cube, face: Face, eps: float, zero_centered: bool
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        axis, gain = cube.axis(face), gain_for(x, weight, zero_centered)
        if axis.size == 1:
            result, rrms = cube.regions(rms_alone, x, gain, eps)
        else:
            squares = all_reduce(cube.regions(row_squares, x), axis).wait()
            result, rrms = cube.regions(rms_by, x, squares, gain, eps, axis.size)
        ctx.save_for_backward(x, weight, rrms)
        ctx.weight, ctx.cube, ctx.face, ctx.zero_centered = weight, cube, face, zero_centered
        ctx.result_face, ctx.made = face, f"RMSNorm3D of {x.shape[1] * axis.size} columns"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rrms = ctx.saved_tensors
        cube, axis = ctx.cube, ctx.cube.axis(ctx.face)
        inputs = (dy, x, rrms, gain_for(x, weight, ctx.zero_centered))
        if axis.size == 1:
            dx, dgain = cube.regions(rms_alone_backward, *inputs)
        else:
            sums, dgain = cube.regions(rms_sums, *inputs)
            summing = all_reduce(sums, axis)
        if all(asked_for(ctx, ctx.weight)):
            cube.ledger.accumulate_grad(ctx.weight, CommHandle(dgain), cube.over(*vector(ctx.face).sum_over))
        if axis.size > 1:
            dx = cube.regions(rms_input, *inputs, summing.wait(), axis.size)
        return (dx, *[None] * 5)


def row_squares(x: Tensor) -> Tensor:
    """Over the own columns the sum of squares, (M', 1): a region, as all below."""
    return widened(x).square().sum(1, keepdim=True)


def rms_by(x: Tensor, squares: Tensor, gain: Tensor, eps: float, members: int) -> tuple[Tensor, Tensor]:
    """RMSNorm by all members' sums of squares, (M', 1); with it 1/sqrt(mean of squares)."""
    rrms = (squares / (x.shape[1] * members) + eps).rsqrt()
    return (widened(x) * rrms * gain).to(x.dtype), rrms


def rms_alone(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both of the above, where one member has all columns."""
    wide = widened(x)
    rrms = (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    return (wide * rrms * gain).to(x.dtype), rrms


def rms_sums(dy: Tensor, x: Tensor, rrms: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Over the own columns the sum of dy * gain * normal, (M', 1), and the gradient of gain."""
    wide, normal = dy.to(rrms.dtype), x.to(rrms.dtype) * rrms
    return (wide * gain * normal).sum(1, keepdim=True).to(rrms.dtype), (wide * normal).sum(0)


def rms_input(dy: Tensor, x: Tensor, rrms: Tensor, gain: Tensor, sums: Tensor, members: int) -> Tensor:
    """The gradient of x, by the sums over all members' columns."""
    mean = sums / (x.shape[1] * members)
    return ((dy.to(rrms.dtype) * gain - x.to(rrms.dtype) * rrms * mean) * rrms).to(dy.dtype)


def rms_alone_backward(dy: Tensor, x: Tensor, rrms: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Both of the above, where one member has all columns."""
    wide, normal = dy.to(rrms.dtype), x.to(rrms.dtype) * rrms
    g = wide * gain
    mean = (g * normal).mean(1, keepdim=True)
    return ((g - normal * mean) * rrms).to(dy.dtype), (wide * normal).sum(0)

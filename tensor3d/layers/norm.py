"""LayerNorm and RMSNorm whose columns stay split: one small collective a row in each direction.

M' rows of this rank, H columns of the cube, H' = H/face columns of this rank, n members of the face's axis
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle, all_reduce, gather_statistics
from tensor3d.distributed.cube import Cube
from tensor3d.layers.dropout import check_dropout
from tensor3d.layers.norm_kernels import (
    add_and_norm,
    combined_moments,
    gain_for,
    local_moments,
    normalised,
    rms_norm,
    widened,
)
from tensor3d.ops.as_type import as_type, without_autocast
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.dropout import drop
from tensor3d.ops.row_chunks import iter_row_chunks, together
from tensor3d.sharding.activation_layout import Face, check_divides, check_face, in_batch, lies
from tensor3d.sharding.layout_checks import check_matrix, check_origin
from tensor3d.sharding.param_layout import check_layout, constant, local, vector

_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


class LayerNorm3D(nn.Module):
    """LayerNorm over the columns of a face; rows and columns stay where they are.

    Elements received a row: 3(n-1) forward, the members' means and sums of squares; 2*2(n-1)/n backward. Saved for
    backward: the input and 3n+2 numbers a row (n = 1: three, or two).

    Args:
        hidden: H, divides by the face's axis.
        eps: added to the variance.
        bias: whether there is one beside the gain.
        zero_centered: the weight begins at 0, and 1 + weight is what multiplies (Nemotron's).
        elementwise_affine: False leaves weight and bias out, as in torch (OLMo's).

    Raises:
        ValueError: an unknown face, or an H that does not divide.
    """

    def __init__(
        self,
        hidden: int,
        cube: Cube,
        face: Face = "z",
        *,
        eps: float = 1e-12,
        bias: bool = True,
        zero_centered: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        check_face(face)
        check_divides("hidden", hidden, cube, face)
        self.hidden, self.cube, self.face, self.eps, self.zero_centered = hidden, cube, face, eps, zero_centered
        self.weight = _weight(hidden, cube, face, zero_centered) if elementwise_affine else None
        self.bias = constant((hidden,), vector(face), cube, 0.0) if bias and elementwise_affine else None

    @out_of_graphs
    def forward(self, x: Tensor, *others: Tensor, dropout: float = 0.0) -> Tensor:
        """(M', H') on the layer's face, to the same; a batch dim of 1 before them is kept.

        Args:
            others: added to x first, as a residual is.
            dropout: probability with which the last of `others` is dropped first, in training alone (`Dropout3D`).

        Raises:
            ValueError: other shapes, a dropout without `others`, or one that `Dropout3D` refuses.
        """
        if dropout:
            check_dropout(dropout, self.cube)
            if not others:
                raise ValueError(f"dropout is that of what is added to x. Got dropout={dropout} and nothing to add.")
        if x.dim() == 3:
            rest = [other.squeeze(0) for other in others]
            return in_batch(lambda rows: self.forward(rows, *rest, dropout=dropout), x, "LayerNorm3D")
        for each in (x, *others):
            _check_columns(each, self.hidden, self.cube, self.face, "LayerNorm3D")
        _check_values(self.face, self.cube, self.weight, self.bias)
        if others:
            _check_rows(x, *others)
        dropout = dropout if self.training else 0.0
        if self.cube.speed.compile:
            return add_and_norm(
                (x, *others),
                self.weight,
                self.bias,
                self.cube,
                self.face,
                eps=self.eps,
                dropout=dropout,
                zero_centered=self.zero_centered,
            )
        for each in others[:-1]:
            x = x + each
        last = [drop(each, dropout) if dropout else each for each in others[-1:]]
        if self.cube.axis(self.face).size == 1 and _suits_few_operators(x, *last):
            return _NarrowSumAndNorm.apply(
                self.weight, self.bias, self.cube, self.face, self.eps, self.zero_centered, x, *last
            )
        for each in last:
            x = x + each
        function = _LayerNorm if self.cube.axis(self.face).size > 1 else _LayerNormAlone
        return function.apply(x, self.weight, self.bias, self.cube, self.face, self.eps, self.zero_centered)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None or self.weight is None else ", bias=False"
        return f"{self.hidden}, {lies(self.hidden, self.face, self.cube)}, eps={self.eps}{bias}{_gain_repr(self)}"


class RMSNorm3D(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) over the columns of a face: x / sqrt(mean(x^2) + eps) * weight.

    Elements received a row: 2(n-1)/n in each direction. Other arguments and errors as in `LayerNorm3D`.

    Args:
        zero_centered: the weight begins at 0, and 1 + weight is what multiplies, so that weight decay pulls to 1
            (Gemma's; Megatron-LM calls it `layernorm_zero_centered_gamma`).
        elementwise_affine: False leaves the weight out.
    """

    def __init__(
        self,
        hidden: int,
        cube: Cube,
        face: Face = "z",
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        check_face(face)
        check_divides("hidden", hidden, cube, face)
        self.hidden, self.cube, self.face, self.eps, self.zero_centered = hidden, cube, face, eps, zero_centered
        self.weight = _weight(hidden, cube, face, zero_centered) if elementwise_affine else None

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(M', H') on the layer's face, to the same; a batch dim of 1 before them is kept."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "RMSNorm3D")
        _check_columns(x, self.hidden, self.cube, self.face, "RMSNorm3D")
        _check_values(self.face, self.cube, self.weight)
        if self.cube.speed.compile:
            return rms_norm(x, self.weight, self.cube, self.face, eps=self.eps, zero_centered=self.zero_centered)
        return _RMSNorm.apply(x, self.weight, self.cube, self.face, self.eps, self.zero_centered)

    def extra_repr(self) -> str:
        return f"{self.hidden}, {lies(self.hidden, self.face, self.cube)}, eps={self.eps}{_gain_repr(self)}"


def _weight(hidden: int, cube: Cube, face: Face, zero_centered: bool) -> nn.Parameter:
    return constant((hidden,), vector(face), cube, 0.0 if zero_centered else 1.0)


def _gain_repr(norm: LayerNorm3D | RMSNorm3D) -> str:
    if norm.weight is None:
        return ", elementwise_affine=False"
    return ", zero_centered=True" if norm.zero_centered else ""


def _check_columns(x: Tensor, hidden: int, cube: Cube, face: Face, layer: str) -> None:
    check_matrix(x, layer)
    columns = hidden // cube.axis(face).size
    if x.shape[1] != columns:
        raise ValueError(
            f"{layer} on face {face} needs the local shape (rows, {hidden}/{face}) = (rows, {columns}). Got "
            f"{tuple(x.shape)}."
        )
    check_origin(x, face, cube, f"{layer} of {hidden} columns")


def _check_values(face: Face, cube: Cube, *parameters: nn.Parameter | None) -> None:
    for parameter in parameters:
        if parameter is not None:
            check_layout(parameter, vector(face), cube)


def _check_rows(*addends: Tensor) -> None:
    rows = [each.shape[0] for each in addends]
    if len(set(rows)) > 1:
        raise ValueError(f"LayerNorm3D adds matrices of the same number of rows. Got {rows}.")


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        cube: Cube,
        face: Face,
        eps: float,
        zero_centered: bool,
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        wide = widened(x)
        moments = gather_statistics(local_moments(wide), cube.axis(face))
        center, offset, variance = combined_moments(moments, x.shape[1])
        rstd = (variance + eps).rsqrt()
        normal = normalised(wide, center, offset, rstd)
        ctx.save_for_backward(x, weight, center, offset, rstd)
        ctx.weight, ctx.bias, ctx.cube, ctx.face, ctx.zero_centered = weight, bias, cube, face, zero_centered
        ctx.result_face, ctx.made = face, f"LayerNorm3D of {x.shape[1] * cube.axis(face).size} columns"
        result = normal.mul_(gain_for(x, weight, zero_centered))
        return (result if bias is None else result.add_(local(bias))).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, center, offset, rstd = ctx.saved_tensors
        cube, axis = ctx.cube, ctx.cube.axis(ctx.face)
        wide_dy = dy.to(rstd.dtype)
        normal = normalised(x.to(rstd.dtype), center, offset, rstd)
        product = wide_dy * normal
        gain = gain_for(x, weight, ctx.zero_centered).to(rstd.dtype)
        # sum over columns of g and of g * normal, with g = dy * weight, as two matrix-vector products
        with without_autocast(x.device):  # which would multiply in half precision
            summing = all_reduce(torch.stack([wide_dy @ gain, product @ gain], -1), axis)
        over = cube.over(*vector(ctx.face).sum_over)
        needs_weight, needs_bias = asked_for(ctx, ctx.weight, ctx.bias)
        if needs_weight:
            cube.ledger.accumulate_grad(ctx.weight, CommHandle(product.sum(0)), over)
        if needs_bias:
            cube.ledger.accumulate_grad(ctx.bias, CommHandle(wide_dy.sum(0)), over)
        means = summing.wait() / (x.shape[1] * axis.size)
        dx = (wide_dy * gain).sub_(means[:, :1]).sub_(normal.mul_(means[:, 1:])).mul_(rstd)
        return (dx.to(dy.dtype), *[None] * 6)


class _LayerNormAlone(Function):
    """Where one member has all columns: torch's own kernels, a pass each way in place of ten.

    They take the deviation of a large mean from its rounding for a deviation of the elements (an error of 1e-4 at a
    mean of 1000 in fp32), so they are given each row less a center, its mean: what rounding has left of that is small.
    Given narrow types they would also add up the gradients of gain and shift in these: all is fp32 at least, on CPUs a
    few rows at a time.
    Saved for backward: the input, or, where that is not narrow, what it is less its center; and three numbers a row, or
    two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        cube: Cube,
        face: Face,
        eps: float,
        zero_centered: bool,
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        dtype = torch.promote_types(x.dtype, torch.float32)
        gain = as_type(gain_for(x, weight, zero_centered), dtype)
        shift = None if bias is None else as_type(local(bias), dtype)
        if _is_narrow(x):
            result, center, mean, rstd = _normalised_in_parts(x, gain, shift, eps)
        else:
            center = x.mean(1, keepdim=True, dtype=dtype)
            shifted = x - center
            result, mean, rstd = torch.native_layer_norm(shifted, (x.shape[1],), gain, shift, eps)
            if shifted.dtype == x.dtype:  # as large as x, for which nobody has to subtract again
                x, center = shifted, None
        ctx.save_for_backward(x, weight, center, mean, rstd)
        ctx.weight, ctx.bias, ctx.cube, ctx.face, ctx.zero_centered = weight, bias, cube, face, zero_centered
        ctx.result_face, ctx.made = face, f"LayerNorm3D of {x.shape[1] * cube.axis(face).size} columns"
        return as_type(result, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, center, mean, rstd = ctx.saved_tensors
        over = ctx.cube.over(*vector(ctx.face).sum_over)
        needs_weight, needs_bias = asked_for(ctx, ctx.weight, ctx.bias)
        gain = as_type(gain_for(x, weight, ctx.zero_centered), rstd.dtype)
        asked = [True, needs_weight, needs_bias]
        if _is_narrow(x):
            dx, dgain, dshift = _backward_in_parts(dy, x, center, mean, rstd, gain, asked)
        else:
            shifted = x if center is None else x - center
            wide_dy = as_type(dy, rstd.dtype)
            dx, dgain, dshift = _BACKWARD(wide_dy, shifted, [x.shape[1]], mean, rstd, gain, gain, asked)
        if needs_weight and dgain is not None:
            ctx.cube.ledger.accumulate_grad(ctx.weight, CommHandle(dgain), over)
        if needs_bias and dshift is not None:
            ctx.cube.ledger.accumulate_grad(ctx.bias, CommHandle(dshift), over)
        return (as_type(dx, dy.dtype), *[None] * 6)


class _NarrowSumAndNorm(Function):
    """LayerNorm of one addend or of the sum of two, in 16 bits, on a device, where one member has all columns and they
    are a power of two. Each operator takes the host as long as a few thousand rows take a device, so these are few.

    Statistics and gradients are those of fp32, as everywhere. Without a center: the steps of 16 bits are so wide, 2^-8
    or 2^-11 of a large mean, that what its rounding to fp32 adds, 2^-24 of it, is far below the result's own rounding.
    In rows that are all the same it would be all that is left, and eps magnifies it; but of a power of two the kernel
    puts means together by halves, which rounds nothing (`cuWelfordCombine` of PyTorch).
    A sum is rounded as ever, and written in fp32 at once: operators round to the type of their inputs, before what they
    write to. What is narrow and what is wide is copied into each other in one operator for two matrices.
    Saved for backward: the sum (a single addend: itself), and two numbers a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        cube: Cube,
        face: Face,
        eps: float,
        zero_centered: bool,
        *addends: Tensor,
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        total, dtype = addends[0], torch.float32
        gain = as_type(gain_for(total, weight, zero_centered), dtype)
        shift = None if bias is None else as_type(local(bias), dtype)
        wide = torch.add(*addends, out=torch.empty_like(total, dtype=dtype)) if len(addends) > 1 else total.to(dtype)
        normal, mean, rstd = torch.native_layer_norm(wide, (total.shape[1],), gain, shift, eps)
        if len(addends) > 1:
            result, total = torch.empty_like(total), torch.empty_like(total)
            torch._foreach_copy_([result, total], [normal, wide])
        else:
            result = normal.to(total.dtype)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.weight, ctx.bias, ctx.cube, ctx.face, ctx.zero_centered = weight, bias, cube, face, zero_centered
        ctx.result_face, ctx.made = face, f"LayerNorm3D of {total.shape[1] * cube.axis(face).size} columns"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        over = ctx.cube.over(*vector(ctx.face).sum_over)
        needs_weight, needs_bias = asked_for(ctx, ctx.weight, ctx.bias)
        gain = as_type(gain_for(total, weight, ctx.zero_centered), rstd.dtype)
        asked = [True, needs_weight, needs_bias]
        wide, wide_dy = torch.empty_like(total, dtype=rstd.dtype), torch.empty_like(total, dtype=rstd.dtype)
        torch._foreach_copy_([wide, wide_dy], [total, dy])
        dx, dgain, dshift = _BACKWARD(wide_dy, wide, [total.shape[1]], mean, rstd, gain, gain, asked)
        if needs_weight and dgain is not None:
            ctx.cube.ledger.accumulate_grad(ctx.weight, CommHandle(dgain), over)
        if needs_bias and dshift is not None:
            ctx.cube.ledger.accumulate_grad(ctx.bias, CommHandle(dshift), over)
        dx = as_type(dx, dy.dtype)
        return (*[None] * 6, *[dx] * (len(ctx.needs_input_grad) - 6))


def _suits_few_operators(*addends: Tensor) -> bool:
    first, columns = addends[0], addends[0].shape[1]
    if first.device.type == "cpu" or first.dtype.itemsize > 2 or columns & (columns - 1):
        return False
    return addends[-1].dtype == first.dtype


def _is_narrow(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype.itemsize < 4


def _normalised_in_parts(
    x: Tensor, gain: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and of each row a center, (M', 1), the mean's offset from it and 1/deviation."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    of_rows = [_normalised_part(*part, gain=gain, shift=shift, eps=eps) for part in iter_row_chunks(result, x)]
    center, mean, rstd = (torch.cat(each) for each in zip(*of_rows, strict=True))
    return result, center, mean, rstd


def _normalised_part(
    place: Tensor, x: Tensor, *, gain: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = widened(x)
    center = wide.mean(1, keepdim=True)
    result, mean, rstd = torch.native_layer_norm(wide.sub_(center), (x.shape[1],), gain, shift, eps)
    place.copy_(result)
    return center, mean, rstd


def _backward_in_parts(
    dy: Tensor, x: Tensor, center: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor, asked: list[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, gain and shift; the last two as `asked`."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = iter_row_chunks(dx, dy, x, center, mean, rstd)
    sums = [_backward_of_part(*part, gain=gain, asked=asked) for part in parts]
    dgain, dshift = (None if each[0] is None else together(each) for each in zip(*sums, strict=True))
    return dx, dgain, dshift


def _backward_of_part(
    place: Tensor,
    dy: Tensor,
    x: Tensor,
    center: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    gain: Tensor,
    asked: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    shifted = widened(x).sub_(center)
    dx, dgain, dshift = _BACKWARD(dy.to(rstd.dtype), shifted, [x.shape[1]], mean, rstd, gain, gain, asked)
    place.copy_(dx)
    return dgain, dshift


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter | None, cube: Cube, face: Face, eps: float, zero_centered: bool
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        axis = cube.axis(face)
        wide = widened(x)
        squares = all_reduce(wide.square().sum(1, keepdim=True), axis).wait()
        rrms = (squares / (x.shape[1] * axis.size) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rrms)
        ctx.weight, ctx.cube, ctx.face, ctx.zero_centered = weight, cube, face, zero_centered
        ctx.result_face, ctx.made = face, f"RMSNorm3D of {x.shape[1] * cube.axis(face).size} columns"
        return (wide * rrms).mul_(gain_for(x, weight, zero_centered)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rrms = ctx.saved_tensors
        cube, axis = ctx.cube, ctx.cube.axis(ctx.face)
        wide_dy, normal = dy.to(rrms.dtype), x.to(rrms.dtype) * rrms
        product, gain = wide_dy * normal, gain_for(x, weight, ctx.zero_centered).to(rrms.dtype)
        with without_autocast(x.device):
            summing = all_reduce((product @ gain).unsqueeze(1), axis)
        if all(asked_for(ctx, ctx.weight)):
            gradient = CommHandle(product.sum(0))
            cube.ledger.accumulate_grad(ctx.weight, gradient, cube.over(*vector(ctx.face).sum_over))
        mean = summing.wait() / (x.shape[1] * axis.size)
        dx = (wide_dy * gain).sub_(normal.mul_(mean)).mul_(rrms)
        return (dx.to(dy.dtype), *[None] * 5)

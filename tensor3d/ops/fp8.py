"""Products in FP8 (Micikevicius et al. 2022, arXiv 2209.05433), by a GPU's kernel, or emulated to the same numbers.

E4M3: 4 bits of exponent, 3 of mantissa, up to 448. E5M2: 5 and 2, up to 57,344. Sums are fp32. By current scaling
nothing is cut off: what is scaled lies within the type, and what is not finite makes its whole row, column or matrix
NaN. By delayed scaling what exceeds the type becomes its largest number, and what is not finite NaN.

A' (M, K), B' (K, N): what one rank multiplies
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.ops.as_type import as_type, without_autocast
from tensor3d.ops.compiled_regions import as_written
from tensor3d.ops.products import product
from tensor3d.torch_private import scaled_mm

Scaling = Literal["rowwise", "tensorwise", "delayed"]
"""Of what is multiplied. "rowwise": a scale for each row of A' and each column of B', each time from its largest
magnitude ("current" scaling). "tensorwise": the same, one for each matrix, as this rank holds it. "delayed": one for
each logical matrix, from its largest magnitudes in passes before (distributed/fp8_scales.py)."""
Current = Literal["rowwise", "tensorwise"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"rowwise": E4M3, "tensorwise": E5M2, "delayed": E5M2}
"""The type of dC': a scale for all of it needs the range, one for each row the digits. (torchao's recipes have the same
two.) A' and B' are E4M3."""
SIDE = 16
"""By which columns must divide for the kernel."""
_LARGEST = {E4M3: 8, E5M2: 15}
"""The exponent of the largest number, which is 1.75 times two to it, in both."""
_PAST_1_75 = 0x1FFFFF
"""Added to the bits of a number, it raises the exponent of what has more than 1.75 in front."""


def suits_fp8(rows: int, columns: int) -> bool:
    """Whether products with a weight of which this rank multiplies so many rows and columns can be in FP8: by the
    kernel, and so anywhere."""
    return rows % SIDE == 0 and columns % SIDE == 0


def quantise(x: Tensor, dim: int | None, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in FP8, rounded to nearest, ties to even, and the scale.

    Scales are powers of two, the least by which nothing exceeds the type: so x / scale is exact, the only error is the
    rounding to FP8, and an element's does not depend on what else is in its row but for the bound below which FP8
    numbers are subnormal.

    Args:
        x: (R, C), bf16 or fp32, not empty.
        dim: over which the largest magnitude is taken: 1 for a scale of each row, 0 of each column; None: one.
        kind: `E4M3` or `E5M2`.

    Returns:
        (R, C) of type `kind`, with the strides of x, and fp32 (R, 1), (1, C) or (). Where x is not finite, the scale is
        NaN, and all that it scales.
    """
    largest = x.abs().amax(() if dim is None else dim, keepdim=dim is not None).float()
    scale = torch.where(largest.isfinite(), scale_of(largest, kind), math.nan)
    return (x * as_type(scale.reciprocal(), x.dtype)).to(kind), scale


def scale_of(largest: Tensor, kind: torch.dtype) -> Tensor:
    """The least power of two, from 2^-126 to 2^120, by which numbers of at most these magnitudes, fp32, do not exceed
    `kind`; of any shape."""
    exponent = (largest.view(torch.int32) + _PAST_1_75 >> 23) - _LARGEST[kind]  # biased, as it stands in an fp32 number
    return (exponent.clamp_(min=1) << 23).view(torch.float32)  # 2^-126 also where all is 0


class Rounded(NamedTuple):
    """A matrix in FP8."""

    values: Tensor
    """(R, C)."""
    scale: Tensor
    """fp32 (R, 1), (1, C) or (); times the values it is what was rounded."""

    def t(self) -> Rounded:
        """Of one with a single scale."""
        return Rounded(self.values.t(), self.scale)


def rounded(
    x: Tensor, kind: torch.dtype, scale: Tensor | None, regions: Callable[..., Any] = as_written
) -> tuple[Rounded, Tensor]:
    """x in FP8 by a scale that is there already, in one pass over memory; and its largest magnitude.

    What exceeds the type by that scale becomes its largest number, as in Transformer Engine. What is not finite becomes
    NaN, and is inf as a magnitude.

    Args:
        x: (R, C), bf16 or fp32, transposed or not.
        scale: fp32 (), a power of two. None: current scaling, which takes a second pass; not finite elements, which
            make all of x NaN then, count as 0 in the magnitude.
        regions: as of `fp8_product`.
    """
    if not x.numel():
        return Rounded(x.to(kind), x.new_ones((), dtype=torch.float32)), x.new_zeros((), dtype=torch.float32)
    run, flat = regions if has_kernel(x.device) else as_written, x.is_contiguous()
    laid = x if flat else x.t()
    if scale is None:
        values, scale, largest = run(_round_now, laid, kind)
    else:
        values, largest = run(_round_by, laid, scale, kind)
    return Rounded(values if flat else values.t(), scale), largest


def _round_now(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    values, scale = quantise(x, None, kind)
    return values, scale, torch.where(x.isfinite(), x, 0.0).abs().amax().float()


def _round_by(x: Tensor, scale: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    most = torch.finfo(kind).max
    cut = (x * as_type(scale.reciprocal(), x.dtype)).clamp(-most, most)
    # Of rows first: in the kernel that rounds them, where a maximum of all would read x once more.
    largest = x.abs().amax(1).amax().float()  # which knows NaN; a maximum over ranks may not
    return torch.where(x.isfinite(), cut, math.nan).to(kind), torch.where(largest.isfinite(), largest, math.inf)


def fp8_product(
    a: Tensor,
    b: Tensor,
    scaling: Current,
    bias: Tensor | None = None,
    *,
    kind: torch.dtype = E4M3,
    fast: bool = False,
    regions: Callable[..., Any] = as_written,
) -> Tensor:
    """`a @ b + bias` of a and b rounded to FP8, inside of autograd functions, without a graph.

    With u = 2^-4 and h = 2^-10 for E4M3, 2^-3 and 2^-17 for E5M2, an element of a is off by e <= max(u |a|, h scale),
    and one of b by f alike; so |error| <= e |b| + |a| f + e f, beside fp32's of the sum and the rounding of the result.

    Args:
        scaling: "rowwise" or "tensorwise"; what is "delayed" comes as `Rounded`.
        a: (M, K), transposed or not, as `b` (K, N), of one type, bf16 or fp32. For the kernel N must divide by 16; K is
            filled up to that.
        bias: (N,), in that type; added before rounding.
        kind: of a; b is E4M3 always, for the kernel takes no two E5M2.
        fast: sums with fewer than fp32's bits where the GPU is faster so (H100); emulation has all.
        regions: a cube's, which may compile what quantises, to the same bits; it is asked where there is a kernel.

    Returns:
        (M, N) in the type of the inputs.
    """
    if not (a.numel() and b.numel()):
        return product(a, b, bias)
    rowwise = scaling == "rowwise"
    run = regions if has_kernel(a.device) else as_written
    of_a = Rounded(*_quantised(a, 1 if rowwise else None, kind, run))
    of_b = Rounded(*_quantised(b, 0 if rowwise else None, E4M3, run))
    return product_of_rounded(of_a, of_b, a.dtype, bias, fast=fast)


def product_of_rounded(
    a: Rounded, b: Rounded, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """`a @ b + bias` in `dtype`, (M, N); arguments as of `fp8_product`. b is E4M3."""
    device = a.values.device
    if not (a.values.numel() and b.values.numel()):
        return product(a.values.to(dtype), b.values.to(dtype), bias)
    if has_kernel(device):
        left, right = _aligned(a.values), _aligned(b.values.t()).t()
        return scaled_mm(left, right, a.scale, b.scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    wide = None if bias is None else bias.float()
    with without_autocast(device):
        return as_type(product(a.values.float() * a.scale, b.values.float() * b.scale, wide), dtype)


def _quantised(x: Tensor, dim: int | None, kind: torch.dtype, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """`quantise`, of a matrix as it lies in memory: what compiles would copy a transposed one."""
    if x.is_contiguous():
        found: tuple[Tensor, Tensor] = run(quantise, x, dim, kind)
        return found
    of_x, scale = run(quantise, x.t(), None if dim is None else 1 - dim, kind)
    return of_x.t(), scale.view(scale.shape[::-1])  # by `t` it would have strides that the kernel refuses


def _aligned(x: Tensor) -> Tensor:
    """(R, K) row by row, each filled up with zeros to a multiple of 16."""
    missing = -x.shape[1] % SIDE
    if not missing:  # a single row counts as contiguous with any strides, and cuBLAS reads them
        return x.contiguous() if x.shape[0] > 1 else x.reshape(-1).unsqueeze(0)
    return F.pad(x.contiguous().view(torch.uint8), (0, missing)).view(x.dtype)  # all bits 0 are 0


def has_kernel(device: torch.device) -> bool:
    """Whether this GPU multiplies FP8: NVIDIA's from compute capability 8.9 (Ada, Hopper) on."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available() and _is_new(device)


@cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)

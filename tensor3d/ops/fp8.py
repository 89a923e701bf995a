"""Products in FP8 (Micikevicius et al. 2022, arXiv 2209.05433), by a GPU's kernel, or emulated to the same numbers.

E4M3: 4 bits of exponent, 3 of mantissa, up to 448. E5M2: 5 and 2, up to 57,344. Sums are fp32. Here nothing is cut off:
what is scaled lies within the type, and what is not finite makes its whole row, column or matrix NaN.

A' (M, K), B' (K, N): what one rank multiplies
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.ops.as_type import as_type, without_autocast
from tensor3d.ops.products import product
from tensor3d.torch_private import scaled_mm

Scaling = Literal["rowwise", "tensorwise"]
"""Of what is multiplied, each time from its largest magnitude ("current", not "delayed", scaling). "rowwise": a scale
for each row of A' and each column of B'. "tensorwise": one for each matrix, as this rank holds it."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"rowwise": E4M3, "tensorwise": E5M2}
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
    exponent = (largest.view(torch.int32) + _PAST_1_75 >> 23) - _LARGEST[kind]  # biased, as it stands in an fp32 number
    scale = (exponent.clamp_(min=1) << 23).view(torch.float32)  # from 2^-126, also where all is 0, to 2^120
    scale = torch.where(largest.isfinite(), scale, math.nan)
    return (x * as_type(scale.reciprocal(), x.dtype)).to(kind), scale


def _as_written(region: Callable[..., Any], *inputs: Any) -> Any:
    return region(*inputs)


def fp8_product(
    a: Tensor,
    b: Tensor,
    scaling: Scaling,
    bias: Tensor | None = None,
    *,
    kind: torch.dtype = E4M3,
    fast: bool = False,
    regions: Callable[..., Any] = _as_written,
) -> Tensor:
    """`a @ b + bias` of a and b rounded to FP8, inside of autograd functions, without a graph.

    With u = 2^-4 and h = 2^-10 for E4M3, 2^-3 and 2^-17 for E5M2, an element of a is off by e <= max(u |a|, h scale),
    and one of b by f alike; so |error| <= e |b| + |a| f + e f, beside fp32's of the sum and the rounding of the result.

    Args:
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
    kernel, rowwise = has_kernel(a.device), scaling == "rowwise"
    run = regions if kernel else _as_written
    of_a, scale_a = _quantised(a, 1 if rowwise else None, kind, run)
    of_b, scale_b = _quantised(b, 0 if rowwise else None, E4M3, run)
    if kernel:
        left, right = _aligned(of_a), _aligned(of_b.t()).t()
        return scaled_mm(left, right, scale_a, scale_b, bias=bias, out_dtype=a.dtype, use_fast_accum=fast)
    wide = None if bias is None else bias.float()
    with without_autocast(a.device):
        return as_type(product(of_a.float() * scale_a, of_b.float() * scale_b, wide), a.dtype)


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
    if not missing:
        return x.contiguous()
    return F.pad(x.contiguous().view(torch.uint8), (0, missing)).view(x.dtype)  # all bits 0 are 0


def has_kernel(device: torch.device) -> bool:
    """Whether this GPU multiplies FP8: NVIDIA's from compute capability 8.9 (Ada, Hopper) on."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available() and _is_new(device)


@cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)

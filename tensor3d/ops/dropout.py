"""Dropout of tensors: which elements stay, and what becomes of them.

Each element is kept by 16 random bits of its own, compared with a bound, and the draw is kept as a byte. On CPUs that
takes a fraction of what torch's draw of one truth value each does, which is most of the time that dropout takes there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.ops.autograd_function import Function
from tensor3d.ops.compiled_regions import CompiledRegions

_VALUES = 2**16  # of the random bits of an element


def drop(x: Tensor, p: float) -> Tensor:
    """x after dropout with a probability of p, in [0, 1], of any shape. Saved for backward: a byte an element."""
    # A GPU draws and multiplies in one kernel.
    result: Tensor = _Drop.apply(x, p) if x.device.type == "cpu" else F.dropout(x, p)
    return result


class _Drop(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept = keep_mask(x, p)
        ctx.save_for_backward(kept)
        ctx.p, ctx.keeps_face = p, True
        return only(x, kept).mul_(gain_of(p))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return only(gradient, kept).mul_(gain_of(ctx.p)), None


def keep_mask(like: Tensor, p: float) -> Tensor:
    """1 where dropout leaves an element of a tensor of that shape, with a probability of 1 - p, else 0.

    To a multiple of 2^-16, by which `gain_of` goes, too; one of so many stays always, times 0 where p is 1. In uint8:
    truth values would keep compiled code from working on several elements at once.
    """
    elements = like.numel()
    bits = torch.empty(-(-elements // 4), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    return (bits.view(torch.int16)[:elements] >= _bound(p) - _VALUES // 2).view(torch.uint8).view(like.shape)


def gain_of(p: float) -> float:
    """What elements that stay are multiplied by: 1 over their share, such that the mean is that of all."""
    return 0.0 if p == 1 else _VALUES / (_VALUES - _bound(p))


def _bound(p: float) -> int:
    """Of so many of the values of its bits an element does not stay."""
    return min(round(p * _VALUES), _VALUES - 1)


def draw_of(like: Tensor, p: float, regions: CompiledRegions) -> Tensor:
    """What a region makes its mask of by `mask_of`: the mask, or a probability of no dims to draw one by, where drawing
    takes no pass of its own over memory."""
    return regions.number(_bound(p) / _VALUES, torch.float32) if regions.draws else keep_mask(like, p)


def mask_of(draw: Tensor, like: Tensor) -> Tensor:
    """`keep_mask` of the shape of `like`, as drawn before (`draw_of`), or now: part of a region."""
    if draw.dim():
        return draw
    return (torch.rand(like.shape, dtype=torch.float32, device=like.device) >= draw).to(torch.uint8)


def only(x: Tensor, kept: Tensor) -> Tensor:
    """x times `kept`: without a copy of `kept` beside it, which the product of both would make."""
    return kept.to(x.dtype).mul_(x)


def scale_of(p: float, like: Tensor, regions: CompiledRegions) -> Tensor:
    """`gain_of` for a region that scales what is like `like`: of a plain number each value would be compiled anew."""
    return regions.number(gain_of(p), torch.promote_types(like.dtype, torch.float32))


def dropped(x: Tensor, kept: Tensor, scale: Tensor | None) -> Tensor:
    """x after dropout that leaves what is `kept` (`keep_mask`), times `scale` (`scale_of`): part of a region."""
    assert scale is not None, "a mask comes with its scale"
    return (x.to(scale.dtype) * kept * scale).to(x.dtype)

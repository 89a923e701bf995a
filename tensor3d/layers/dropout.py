"""Dropout on the cube."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d.attention import check_probability
from tensor3d.cube import Cube


class Dropout3D(nn.Module):
    """Dropout of a hidden state. No element is stored twice, so every rank draws its own mask from its own stream.

    Raises:
        ValueError: p outside of [0, 1), or p > 0 on several ranks before `Cube.manual_seed`, which gives each a stream
            (torch's default seed is the same everywhere, and so would the masks be).
    """

    def __init__(self, p: float, cube: Cube) -> None:
        super().__init__()
        check_dropout(p, cube)
        self.p, self.cube = p, cube

    @property
    def active(self) -> bool:
        """Whether it drops anything now."""
        return self.training and self.p > 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) if self.p else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


def check_dropout(p: float, cube: Cube) -> None:
    """Raises ValueError for what is no probability, and where dropout would draw the same masks on all ranks."""
    check_probability(p)
    if p > 0.0 and cube.shape.ranks > 1 and not cube.seeded:
        raise ValueError(
            f"dropout of {p} on {cube.shape} needs random streams that differ by rank. Call cube.manual_seed(seed) "
            "before the model is made."
        )


def draw_kept(like: Tensor, p: float) -> Tensor:
    """1 where dropout leaves an element of a tensor of that shape, with a probability of 1 - p, to 2^-32; else 0.

    By 32 random bits an element, compared: on CPUs several times as fast as torch's draw of one truth value each. In
    uint8: truth values would keep compiled code from working on several elements at once.
    """
    elements = like.numel()
    bits = torch.empty(-(-elements // 2), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    dropped = min(round(p * 2**32), 2**32 - 1)
    return (bits.view(torch.int32)[:elements] >= dropped - 2**31).view(torch.uint8).view(like.shape)


def scale_of(p: float, like: Tensor) -> Tensor:
    """What elements that stay are multiplied by, 1/(1 - p), as a tensor beside `like`: of a number each value would be
    compiled anew."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.full((), 1 / (1 - p), dtype=wide, device=like.device)


def dropped(x: Tensor, kept: Tensor, scale: Tensor | None) -> Tensor:
    """x after dropout that leaves what is `kept` (`draw_kept`), times `scale` (`scale_of`): part of a region."""
    assert scale is not None, "a mask comes with its scale"
    return (x.to(scale.dtype) * kept * scale).to(x.dtype)

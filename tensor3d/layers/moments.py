"""Mean and variance of rows whose columns lie on several ranks, in steps between which something is sent.

M' rows of this rank, H' columns of this rank, n members of the axis that splits the columns
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """In at least fp32, in which statistics are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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

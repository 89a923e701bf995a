"""A few numbers a row from every member of an axis: so LayerNorm and cross-entropy combine rows with split columns."""

from __future__ import annotations

from torch import Tensor

from tensor3d.collectives import Axis, all_gather


def gather_statistics(statistics: Tensor, axis: Axis) -> Tensor:
    """(rows, s) numbers on each member -> (members, rows, s) on all of them, in one all-gather.

    Each member then combines them by itself, in the same order, so all get the same result to the last bit.
    """
    return all_gather(statistics, axis).wait().view(axis.size, *statistics.shape)

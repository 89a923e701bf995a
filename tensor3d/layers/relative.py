"""Tables by the distance of query and key, for attention: a bias of each head, and hidden states.

n rows of a table, H hidden size, h heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.attention.relative import BiasBuckets, Buckets, RelativeTerms
from tensor3d.distributed.collectives import all_gather, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.layers.embedding import LookupEmbedding3D
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.sharding.activation_layout import check_divides
from tensor3d.sharding.param_layout import block, local_param, normal, table


class RelativeBias3D(nn.Module):
    """A bias of each head by distance, for layers that share it (Raffel et al. 2020, arXiv 1910.10683, §2.1).

        weight   (n, h/y)

    Args:
        heads: h, divides by y.
        buckets: which row each distance has.

    Raises:
        ValueError: heads that do not divide by y.
    """

    def __init__(self, heads: int, cube: Cube, buckets: Buckets | None = None, *, std: float = 0.02) -> None:
        super().__init__()
        check_divides("heads", heads, cube, "y")
        self.cube, self.buckets = cube, BiasBuckets() if buckets is None else buckets
        self.weight = normal((self.buckets.rows, heads), table("y"), cube, std)

    @out_of_graphs
    def forward(self) -> RelativeTerms:
        """Of this rank's heads; sends nothing."""
        return RelativeTerms(buckets=self.buckets, bias=local_param(self.weight, table("y"), self.cube))

    def extra_repr(self) -> str:
        return f"{self.buckets}, {block(self.weight)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativeRows:
    """Hidden states by distance, of which each layer makes keys and queries with its own weights (He et al. 2021, arXiv
    2006.03654, §3.1)."""

    rows: Tensor
    """(n/xy, H/z) on face z; the same in every copy along data."""
    buckets: Buckets
    keys: bool = True
    """Whether queries meet them as keys (content to position)."""
    queries: bool = True
    """Whether keys meet them as queries (position to content)."""
    dropout: nn.Module | None = None
    """What each layer does with them first, for itself."""

    @property
    def dropped(self) -> Tensor:
        rows: Tensor = self.rows if self.dropout is None else self.dropout(self.rows)
        return rows


class RelativeEmbedding3D(LookupEmbedding3D):
    """The table of `RelativeRows`, a row for each bucket.

        weight   (n, H/z)

    Args:
        hidden: H, divides by z.

    Raises:
        ValueError: a hidden size or buckets that do not divide, named with the axis.
    """

    def __init__(self, buckets: Buckets, hidden: int, cube: Cube, *, std: float = 0.02) -> None:
        check_rows(buckets, cube.shape)
        super().__init__(buckets.rows, hidden, cube, std=std)
        self.buckets = buckets

    @out_of_graphs
    def all_rows(self) -> Tensor:
        """(n/xy, H/z) on face z: all rows in their order. Sends nothing."""
        x = self.cube.axis("x")
        rows = self.rows // x.size
        result: Tensor = self(torch.arange(x.index * rows, (x.index + 1) * rows, device=self.cube.device))
        return result


def check_rows(buckets: Buckets, shape: CubeShape) -> None:
    """Raises ValueError unless the rows of such a table divide on both faces."""
    for name, size in (("y", shape.y), ("z", shape.z)):
        if buckets.rows % (shape.x * size):
            raise ValueError(
                f"rows of a table by distance must divide by x * {name} = {shape.x * size}. Got {buckets.rows}. Choose "
                "another cube, or other buckets."
            )


@out_of_graphs
def gather_table(rows: Tensor, cube: Cube) -> Tensor:
    """(n/xz, N/y) on face y to (n, N/y): all rows, of this rank's columns. Differentiable: each rank uses them for
    itself, so gradients are summed.

    Elements received: `(xz-1)/xz * n * N/y` forward and backward.
    """
    return _Gathered.apply(rows, cube)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cube: Cube) -> Tensor:
        ctx.axis = cube.over("x", "z")
        ctx.result_face, ctx.made = None, "a gather of a table by distance"
        return all_gather(rows.contiguous(), ctx.axis).wait() if ctx.axis.size > 1 else rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (reduce_scatter(gradient.contiguous(), ctx.axis).wait() if ctx.axis.size > 1 else gradient), None

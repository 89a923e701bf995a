"""Dropout on the cube."""

from __future__ import annotations

from torch import Tensor, nn

from tensor3d.attention import check_probability
from tensor3d.distributed.cube import Cube
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.ops.dropout import drop
from tensor3d.sharding.layout_checks import check_floating_point


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

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        check_floating_point(x, "Dropout3D")
        return drop(x, self.p) if self.active else x

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

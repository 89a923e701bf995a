"""Some rows of a plane, for a layer that computes no others.

U slots of a plane, on each of z row slices of face y U/z
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tensor3d.queries import Queries


@dataclass(frozen=True, kw_only=True, eq=False)
class ChosenRows:
    """Which rows they are, on both faces. What is computed for them is a matrix of U rows on the cube."""

    rows: Tensor
    """int64 (U,): row of the plane, -1 where unused; slice after slice. The same on all members of the plane. U divides
    by y and z."""
    own: Queries
    """The U/z slots of this rank's slice of face y, by row of the slice."""

    def moved(self, function: Callable[[Tensor], Tensor], own: Queries) -> ChosenRows:
        """The same, each tensor of it elsewhere."""
        return ChosenRows(rows=function(self.rows), own=own)

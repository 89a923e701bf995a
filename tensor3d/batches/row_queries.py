"""The rows that ask, where attention is wanted for some rows only.

R slots for rows that ask
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RowIndex:
    """Row numbers of this rank's rows, in any order; a row may ask twice. -1: a slot that is not used.

    The host copy saves the attention a device-to-host synchronisation.
    """

    rows: Tensor
    """int64 (R,), on the device."""
    numbers: NDArray[np.int64]
    """The same on the host."""

    @classmethod
    def from_numbers(cls, numbers: Sequence[int] | NDArray[np.integer], device: torch.device | str = "cpu") -> RowIndex:
        """Raises ValueError for numbers that are not whole, not in one row, or below -1."""
        given = np.asarray(numbers)
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            raise ValueError(
                f"queries are whole numbers of rows in one dimension. Got {given.dtype} of shape {given.shape}."
            )
        host = given.astype(np.int64)
        if (host < -1).any():
            raise ValueError(f"a query is the number of a row, or -1 for an unused slot. Got {host.min()}.")
        return cls(rows=torch.tensor(host).to(device, non_blocking=True), numbers=host)

    def to(self, device: torch.device | str) -> RowIndex:
        return RowIndex(rows=self.rows.to(device, non_blocking=True), numbers=self.numbers)

    def pin_memory(self) -> RowIndex:
        """The same, in memory that a copy to a device can read beside the computation."""
        return RowIndex(rows=self.rows.pin_memory(), numbers=self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def most(self) -> int:
        """The highest number; -1 where there is none."""
        return int(self.numbers.max(initial=-1))


# --- Some rows of a plane, for a layer that computes no others --------------------------------------------------------
#
# U slots of a plane, on each of z row slices of face y U/z


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSelection:
    """Which rows they are, on both faces. What is computed for them is a matrix of U rows on the cube."""

    rows: Tensor
    """int64 (U,): row of the plane, -1 where unused; slice after slice. The same on all members of the plane. U divides
    by y and z."""
    own: RowIndex
    """The U/z slots of this rank's slice of face y, by row of the slice."""

    def moved(self, function: Callable[[Tensor], Tensor], own: RowIndex) -> RowSelection:
        """The same, each tensor of it elsewhere."""
        return RowSelection(rows=function(self.rows), own=own)

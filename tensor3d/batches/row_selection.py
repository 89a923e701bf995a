"""Some rows of a plane, where no others are wanted: of a layer's result, or by a model's heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSelection:
    """U slots of a plane for rows that ask, U/z on each of its z row slices of face y. -1: a slot that is not used.

    What is computed for them is a matrix of U rows on the cube; U divides by y and z.
    """

    rows: Tensor
    """int64 (U/z,): the slots of this rank's slice of face y, by row of the slice, in any order; one may ask twice."""
    numbers: NDArray[np.int64]
    """The same on the host, which saves the attention a device-to-host synchronisation."""
    plane_rows: Tensor
    """int64 (U,): the slots of all slices, slice after slice, by row of the plane. The same on all its members."""
    heads: tuple[Tensor, ...] = ()
    """int64 each: for a head that reads some of these rows alone, the slot of each of them, -1 where unused."""

    @classmethod
    def from_numbers(
        cls, numbers: Sequence[int] | NDArray[np.integer], device: torch.device | str = "cpu"
    ) -> RowSelection:
        """Of a plane with one row slice.

        Raises:
            ValueError: numbers that are not whole, not in one row, or below -1.
        """
        given = np.asarray(numbers)
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            raise ValueError(
                f"queries are whole numbers of rows in one dimension. Got {given.dtype} of shape {given.shape}."
            )
        host = given.astype(np.int64)
        if (host < -1).any():
            raise ValueError(f"a query is the number of a row, or -1 for an unused slot. Got {host.min()}.")
        rows = torch.tensor(host).to(device, non_blocking=True)
        return cls(rows=rows, numbers=host, plane_rows=rows)

    def to(self, device: torch.device | str) -> RowSelection:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> RowSelection:
        """The same, in memory that a copy to a device can read beside the computation."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> RowSelection:
        return RowSelection(
            rows=function(self.rows),
            numbers=self.numbers,
            plane_rows=function(self.plane_rows),
            heads=tuple(map(function, self.heads)),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def most(self) -> int:
        """The highest number; -1 where there is none."""
        return int(self.numbers.max(initial=-1))

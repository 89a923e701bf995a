"""The rows of a plane that a model's heads read: masked places and [CLS].

Of k packs on each of z row slices, every slice has the same number of slots for them, so that what is computed for
these rows alone lies on the cube as evenly as what is computed for all.

U slots of a plane, U/z of each slice; R masked and C [CLS] slots as of `PackedBatch`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.chosen import ChosenRows
from tensor3d.queries import Queries

UNUSED = -1
"""Where no row is meant."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadRows:
    """Which rows they are, and where heads find them among these."""

    chosen: ChosenRows
    masked: Tensor
    """int64 (R,): slot of each token to guess, -1 where unused."""
    first: Tensor
    """int64 (C,): slot of each sequence's [CLS], -1 where unused."""

    def moved(self, function: Callable[[Tensor], Tensor], own: Queries) -> ReadRows:
        """The same, each tensor of it elsewhere."""
        chosen = self.chosen.moved(function, own)
        return ReadRows(chosen=chosen, masked=function(self.masked), first=function(self.first))


def read_rows(
    masked: Sequence[NDArray[np.int64]],
    first: Sequence[NDArray[np.int64]],
    *,
    capacity: int,
    budget: int,
    slots: tuple[int, int],
    y: int,
    z: int,
    slice_index: int,
) -> ReadRows:
    """Of a plane's packs.

    Args:
        masked, first: of each pack, rows of the plane.
        capacity: rows of a pack.
        budget: of a pack, masked places and [CLS] together, at most.
        slots: R and C.
    """
    k = len(masked) // z
    own_slots = -(-k * budget // y) * y
    rows = np.full((z, own_slots), UNUSED, dtype=np.int64)
    places = [np.full(size, UNUSED, dtype=np.int64) for size in slots]
    filled = [0, 0]
    for i in range(z):
        here = 0
        for number in range(i * k, (i + 1) * k):
            for which, chosen in enumerate((masked[number], first[number])):
                rows[i, here : here + len(chosen)] = chosen
                begin, filled[which] = filled[which], filled[which] + len(chosen)
                places[which][begin : filled[which]] = i * own_slots + here + np.arange(len(chosen))
                here += len(chosen)
    mine = rows[slice_index]
    own = Queries.from_numbers(np.where(mine == UNUSED, UNUSED, mine - slice_index * k * capacity), "cpu")
    return ReadRows(
        chosen=ChosenRows(rows=torch.from_numpy(rows.reshape(-1)), own=own),
        masked=torch.from_numpy(places[0]),
        first=torch.from_numpy(places[1]),
    )

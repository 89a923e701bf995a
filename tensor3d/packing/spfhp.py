"""Shortest-pack-first histogram packing: worst fit, in one pass over the lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.limits import Limits
from tensor3d.packing.plan import Plan
from tensor3d.packing.shelf import Shelf


def spfhp(
    histogram: NDArray[np.integer] | Sequence[int],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """Packs sequences longest first, each into the pack with the most room (Krell et al., 2021, arXiv 2107.02027, 3.1).

    What fits nowhere begins a pack of its own, also where equal sequences could share one. As quick as `lpfhp`, and
    behind it in efficiency: it serves to compare. The result is a function of the arguments
    alone.

    Args:
        histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.
        capacity: token slots of a pack.
        max_sequences: sequences of a pack, at most. None: no limit.
        budget: a second limit: the sum of the costs over a pack, at most.
        costs: whole numbers (capacity + 1 or more,): cost of a sequence by length.

    Raises:
        ValueError: see `Limits` and `Limits.counts`.
    """
    limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
    shelf = Shelf(limits)
    for length, count in limits.counts(histogram).items():
        shelf.worst_fit(length, count)
    return Plan.of(limits, shelf.packs())

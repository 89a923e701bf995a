"""Longest-pack-first histogram packing: best fit, in one pass over the lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.limits import Limits
from tensor3d.packing.plan import Plan
from tensor3d.packing.shelf import best_fit


def lpfhp(
    histogram: NDArray[np.integer] | Sequence[int],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """Packs sequences by best fit, longest first (Krell et al., 2021, arXiv 2107.02027, section 3.2).

    Packs filled alike are moved as one group, so that the time depends on the lengths that occur and not on how many
    sequences there are: milliseconds for 16 million. The result is a function of the arguments alone.

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
    return Plan.of(limits, best_fit(limits.counts(histogram), limits))

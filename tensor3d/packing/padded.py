"""No packing: the baseline that every other planner is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.limits import Limits
from tensor3d.packing.plan import Plan


def padded(
    histogram: NDArray[np.integer] | Sequence[int],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """One sequence a pack, whatever else the limits allow; the rest of the pack stays empty.

    Args:
        histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.
        capacity: token slots of a pack.
        max_sequences: as for other planners; the plan's lower bound is that of these limits.
        budget: likewise.
        costs: likewise.

    Raises:
        ValueError: see `Limits` and `Limits.counts`.
    """
    limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
    return Plan.of(limits, {(length,): count for length, count in limits.counts(histogram).items()})

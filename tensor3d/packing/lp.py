"""The best planner: the linear programme over all ways to fill a pack, rounded to whole packs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.bounds import lp_bound
from tensor3d.packing.columns import MAX_SIZE, size_of, solve
from tensor3d.packing.extra import require_scipy
from tensor3d.packing.limits import Limits
from tensor3d.packing.plan import Plan
from tensor3d.packing.rounding import round_up
from tensor3d.packing.shelf import best_fit

_ROUNDINGS = (1e-6, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
"""What is added to every amount before it is rounded down; the first forgives the solver its tolerance."""


def lp(
    histogram: NDArray[np.integer] | Sequence[int],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """Packs sequences in nearly as few packs as can be: tens above a proven bound, for millions of sequences.

    The linear programme of packing (see `tensor3d.packing.columns`) is solved, and its amounts are rounded to whole
    packs; what finds no slot then is packed by best fit, also into the room that is left. Several roundings are tried,
    and `lpfhp`: the plan with the fewest packs is returned, with the programme's bound. The result is a function of
    the arguments and of the versions of scipy and numpy; where several machines need one plan, plan once and store it.

    Args:
        histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.
        capacity: token slots of a pack.
        max_sequences: sequences of a pack, at most. None: no limit.
        budget: a second limit: the sum of the costs over a pack, at most.
        costs: whole numbers (capacity + 1 or more,): cost of a sequence by length.

    Raises:
        ValueError: see `Limits` and `Limits.counts`; scipy is not installed; or the programme is too large.
    """
    limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
    counts = limits.counts(histogram)
    if (size := size_of(counts, limits)) > MAX_SIZE:
        raise ValueError(
            f"the linear programme of {len(counts)} lengths in {capacity} slots is too large: {size}, and may be "
            f"{MAX_SIZE}. Choose the planner lpfhp or the streaming packer, which fill such large packs well."
        )
    require_scipy("the planner lp")
    relaxation = solve(counts, limits)
    bound = lp_bound(counts, limits, relaxation)
    best = best_fit(counts, limits)
    for rounding in _ROUNDINGS:
        if sum(best.values()) > bound.packs:
            wanted = {column: math.floor(amount + rounding) for column, amount in relaxation.amounts.items()}
            best = min(best, round_up(wanted, counts, limits), key=lambda packs: sum(packs.values()))
    return Plan.of(limits, best, bound)

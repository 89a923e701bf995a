"""How many packs a set of sequences needs at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.columns import MAX_SIZE, Relaxation, size_of, solve
from tensor3d.packing.extra import has_scipy
from tensor3d.packing.limits import Limits


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """Packs that no plan can do without."""

    packs: int
    kind: Literal["lp", "tokens"]
    """lp: of the linear programme over all ways to fill a pack. tokens: what is needed, were sequences divisible."""


def token_bound(counts: dict[int, int], limits: Limits) -> LowerBound:
    """Packs that tokens, sequences or costs need, were sequences divisible."""
    tokens = sum(length * count for length, count in counts.items())
    needs = [-(-tokens // limits.capacity), -(-sum(counts.values()) // limits.max_sequences)]
    if limits.budget:
        cost = sum(limits.cost_of(length) * count for length, count in counts.items())
        needs.append(-(-cost // limits.budget))
    return LowerBound(packs=max(needs), kind="tokens")


def lp_bound(counts: dict[int, int], limits: Limits, relaxation: Relaxation) -> LowerBound:
    """The bound of a solution of the linear programme."""
    # The programme knows more than the token bound, but its generation may have ended early.
    return LowerBound(packs=max(relaxation.bound, token_bound(counts, limits).packs), kind="lp")


def lower_bound(histogram: NDArray[np.integer] | Sequence[int], limits: Limits) -> LowerBound:
    """The best bound there is: of the linear programme, or the token bound where that is too large or scipy is missing.

    Raises:
        ValueError: see `Limits.counts`.
    """
    counts = limits.counts(histogram)
    if size_of(counts, limits) > MAX_SIZE or not has_scipy():
        return token_bound(counts, limits)
    return lp_bound(counts, limits, solve(counts, limits))

"""All planners, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.lp import lp
from tensor3d.packing.lpfhp import lpfhp
from tensor3d.packing.nnlshp import nnlshp
from tensor3d.packing.padded import padded
from tensor3d.packing.plan import Plan
from tensor3d.packing.spfhp import spfhp


class Planner(Protocol):
    """Plans the packs of all sequences of a histogram. Deterministic: a function of its arguments alone."""

    def __call__(
        self,
        histogram: NDArray[np.integer] | Sequence[int],
        capacity: int,
        max_sequences: int | None = None,
        *,
        budget: int | None = None,
        costs: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> Plan: ...


PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "padded": padded,
        "spfhp": spfhp,
        "lpfhp": lpfhp,
        "nnlshp": nnlshp,
        "lp": lp,
    }
)
"""From the baseline to the best; what each does says its own docstring."""

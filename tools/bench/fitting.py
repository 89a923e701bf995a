"""A straight line through measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Line:
    """seconds = latency + bytes * seconds_per_byte"""

    latency: float
    seconds_per_byte: float
    error: float
    """Root of the mean square of the relative differences from what was measured."""


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the least squares of relative differences: a microsecond in ten weighs as much as a second in ten
    million. Neither latency nor time for a byte falls below 0.

    Args:
        sizes: bytes, at least one.
        seconds: above 0, of each.
    """
    # Slow to import, and needed here alone.
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    times = np.asarray(seconds, dtype=float)
    scale = max(*sizes, 1)  # so that both columns are of like size
    columns = np.stack([1 / times, np.asarray(sizes, dtype=float) / scale / times], axis=1)
    (latency, per_scale), distance = nnls(columns, np.ones(len(times)))
    return Line(
        latency=float(latency),
        seconds_per_byte=float(per_scale) / scale,
        error=float(distance) / math.sqrt(len(times)),
    )

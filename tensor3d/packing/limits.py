"""What a pack may hold, and the checks that every planner makes before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one pack.

    Raises:
        ValueError: a capacity, a number of sequences below 1, or a budget without cost or cost without budget.
    """

    capacity: int
    """Token slots."""
    max_sequences: int
    """Sequences, at most."""
    budget: int | None = None
    """Sum of the costs of the sequences, at most. None: no second limit."""
    cost: Callable[[int], int] | None = None
    """Cost of a sequence of a length, at least 0; for BERT the number of positions to mask."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1 token slot. Got {self.capacity}.")
        if self.max_sequences < 1:
            raise ValueError(
                f"max_sequences must be at least 1: a pack holds a whole sequence. Got {self.max_sequences}."
            )
        if (self.budget is None) != (self.cost is None):
            given, missing = ("cost", "budget") if self.budget is None else ("budget", "cost")
            raise ValueError(f"{given} is given without {missing}; give both or neither.")

    def cost_of(self, length: int) -> int:
        return 0 if self.cost is None else int(self.cost(length))

    def counts(self, histogram: NDArray[np.integer]) -> dict[int, int]:
        """Sequences of each length that occurs, longest first.

        Args:
            histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.

        Raises:
            ValueError: not a one-dimensional array of whole numbers, negative counts, no sequence at all, sequences of
                no token, of more tokens than the capacity, or dearer than the budget.
        """
        histogram = np.asarray(histogram)
        if histogram.ndim != 1 or not np.issubdtype(histogram.dtype, np.integer):
            raise ValueError(
                "a histogram is a one-dimensional array of whole numbers. "
                f"Got {histogram.dtype}, shape {histogram.shape}."
            )
        if (histogram < 0).any():
            length = int(np.flatnonzero(histogram < 0)[0])
            raise ValueError(f"histogram counts must be at least 0. Got {histogram[length]} of length {length}.")
        if not histogram.any():
            raise ValueError("the histogram counts no sequence at all; there is nothing to pack.")
        if histogram[0]:
            raise ValueError(f"every sequence needs at least 1 token. Got {histogram[0]} sequences of length 0.")
        lengths = np.flatnonzero(histogram)[::-1].tolist()
        if lengths[0] > self.capacity:
            raise ValueError(
                f"a sequence of {lengths[0]} tokens does not fit a capacity of {self.capacity}. "
                "Truncate the sequences or raise the capacity."
            )
        for length in lengths:
            self._check_cost(length)
        return {length: int(histogram[length]) for length in lengths}

    def _check_cost(self, length: int) -> None:
        cost = self.cost_of(length)
        if cost < 0:
            raise ValueError(f"a cost must be at least 0. Got {cost} for length {length}.")
        if self.budget is not None and cost > self.budget:
            raise ValueError(
                f"a sequence of {length} tokens costs {cost}, more than the budget of {self.budget} of a whole pack. "
                "Raise the budget or shorten the sequences."
            )

"""What a pack may hold, and the checks that every planner makes before it starts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

# --- SciPy is not needed to train, so it comes with an extra ----------------------------------------------------------


def has_scipy() -> bool:
    return find_spec("scipy") is not None


def require_scipy(purpose: str) -> None:
    """Raises ValueError where scipy is not installed."""
    if not has_scipy():
        raise ValueError(f"{purpose} needs scipy: pip install 'tensor3d[packing]', or choose the planner lpfhp.")


# --- What a pack may hold ---------------------------------------------------------------------------------------------

MAX_CAPACITY = 2**24
"""Token slots: planners keep a number for each."""
_MAX_TOKENS = 2**62


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one pack: plain data, so that a plan can be stored with them.

    Raises:
        ValueError: a capacity, a number of sequences below 1, a negative cost or budget, too few costs, or a budget
            without costs or costs without budget; numbers that are not whole.
    """

    capacity: int
    """Token slots."""
    max_sequences: int
    """Sequences, at most."""
    budget: int | None = None
    """Sum of the costs of the sequences, at most. None: no second limit."""
    costs: tuple[int, ...] | None = None
    """(capacity + 1 or more,): `costs[i]`, at least 0, is the cost of a sequence of `i` tokens; for BERT the number of
    positions to mask."""

    def __post_init__(self) -> None:
        if _whole("capacity", self.capacity) < 1:
            raise ValueError(f"capacity must be at least 1 token slot. Got {self.capacity}.")
        if self.capacity > MAX_CAPACITY:
            raise ValueError(f"capacity must be at most {MAX_CAPACITY} token slots. Got {self.capacity}.")
        if _whole("max_sequences", self.max_sequences) < 1:
            raise ValueError(
                f"max_sequences must be at least 1: a pack holds a whole sequence. Got {self.max_sequences}."
            )
        if (self.budget is None) != (self.costs is None):
            given, missing = ("costs", "budget") if self.budget is None else ("budget", "costs")
            raise ValueError(f"{given} is given without {missing}; give both or neither.")
        if self.budget is not None and _whole("budget", self.budget) < 0:
            raise ValueError(f"budget must be at least 0. Got {self.budget}.")
        if self.costs is not None:
            self._check_costs(self.costs)

    @classmethod
    def of(
        cls,
        capacity: int,
        max_sequences: int | None = None,
        *,
        budget: int | None = None,
        costs: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> Limits:
        """The limits as planners are given them.

        Args:
            capacity: token slots of a pack.
            max_sequences: sequences of a pack, at most. None: no limit but the capacity.
            budget: sum of the costs of a pack, at most.
            costs: whole numbers (capacity + 1 or more,), by length.

        Raises:
            ValueError: see the class.
        """
        capacity = _whole("capacity", capacity)
        return cls(
            capacity=capacity,
            max_sequences=max(1, capacity) if max_sequences is None else _whole("max_sequences", max_sequences),
            budget=None if budget is None else _whole("budget", budget),
            costs=None if costs is None else tuple(_whole("a cost", cost) for cost in costs[: max(capacity, 0) + 1]),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "max_sequences": self.max_sequences,
            "budget": self.budget,
            "costs": None if self.costs is None else list(self.costs),
        }

    def cost_of(self, length: int) -> int:
        """Cost of a sequence of `length` tokens; 0 without a budget."""
        return 0 if self.costs is None else self.costs[length]

    def counts(self, histogram: NDArray[np.integer] | Sequence[int]) -> dict[int, int]:
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
            self.check_affordable(length)
        counts = {length: int(histogram[length]) for length in lengths}
        tokens = sum(length * count for length, count in counts.items())
        if tokens > _MAX_TOKENS:
            raise ValueError(f"a histogram may count up to 2**62 tokens. Got {tokens}.")
        return counts

    def check_pack(self, lengths: Sequence[int]) -> None:
        """Checks what lies in one pack.

        Raises:
            ValueError: more sequences, tokens or cost than a pack may hold, or a length below 1.
        """
        if len(lengths) > self.max_sequences:
            raise ValueError(f"{len(lengths)} sequences in a pack that may hold {self.max_sequences}: {lengths}.")
        if lengths and min(lengths) < 1:
            raise ValueError(f"every sequence needs at least 1 token. Got {min(lengths)} in {lengths}.")
        if sum(lengths) > self.capacity:
            raise ValueError(f"{sum(lengths)} tokens in a pack of {self.capacity} slots: {lengths}.")
        cost = sum(map(self.cost_of, lengths))
        if self.budget is not None and cost > self.budget:
            raise ValueError(f"a cost of {cost} in a pack with a budget of {self.budget}: {lengths}.")

    def _check_costs(self, costs: Sequence[int]) -> None:
        if len(costs) <= self.capacity:
            raise ValueError(
                f"costs must name the cost of every length from 0 to the capacity of {self.capacity}, "
                f"{self.capacity + 1} numbers. Got {len(costs)}."
            )
        for length, cost in enumerate(costs):
            if _whole("a cost", cost) < 0:
                raise ValueError(f"a cost must be at least 0. Got {cost} for length {length}.")

    def check_affordable(self, length: int) -> None:
        """Raises ValueError for a length whose cost no pack can pay."""
        cost = self.cost_of(length)
        if self.budget is not None and cost > self.budget:
            raise ValueError(
                f"a sequence of {length} tokens costs {cost}, more than the budget of {self.budget} of a whole pack. "
                "Raise the budget or shorten the sequences."
            )


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number. Got {value!r}.") from None

"""What a planner returns: how many packs of which lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to fill a pack, and how many packs are filled that way."""

    lengths: tuple[int, ...]
    """Tokens of each sequence in the pack, longest first."""
    repeat: int
    """Packs filled this way, at least 1."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All packs of a set of sequences. It speaks of lengths only; `assign` chooses the sequences."""

    capacity: int
    """Token slots of a pack."""
    strategies: tuple[Strategy, ...]

    @cached_property
    def packs(self) -> int:
        return sum(strategy.repeat for strategy in self.strategies)

    @cached_property
    def sequences(self) -> int:
        return sum(strategy.repeat * len(strategy.lengths) for strategy in self.strategies)

    @cached_property
    def tokens(self) -> int:
        return sum(strategy.repeat * sum(strategy.lengths) for strategy in self.strategies)

    @property
    def efficiency(self) -> float:
        """Share of the token slots that hold a token, 0 to 1."""
        return self.tokens / (self.packs * self.capacity)

    @property
    def packing_factor(self) -> float:
        """Sequences per pack, on average."""
        return self.sequences / self.packs

    @property
    def lower_bound(self) -> int:
        """Packs that the tokens need at least, were sequences divisible."""
        return -(-self.tokens // self.capacity)

    def histogram(self) -> NDArray[np.int64]:
        """int64 (capacity + 1,): sequences of each length, as the planner was given them."""
        counts = np.zeros(self.capacity + 1, dtype=np.int64)
        for strategy in self.strategies:
            np.add.at(counts, list(strategy.lengths), strategy.repeat)
        return counts

"""What a planner returns: how many packs of which lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.bounds import LowerBound, lower_bound
from tensor3d.packing.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to fill a pack, and how many packs are filled that way."""

    lengths: tuple[int, ...]
    """Tokens of each sequence in the pack, longest first."""
    repeat: int
    """Packs filled this way, at least 1."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All packs of a set of sequences. It speaks of lengths only; `assign` chooses the sequences.

    Raises:
        ValueError: no strategy, one without sequence or repeat, one not in order, or one that breaks the limits.
    """

    limits: Limits
    """Of every pack."""
    strategies: tuple[Strategy, ...]
    known_bound: LowerBound | None = field(default=None, compare=False, repr=False)
    """The bound that a planner has found on its way; None: `lower_bound` is computed when it is asked for."""

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError("a plan needs at least one strategy. Got none.")
        for strategy in self.strategies:
            if strategy.repeat < 1:
                raise ValueError(f"a strategy is repeated at least once. Got {strategy}.")
            if not strategy.lengths or list(strategy.lengths) != sorted(strategy.lengths, reverse=True):
                raise ValueError(f"a strategy names the lengths of a pack, longest first. Got {strategy.lengths}.")
            self.limits.check_pack(strategy.lengths)

    @classmethod
    def of(cls, limits: Limits, repeats: Mapping[tuple[int, ...], int], known_bound: LowerBound | None = None) -> Plan:
        """A plan of `repeats[lengths]` packs each, strategies in descending order; those of no pack are left out."""
        strategies = (
            Strategy(lengths=lengths, repeat=repeats[lengths])
            for lengths in sorted(repeats, reverse=True)
            if repeats[lengths]
        )
        return cls(limits=limits, strategies=tuple(strategies), known_bound=known_bound)

    @property
    def capacity(self) -> int:
        """Token slots of a pack."""
        return self.limits.capacity

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

    @cached_property
    def lower_bound(self) -> LowerBound:
        """Packs that no plan of these sequences in these limits can do without; the first call may take seconds."""
        return self.known_bound or lower_bound(self.histogram(), self.limits)

    def histogram(self) -> NDArray[np.int64]:
        """int64 (capacity + 1,): sequences of each length, as the planner was given them."""
        counts = np.zeros(self.capacity + 1, dtype=np.int64)
        for strategy in self.strategies:
            np.add.at(counts, list(strategy.lengths), strategy.repeat)
        return counts

    def check(self, histogram: NDArray[np.integer] | Sequence[int]) -> None:
        """Checks that the plan holds exactly these sequences. That its packs keep the limits is certain.

        Args:
            histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.

        Raises:
            ValueError: it does not; or see `Limits.counts`.
        """
        counts = self.limits.counts(histogram)
        own = self.histogram()
        for length in range(1, self.capacity + 1):
            if own[length] != counts.get(length, 0):
                raise ValueError(
                    f"the plan holds {own[length]} sequences of length {length}. Got {counts.get(length, 0)}; "
                    "plan again with the histogram of these lengths."
                )

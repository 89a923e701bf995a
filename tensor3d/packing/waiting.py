"""The sequences that wait for a pack, by length, and what can be made of them.

Ages are told by sequence numbers, which count up: the smaller the number, the longer the wait. Of one length the oldest
sequence always goes first, so the stock is described by one number a length, its head, and a question about all
combinations of two lengths is one vector operation on the heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.limits import Limits

# Later than any sequence; twice this is still an int64.
_NOBODY = 2**61


class Waiting:
    """A stock of sequences.

    Args:
        limits: of one pack.
    """

    def __init__(self, limits: Limits) -> None:
        self._numbers: dict[int, deque[int]] = {}
        self._heads = np.full(limits.capacity + 1, _NOBODY, dtype=np.int64)
        self._costs = None if limits.costs is None else np.array(limits.costs, dtype=np.int64)
        self.sequences = 0
        self.tokens = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(number, length) of each, oldest first."""
        return iter(sorted((number, length) for length, queue in self._numbers.items() for number in queue))

    def push(self, length: int, number: int) -> None:
        """Adds a sequence, whose number is above that of all others of its length."""
        queue = self._numbers.get(length)
        if queue is None:
            queue = self._numbers[length] = deque()
            self._heads[length] = number
        queue.append(number)
        self.sequences += 1
        self.tokens += length

    def pop(self, length: int) -> int:
        """Takes the oldest sequence of a length that waits."""
        queue = self._numbers[length]
        number = queue.popleft()
        if queue:
            self._heads[length] = queue[0]
        else:
            del self._numbers[length]
            self._heads[length] = _NOBODY
        self.sequences -= 1
        self.tokens -= length
        return number

    def put_back(self, length: int, number: int) -> None:
        """Undoes a `pop`."""
        self._numbers.setdefault(length, deque()).appendleft(number)
        self._heads[length] = number
        self.sequences += 1
        self.tokens += length

    def oldest(self, low: int, high: int) -> int:
        """The length from `low` to `high` whose sequence has waited longest; 0 if none waits."""
        if low > high:
            return 0
        length = low + int(self._heads[low : high + 1].argmin())
        return length if self._heads[length] < _NOBODY else 0

    def longest(self, high: int) -> int:
        """The longest length up to `high` that waits; 0 if none does."""
        found = np.flatnonzero(self._heads[: high + 1] < _NOBODY)
        return int(found[-1]) if len(found) else 0

    def filling(self, total: int, slack: int, high: int, budget: int | None, slots: int, now: int) -> tuple[int, ...]:
        """One length of `total - slack` to `total`, or two that sum up to `total` exactly: what has waited longest.

        Of two sequences the waits count together. () if nothing of that kind waits.

        Args:
            total: tokens, at least 1.
            slack: tokens that one sequence may be too short.
            high: the longest length that may be taken.
            budget: cost of the lengths, at most.
            slots: how many lengths, at most.
            now: the number that the next sequence will have.
        """
        single = self.oldest(max(1, total - slack), min(total, high))
        low, half = max(1, total - high), total // 2
        if slots < 2 or low > half:
            return (single,) if single else ()
        # Number of the one plus number of the other, for the shorter one from `low` to `half`.
        numbers = self._heads[low : half + 1] + self._heads[total - half : total - low + 1][::-1]
        if 2 * half == total:
            numbers[-1] = self._first_two(half)
        if budget is not None:
            numbers[self._pair_costs(low, half, total) > budget] = _NOBODY
        best = int(numbers.argmin())
        if numbers[best] >= _NOBODY or (single and now - self._heads[single] >= 2 * now - numbers[best]):
            return (single,) if single else ()
        return (total - low - best, low + best)

    def closest(self, total: int, high: int, budget: int | None, slots: int) -> tuple[int, ...]:
        """One or two lengths with the largest sum up to `total`; of equal sums fewer lengths, then the longest one.

        () if not even one length up to `high` waits.
        """
        present = np.flatnonzero(self._heads[: min(high, total) + 1] < _NOBODY)
        if not len(present):
            return ()
        single = int(present[-1])
        if slots < 2:
            return (single,)
        # For each length, taken to be the longer one of two, the place of its largest partner.
        places = np.searchsorted(present, np.minimum(total - present, present), side="right") - 1
        lone = np.fromiter((len(self._numbers[length]) < 2 for length in present.tolist()), np.bool_, len(present))
        places[lone & (places == np.arange(len(present)))] -= 1
        partners = np.where(places >= 0, present[places], 0)
        if budget is not None and self._costs is not None:
            partners[self._costs[present] + self._costs[partners] > budget] = 0
        sums = np.where(partners > 0, present + partners, 0)
        best = len(sums) - 1 - int(sums[::-1].argmax())
        if sums[best] <= single:
            return (single,)
        return (int(present[best]), int(partners[best]))

    def _first_two(self, length: int) -> int:
        queue = self._numbers.get(length)
        return queue[0] + queue[1] if queue is not None and len(queue) > 1 else _NOBODY

    def _pair_costs(self, low: int, half: int, total: int) -> NDArray[np.int64]:
        assert self._costs is not None, "a budget comes with costs"
        costs: NDArray[np.int64] = self._costs[low : half + 1] + self._costs[total - half : total - low + 1][::-1]
        return costs

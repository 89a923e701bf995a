"""Packing sequences as they come: for corpora that never end, and for capacities at which no plan can be made.

A pack is begun with the sequence that has waited longest, and completed so that it is full to the last slot. Of the
ways to do that, the one is taken whose sequences have waited longest together. That rule is MaxWeight of queueing
theory (Tassiulas and Ephremides, 1992; for packing: Maguluri, Srikant and Ying, 2012) with waiting times as weights: a
length that others leave over grows old, is preferred for it, and so no length piles up.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.files import what_is_wrong
from tensor3d.packing.limits import Limits

# --- The sequences that wait for a pack, by length, and what can be made of them --------------------------------------
#
# Ages are told by sequence numbers, which count up: the smaller the number, the longer the wait. Of one length the
# oldest sequence always goes first, so the stock is described by one number a length, its head, and a question about
# all combinations of two lengths is one vector operation on the heads.

# Later than any sequence; twice this is still an int64.
_NOBODY = 2**61


class PendingQueue:
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


# --- Packing sequences as they come -----------------------------------------------------------------------------------

WINDOW = 4096
"""Sequences that wait, by default."""
_TAKEN_BLINDLY = 3
"""While this many sequences of average length fit, a pack need not be completed yet."""
_SLACK = 512
"""One slot in this many may stay empty rather than two sequences be taken that have waited less than the one."""


class StreamPacker:
    """Packs an endless stream of sequences, keeping a bounded number of them waiting.

    Sequences are numbered from 0 in the order of their coming. A pack is finished whenever the window is full; a
    sequence that leaves room for no other one is a pack at once. What comes out is a function of the lengths and the
    arguments alone, and the same whether they come one by one or together.

    No sequence waits for ever: every pack that is not finished at once takes the sequence that has waited longest, so a
    sequence lies in one of the `window` such packs after it has come.

    Args:
        capacity: token slots of a pack.
        max_sequences: sequences of a pack, at most. None: no limit but the capacity.
        budget: a second limit: the sum of `costs[length]` over a pack, at most. Costs are expected not to fall with the
            length; where they do, packs keep the budget but are less full.
        costs: whole numbers (capacity + 1 or more,).
        window: sequences that wait, at most.

    Raises:
        ValueError: a window that is no whole number or below 1, or see `Limits`.
    """

    def __init__(
        self,
        capacity: int,
        max_sequences: int | None = None,
        *,
        budget: int | None = None,
        costs: Sequence[int] | NDArray[np.integer] | None = None,
        window: int = WINDOW,
    ) -> None:
        self._limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be a whole number of sequences, at least 1. Got {window!r}.")
        self._window = window
        # Dearest cost up to each length: a bisection finds the longest length that a rest of the budget pays.
        self._dearest = [] if self._limits.costs is None else list(accumulate(self._limits.costs, max))
        self._waiting = PendingQueue(self._limits)
        self._next = 0
        self._longest = 0

    @property
    def waiting(self) -> int:
        """Sequences that have come and are in no pack yet."""
        return self._waiting.sequences

    def add(self, length: int) -> list[int] | None:
        """Takes the next sequence.

        Args:
            length: its tokens.

        Returns:
            Numbers of the sequences of the pack that this one has finished, if it has.

        Raises:
            ValueError: a length that is no whole number from 1 to the capacity, or that costs more than the budget. It
                is not counted then.
        """
        return self._add(self._checked(length))

    def feed(self, lengths: Iterable[int] | NDArray[np.integer]) -> list[list[int]]:
        """Takes several sequences; returns the packs that they have finished.

        Raises:
            ValueError: see `add`; none of the sequences is taken then.
        """
        checked = [
            self._checked(length) for length in (lengths.tolist() if isinstance(lengths, np.ndarray) else lengths)
        ]
        return [pack for pack in map(self._add, checked) if pack is not None]

    def flush(self) -> list[list[int]]:
        """Packs of all that wait. More sequences may come afterwards."""
        packs = []
        while self._waiting.sequences:
            # Nothing will come that the long ones could wait for, so the short ones are kept to fill up with.
            packs.append(self._complete(self._waiting.longest(self._limits.capacity)))
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Everything that what comes next depends on, as plain numbers and lists: JSON and pickle can hold it."""
        return {
            **self._settings(),
            "next": self._next,
            "waiting": [list(each) for each in self._waiting],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another packer with the same arguments was when it gave its `state_dict`.

        Raises:
            ValueError: the other one had other arguments, or this is no such state.
        """
        for name, value in self._settings().items():
            if name not in state or state[name] != value:
                raise ValueError(
                    f"the state is of a packer with another {name}: {state.get(name)!r} where this one has {value!r}. "
                    "Make the packer with the same arguments, or begin without the state."
                )
        self._waiting, self._next = self._stock_of(state)
        self._longest = max((length for _, length in self._waiting), default=0)

    def _settings(self) -> dict[str, Any]:
        return {**self._limits.to_json(), "window": self._window}

    def _stock_of(self, state: Mapping[str, Any]) -> tuple[PendingQueue, int]:
        stock, last = PendingQueue(self._limits), -1
        try:
            following = operator.index(state["next"])
            for number, length in state["waiting"]:
                if not last < number < following:
                    raise ValueError(f"sequence {number} is out of order or out of range")
                stock.push(self._checked(length), number)
                last = number
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(
                f"this is no state of a packer ({what_is_wrong(problem)}). Give what state_dict() returned."
            ) from None
        if stock.sequences >= self._window:
            raise ValueError(
                f"{stock.sequences} sequences wait in a state of a window of {self._window}; it is damaged."
            )
        return stock, following

    def _checked(self, length: int) -> int:
        limits = self._limits
        try:
            length = operator.index(length)
        except TypeError:
            raise ValueError(f"a length must be a whole number. Got {length!r}.") from None
        if not 1 <= length <= limits.capacity:
            raise ValueError(
                f"a length must lie between 1 and the capacity of {limits.capacity}. Got {length}. "
                "Truncate the sequences or raise the capacity."
            )
        limits.check_affordable(length)
        return length

    def _add(self, length: int) -> list[int] | None:
        number = self._next
        self._next += 1
        if length == self._limits.capacity or self._limits.max_sequences == 1:
            return [number]
        self._waiting.push(length, number)
        self._longest = max(self._longest, length)
        if self._waiting.sequences < self._window:
            return None
        return self._complete(self._waiting.oldest(1, self._limits.capacity))

    def _complete(self, length: int) -> list[int]:
        """A pack that begins with the oldest sequence of this length."""
        pack: list[int] = []
        free, slots, budget = self._limits.capacity, self._limits.max_sequences, self._limits.budget
        chosen: tuple[int, ...] = (length,)
        while chosen:
            for length in chosen:
                pack.append(self._waiting.pop(length))
                free -= length
                budget = None if budget is None else budget - self._limits.cost_of(length)
            slots -= len(chosen)
            chosen = self._choose(free, slots, budget)
        return pack

    def _choose(self, free: int, slots: int, budget: int | None) -> tuple[int, ...]:
        """What to put next into a pack with so much left; () if nothing fits."""
        stock, high = self._waiting, self._fitting(free, budget)
        if not (free and slots and high and stock.sequences):
            return ()
        # No two sequences are longer than that.
        if free <= 2 * self._longest and (chosen := self._filling(free, slots, budget)):
            return chosen
        mean = stock.tokens / stock.sequences
        # Where the number of sequences is the tighter limit, short ones would use it up.
        low = free // slots if free > slots * mean else 1
        following = stock.oldest(low, high) if slots > 2 else 0
        if not following:
            return stock.closest(free, high, budget, slots)
        if free >= _TAKEN_BLINDLY * mean:
            return (following,)
        return self._filling_with(following, free, slots, budget) or stock.closest(free, high, budget, slots)

    def _filling_with(self, length: int, free: int, slots: int, budget: int | None) -> tuple[int, ...]:
        """This length and one or two more that fill a pack; () if none do."""
        free, slots = free - length, slots - 1
        budget = None if budget is None else budget - self._limits.cost_of(length)
        if not free:
            return (length,)
        # Out of the stock for a moment, so that it is not taken twice.
        number = self._waiting.pop(length)
        rest = self._filling(free, slots, budget)
        self._waiting.put_back(length, number)
        return (length, *rest) if rest else ()

    def _filling(self, free: int, slots: int, budget: int | None) -> tuple[int, ...]:
        slack = self._limits.capacity // _SLACK
        return self._waiting.filling(free, slack, self._fitting(free, budget), budget, slots, self._next)

    def _fitting(self, free: int, budget: int | None) -> int:
        """The longest length for which there is room, 0 if there is none."""
        return free if budget is None else min(free, bisect_right(self._dearest, budget) - 1)


def pack_stream(
    lengths: Iterable[int],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
    window: int = WINDOW,
) -> Iterator[list[int]]:
    """Packs of a stream, each as the numbers of its sequences, counted from 0; every sequence once.

    Takes from `lengths` only what the next pack needs, so the stream may be endless. See `StreamPacker`.

    Raises:
        ValueError: see `StreamPacker` (at the call) and `StreamPacker.add` (where the length comes).
    """
    packer = StreamPacker(capacity, max_sequences, budget=budget, costs=costs, window=window)
    return _packs(packer, lengths)


def _packs(packer: StreamPacker, lengths: Iterable[int]) -> Iterator[list[int]]:
    for length in lengths:
        if (pack := packer.add(length)) is not None:
            yield pack
    yield from packer.flush()

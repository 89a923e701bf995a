"""From a plan, which knows lengths only, to the sequences of each pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.plan import PackingPlan

_PACKS_AT_ONCE = 2**20
"""Packs that are put in their random order together, to spare memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackAssignment:
    """Which sequences lie in which pack, as compressed rows."""

    offsets: NDArray[np.int64]
    """int64 (packs + 1,): pack `i` holds `sequences[offsets[i]:offsets[i + 1]]`."""
    sequences: NDArray[np.int64]
    """int64 (sequences,): every sequence once."""

    @classmethod
    def of(cls, packs: Sequence[Sequence[int]]) -> PackAssignment:
        """Packs that are listed one by one."""
        return cls(
            offsets=np.cumsum([0, *map(len, packs)], dtype=np.int64),
            sequences=np.fromiter(chain.from_iterable(packs), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """int64 (sequences of the pack,); IndexError outside 0 to packs - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        return self.sequences[self.offsets[index] : self.offsets[index + 1]]

    def totals(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64 (packs,): `values`, one number a sequence, summed over each pack."""
        # For a pack of no sequence reduceat would give the next one's first value.
        filled = np.flatnonzero(np.diff(self.offsets))
        sums = np.zeros(len(self), dtype=np.int64)
        sums[filled] = np.add.reduceat(values[self.sequences], self.offsets[filled], dtype=np.int64)
        return sums


def assign(plan: PackingPlan, lengths: NDArray[np.integer], rng: np.random.Generator) -> PackAssignment:
    """Puts real sequences into the packs of a plan, both in random order.

    Args:
        plan: made from the histogram of exactly these lengths.
        lengths: whole numbers (sequences,): tokens of each sequence.
        rng: the only source of chance.

    Raises:
        ValueError: the lengths are not those of the plan.
    """
    lengths = np.asarray(lengths)
    _check(plan, lengths)
    sizes = np.array([len(strategy.lengths) for strategy in plan.strategies])
    repeats = np.array([strategy.repeat for strategy in plan.strategies])
    planned = _in_plan_order(plan, _by_length(lengths, rng))

    # Where each pack begins in `planned`, and how many sequences it holds.
    held = np.repeat(sizes, repeats)
    begins = np.cumsum(held) - held
    shuffled = rng.permutation(len(held))
    held, begins = held[shuffled], begins[shuffled]
    del shuffled
    offsets = np.concatenate(([0], np.cumsum(held)))
    sequences = np.empty(len(lengths), dtype=np.int64)
    for first in range(0, len(held), _PACKS_AT_ONCE):
        part = slice(first, first + _PACKS_AT_ONCE)
        begin, end = offsets[first], offsets[min(part.stop, len(held))]
        sequences[begin:end] = planned[np.repeat(begins[part] - offsets[:-1][part], held[part]) + np.arange(begin, end)]
    return PackAssignment(offsets=offsets, sequences=sequences)


def _by_length(lengths: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.integer]:
    """(sequences,): sequences of the shortest length first, those of one length in random order."""
    # Numpy sorts 16-bit keys by radix, in linear time.
    key = np.dtype(np.uint16 if lengths.max() < 2**16 else np.int64)
    order = np.argsort(lengths.astype(key, copy=False), kind="stable")
    order = order.astype(np.int32 if len(order) < 2**31 else np.int64, copy=False)
    ends = np.cumsum(np.bincount(lengths))
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        rng.shuffle(order[begin:end])
    return order


def _in_plan_order(plan: PackingPlan, by_length: NDArray[np.integer]) -> NDArray[np.integer]:
    """(sequences,): those of the first pack of the first strategy, of the second, and so on."""
    counts = plan.histogram()
    next_of = (np.cumsum(counts) - counts).tolist()
    planned = np.empty_like(by_length)
    begin = 0
    for strategy in plan.strategies:
        size, repeat = len(strategy.lengths), strategy.repeat
        packs = planned[begin : begin + size * repeat].reshape(repeat, size)
        for slot, length in enumerate(strategy.lengths):
            packs[:, slot] = by_length[next_of[length] : next_of[length] + repeat]
            next_of[length] += repeat
        begin += size * repeat
    return planned


def _check(plan: PackingPlan, lengths: NDArray[np.integer]) -> None:
    if not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths must be whole numbers. Got {lengths.dtype}.")
    if lengths.ndim != 1 or len(lengths) != plan.sequences:
        raise ValueError(f"the plan holds {plan.sequences} sequences. Got lengths of shape {lengths.shape}.")
    if lengths.min() < 1 or lengths.max() > plan.capacity:
        outside = lengths.min() if lengths.min() < 1 else lengths.max()
        raise ValueError(f"lengths must lie between 1 and the plan's capacity of {plan.capacity}. Got {outside}.")
    counts = np.bincount(lengths, minlength=plan.capacity + 1)
    differs = np.flatnonzero(counts != plan.histogram())
    if len(differs):
        length = int(differs[0])
        raise ValueError(
            f"the plan holds {plan.histogram()[length]} sequences of length {length}. Got {counts[length]}; "
            "plan again with the histogram of these lengths."
        )

"""From a plan, which knows lengths only, to the sequences of each pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """Which sequences lie in which pack, as compressed rows."""

    offsets: NDArray[np.int64]
    """int64 (packs + 1,): pack `i` holds `sequences[offsets[i]:offsets[i + 1]]`."""
    sequences: NDArray[np.int64]
    """int64 (sequences,): every sequence once."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """int64 (sequences of the pack,); IndexError outside 0 to packs - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        return self.sequences[self.offsets[index] : self.offsets[index + 1]]

    def totals(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64 (packs,): `values`, one number a sequence, summed over each pack."""
        # No pack is empty, which is what reduceat asks for.
        return np.add.reduceat(values[self.sequences], self.offsets[:-1], dtype=np.int64)


def assign(plan: Plan, lengths: NDArray[np.integer], rng: np.random.Generator) -> Packs:
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
    # Numpy sorts 16-bit keys by radix, in linear time.
    key = np.dtype(np.uint16 if plan.capacity < 2**16 else np.int64)

    rows = np.array([len(strategy.lengths) for strategy in plan.strategies], dtype=np.int64)
    first = np.cumsum(rows) - rows
    slots = np.array([length for strategy in plan.strategies for length in strategy.lengths], dtype=key)

    chosen = np.repeat(np.arange(len(rows)), [strategy.repeat for strategy in plan.strategies])
    rng.shuffle(chosen)
    offsets = np.concatenate(([0], np.cumsum(rows[chosen])))
    wanted = slots[np.repeat(first[chosen] - offsets[:-1], rows[chosen]) + np.arange(offsets[-1])]

    # The n-th slot of a length gets the n-th sequence of that length in shuffled order.
    shuffled = rng.permutation(len(lengths))
    sequences = np.empty(len(lengths), dtype=np.int64)
    sequences[np.argsort(wanted, kind="stable")] = shuffled[np.argsort(lengths[shuffled].astype(key), kind="stable")]
    return Packs(offsets=offsets, sequences=sequences)


def _check(plan: Plan, lengths: NDArray[np.integer]) -> None:
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

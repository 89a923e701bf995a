"""Batches of sequences of like length, as LDDL has them: the baseline that packing is measured against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Every step draws its sequences, one a pack, from one bin of lengths, and all ranks from the same one; packs are
    as long as the bin's longest sequence may be. What is left of all bins at the end is mixed, shortest first.

    Raises:
        ValueError: a width or batch below 1.
    """

    width: int
    """Tokens: bin `i` has the lengths from `i * width + 1` to `(i + 1) * width`."""
    batch: int
    """Sequences of a step, over all ranks."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.batch < 1:
            raise ValueError(f"width and batch of bins must be at least 1. Got {self.width} and {self.batch}.")

    def edge(self, length: int) -> int:
        """The length to which the bin of `length` is padded."""
        return -(-length // self.width) * self.width

    def order(self, lengths: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.int64]:
        """int64 (sequences,): an order in which every `batch` consecutive sequences are of one bin, the left over ones
        of neighbouring bins; what is too few for a batch comes last.

        Args:
            lengths: whole numbers (sequences,), already in random order.
            rng: decides the order of the batches.
        """
        bin_of = (np.asarray(lengths) - 1) // self.width
        sequences = np.argsort(bin_of, kind="stable")
        counts = np.bincount(bin_of[sequences])
        place = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
        full = place < np.repeat(counts // self.batch * self.batch, counts)
        sequences = np.concatenate([sequences[full], sequences[~full]])
        whole = len(sequences) // self.batch * self.batch
        batches = rng.permutation(sequences[:whole].reshape(-1, self.batch))
        return np.concatenate([batches.reshape(-1), sequences[whole:]])

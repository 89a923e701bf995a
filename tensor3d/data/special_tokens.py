"""The ids that mean something to the model rather than to the reader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Size of the vocabulary and its special ids.

    Raises:
        ValueError: an id outside the vocabulary, two equal ids, or no id left for text.
    """

    vocab_size: int
    pad: int
    cls: int
    sep: int
    mask: int

    def __post_init__(self) -> None:
        ids = {"pad": self.pad, "cls": self.cls, "sep": self.sep, "mask": self.mask}
        for name, value in ids.items():
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} must be an id below the vocabulary's size of {self.vocab_size}. Got {value}.")
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"the special tokens need different ids. Got {ids}.")
        if self.vocab_size <= len(ids):
            raise ValueError(
                f"a vocabulary of {self.vocab_size} has no id left for text; it needs at least {len(ids) + 1}."
            )

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """int64 (vocab_size - 4,): every other id, ascending."""
        return np.setdiff1d(np.arange(self.vocab_size), [self.pad, self.cls, self.sep, self.mask])

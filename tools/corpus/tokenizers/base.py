"""What every tokenizer can do, and what its special tokens may be called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    # Its package brings torch, which the processes that only write ids have no use for.
    from tensor3d.data.special import SpecialTokens

SPECIAL_NAMES = MappingProxyType(
    {
        "pad": ("[PAD]", "<pad>"),
        "cls": ("[CLS]", "<s>", "<cls>"),
        "sep": ("[SEP]", "</s>", "<sep>"),
        "mask": ("[MASK]", "<mask>"),
    }
)
"""What the special tokens are called, the usual name first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatIds:
    """The ids of many texts, one text after another."""

    ids: NDArray[np.integer]
    """(n,): uint16 where the vocabulary allows, else int32."""
    lengths: NDArray[np.int64]
    """int64 (texts,): ids of each text."""


class Tokenizer(ABC):
    """Text to ids and back. Nothing in a text becomes a special token, not even "[MASK]" or "</s>"."""

    vocab_size: int
    fingerprint: str
    """Of the files and settings that decide the ids."""
    unknown: int | None
    """The id of what has no piece; None where everything has one."""
    special_ids: dict[str, int]
    """Ids by the names of `SPECIAL_NAMES`."""

    @cached_property
    def special(self) -> SpecialTokens:
        # Imported here: see above.
        from tensor3d.data.special import SpecialTokens

        return SpecialTokens(vocab_size=self.vocab_size, **self.special_ids)

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text and where the piece of each begins and ends in it, in characters."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text that has these ids; special tokens among them are shown by their names."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, as the vocabulary has it."""

    @property
    @abstractmethod
    def continuations(self) -> NDArray[np.bool_]:
        """bool (vocab_size,): True where a piece goes on a word; False for punctuation and special tokens.

        Raises:
            ValueError: the vocabulary does not tell.
        """

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """What `encode` gives, in arrays."""
        return flatten(self.encode(texts), self.vocab_size)


def flatten(encoded: Sequence[Sequence[int]], vocab_size: int) -> FlatIds:
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    ids = np.fromiter(chain.from_iterable(encoded), dtype=smallest(vocab_size), count=int(lengths.sum()))
    return FlatIds(ids=ids, lengths=lengths)


def smallest(vocab_size: int) -> np.dtype[np.integer]:
    """The type that indexed datasets keep ids below `vocab_size` in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


def find_special(id_of: Callable[[str], int | None], file: object) -> dict[str, int]:
    """The ids of the special tokens.

    Args:
        id_of: the id of a piece; None where the vocabulary does not have it.
        file: named in the error.

    Raises:
        ValueError: one is missing.
    """
    found: dict[str, int] = {}
    for role, names in SPECIAL_NAMES.items():
        numbers = (id_of(name) for name in names)
        number = next((number for number in numbers if number is not None), None)
        if number is None:
            raise ValueError(
                f"{file} has no token for {role!r}: {' or '.join(names)} is needed. Take another vocabulary, or train "
                "one: python -m tools.corpus tokenizer --docs DIR --output DIR."
            )
        found[role] = number
    return found

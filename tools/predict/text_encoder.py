"""From strings to the sequences that a model reads: [CLS] A [SEP], or [CLS] A [SEP] B [SEP], or as its tokenizer has
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from models.bert.config import BertConfig
from models.bert.text_batches import EncodedText
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import UnknownText

TooLong = Literal["truncate", "refuse"]
"""What becomes of a text with more tokens than the model has places: its end is left out and counted, or an error."""


def check_types(config: BertConfig, tokenizer: Tokenizer, name: str) -> None:
    """Raises ValueError for a tokenizer that lays out no pairs, and for a model whose table of types has no row for the
    second text of one.

    Args:
        name: of its folder, for the error.
    """
    check_pairs(tokenizer)
    if not config.has_type(tokenizer.layout.second_type):
        raise ValueError(
            f"the model in {name} has types below {config.types} (type_vocab_size), and the second text of a pair has "
            f"type {tokenizer.layout.second_type}. Give single texts, or take a model that was made for pairs."
        )


def check_pairs(tokenizer: Tokenizer) -> None:
    """Raises ValueError for a tokenizer that lays out no pairs."""
    if not tokenizer.layout.pairs:
        raise ValueError(
            "by the template of this tokenizer (post_processor of its tokenizer.json) pairs have another form than "
            "A [SEP] B [SEP] and A B [SEP]. Give single texts, or take a model that was made for pairs."
        )


class TextEncoder:
    """Makes the sequences of a model out of texts.

    Args:
        max_length: tokens of a sequence, at most, special ones included.
        too_long: of a pair, the longer of the two is cut, token by token, as Devlin et al. do. The tokenizer's layout
            says whether texts lose their ends or their beginnings.

    Raises:
        ValueError: a length with no room for a text. Of pairs also: the tokenizer lays out none.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, too_long: TooLong = "truncate") -> None:
        if max_length < 5:
            raise ValueError(f"max_length must be at least 5: three special tokens and two texts. Got {max_length}.")
        self.tokenizer, self.max_length, self.too_long = tokenizer, max_length, too_long
        self.truncated = 0
        """Texts of which a part was left out."""
        self.named = 0
        """Texts with the name of a special token in them."""
        self.unknown = UnknownText()
        """How much of the texts the tokenizer has no pieces for."""

    def texts(self, firsts: Sequence[str], seconds: Sequence[str] | None = None) -> list[EncodedText]:
        """Sequences of texts, or of pairs.

        Raises:
            ValueError: a text without a token, or one that is too long and to be refused; the message names its place,
                counted from 0.
        """
        pairs = zip(self._ids(firsts), self._ids(seconds) if seconds is not None else [None] * len(firsts), strict=True)
        return [self.sequence(first, second, number) for number, (first, second) in enumerate(pairs)]

    def sequence(self, first: list[int], second: list[int] | None = None, number: int = 0) -> EncodedText:
        """One sequence of ids that the tokenizer gave."""
        tokenizer = self.tokenizer
        first, second = self._fitted(first, second, number)
        ids, last, kind = [*tokenizer.before, *first], 0, 0
        if second is not None:
            check_pairs(tokenizer)
            ids += tokenizer.between
            last, kind = len(second), tokenizer.layout.second_type
        types = [0] * len(ids) + [kind] * (last + len(tokenizer.behind))
        ids += [*(second or ()), *tokenizer.behind]
        return EncodedText(ids=np.array(ids, dtype=np.int64), types=np.array(types, dtype=np.int64))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Their ids, without special tokens around them."""
        self.named += self.tokenizer.count_named(texts)
        encoded = self.tokenizer.encode(texts)
        self.unknown += self.tokenizer.count_unknown(texts, encoded)
        return encoded

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.encode(texts)
        empty = next((number for number, ids in enumerate(encoded) if not ids), None)
        if empty is not None:
            raise ValueError(f"text {empty} has no token: {texts[empty]!r}. Leave it out, or write something.")
        return encoded

    def _fitted(self, first: list[int], second: list[int] | None, number: int) -> tuple[list[int], list[int] | None]:
        room = self.max_length - self.tokenizer.special_tokens(pair=second is not None)
        if second is not None and room < 2:
            raise ValueError(
                f"max_length must be at least {self.max_length - room + 2} for pairs: the special tokens of this "
                f"tokenizer, and a token of each text. Got {self.max_length}."
            )
        total = len(first) + len(second or ())
        if total <= room:
            return first, second
        if self.too_long == "refuse":
            raise ValueError(
                f"text {number} has {total + self.max_length - room} tokens with the special ones, and the model has "
                f"places for {self.max_length}. Shorten it, or let its end be left out."
            )
        self.truncated += 1
        if second is None:
            return self._cut(first, room), None
        # What is over comes off the longer one. Where both give, an odd token is left to the longer one, and to the
        # second of two that are equal, as the tokenizers library has it.
        short = min(len(first), len(second), room // 2)
        long = room - short
        lengths = (long, short) if len(first) > len(second) else (short, long)
        return self._cut(first, lengths[0]), self._cut(second, lengths[1])

    def _cut(self, ids: list[int], most: int) -> list[int]:
        return ids[max(0, len(ids) - most) :] if self.tokenizer.layout.cut_left else ids[:most]

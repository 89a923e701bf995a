"""sentencepiece models (Kudo and Richardson, 2018, arXiv 1808.06226): unigram and BPE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.corpus.tokenizers.base import (
    BYTES,
    Tokenizer,
    find_special,
    fingerprint,
    missing,
    read,
    spell_special,
    untold_words,
    word_flags,
)

SPACE = "▁"
"""Begins the pieces that begin a word; in models with `treat_whitespace_as_suffix` it ends those that end one."""


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`.

    Args:
        threads: that encode; one where the steps have a process on each core.

    Raises:
        ValueError: the file is missing, no such model, or lacks a special token.
    """

    def __init__(self, file: Path, *, threads: int = 1) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise missing("sentencepiece", error) from error
        content = read(file)
        self._model, self._threads = SentencePieceProcessor(), threads
        try:
            # An empty one would be taken for "no model yet".
            is_loaded = bool(content) and self._model.LoadFromSerializedProto(content)
        except (OSError, RuntimeError) as error:
            raise _foreign(file) from error
        if not is_loaded:
            raise _foreign(file)
        self.vocab_size = int(self._model.vocab_size())
        self.unknown: int | None = int(self._model.unk_id())
        self.special_ids = find_special(self._id_of, file)
        self.spelled = spell_special(self._id_of, self.special_ids, self.unknown, file)
        self.fingerprint = fingerprint("sentencepiece", content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded: list[list[int]] = self._model.encode(list(texts), out_type=int, num_threads=self._threads)
        return list(map(self._as_text, encoded))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Raises ValueError where sentencepiece is older than 0.2.3 and does not tell them."""
        try:
            found = self._model.encode(text, return_type="offset_mapping")
        except TypeError as error:
            raise ValueError("offsets need sentencepiece 0.2.3 or later: pip install -U sentencepiece") from error
        offsets = [(int(start), int(end)) for start, end in found["offsets"]]
        return self._as_text_with_offsets(list(found["ids"]), offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Control symbols have no text of their own in sentencepiece; here their names stand between the others."""
        parts: list[str] = []
        run: list[int] = []
        for number in map(int, ids):
            if self._model.is_control(number):
                parts += [self._decode(run), self._model.id_to_piece(number)]
                run = []
            else:
                run.append(number)
        return " ".join(part for part in (*parts, self._decode(run)) if part)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._model.id_to_piece(int(number)) for number in ids]

    @cached_property
    def continuations(self) -> NDArray[np.uint8]:
        """The unknown piece goes on a word too: what is before it in the word has a piece of its own. In a model of
        words it is a word, and so is every other one."""
        special = {*self.special_ids.values(), self._model.bos_id(), self._model.eos_id()}
        texts = [
            None
            if number in special or self._model.is_control(number)
            else BYTES
            if self._model.is_byte(number)
            else "a"
            if number == self.unknown
            else piece.replace(SPACE, " ")
            for number, piece in enumerate(self.pieces(range(self.vocab_size)))
        ]
        pieces = [text for number, text in enumerate(texts) if text is not None and number != self.unknown]
        if pieces and all(text[0] == " " and text != " " for text in pieces):
            return np.zeros(self.vocab_size, dtype=np.uint8)
        own = [text for text in texts if text is not None and " " in text]
        if not own:
            raise untold_words(
                f"none of the {self.vocab_size} pieces of this sentencepiece model has its mark, {SPACE}"
            )
        # Training puts the mark on one side of all pieces; those that a user defined may have it on the other.
        behind = sum(text[-1] == " " for text in own) > sum(text[0] == " " for text in own)
        return word_flags(texts, behind=behind)

    def _unknown_words(self, texts: Sequence[str]) -> list[str]:
        """As they are in the model's own form of the text; no places are needed, which old versions do not tell."""
        both = (self._model.encode(list(texts), out_type=kind, num_threads=self._threads) for kind in (int, str))
        return [
            piece.replace(SPACE, "")
            for ids, pieces in zip(*both, strict=True)
            for number, piece in zip(ids, pieces, strict=True)
            if number == self.unknown
        ]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids) if ids else ""
        return text

    def _id_of(self, piece: str) -> int | None:
        number = int(self._model.piece_to_id(piece))
        return number if self._model.id_to_piece(number) == piece else None


def _foreign(file: Path) -> ValueError:
    return ValueError(f"{file} is no sentencepiece model, or a damaged one; take another, or train one.")

"""`tokenizer.json` files, as the tokenizers library writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus.tokenizers.base import Tokenizer, find_special, fingerprint, missing, read, spell_special

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, taken as it is, but that it neither cuts nor pads nor reads special tokens in a text.

    Raises:
        ValueError: the file is missing, no such tokenizer, or lacks a special token.
    """

    library: Library
    """The tokenizers library's own object."""

    def __init__(self, file: Path) -> None:
        content = read(file)
        self.library = _open(content, file)
        self._plan: dict[str, Any] = json.loads(content)
        # Ids may have gaps, and a model needs a row for each.
        self.vocab_size = 1 + max(self.library.get_vocab(with_added_tokens=True).values(), default=0)
        self.special_ids = find_special(self.library.token_to_id, file)
        self.unknown = self._find_unknown()
        self.spelled = spell_special(self.library.token_to_id, self.special_ids, self.unknown, file)
        self.fingerprint = fingerprint("json", content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._as_text(found.ids) for found in encoded]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self.library.encode(text, add_special_tokens=False)
        return self._as_text_with_offsets(found.ids, found.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode([int(number) for number in ids], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.library.id_to_token(int(number)) or "" for number in ids]

    @cached_property
    def continuations(self) -> NDArray[np.bool_]:
        pieces = self.pieces(range(self.vocab_size))
        special = {token["id"] for token in self._plan.get("added_tokens", ())} | set(self.special_ids.values())
        if self._plan["model"].get("type") == "WordPiece":
            prefix = self._plan["model"]["continuing_subword_prefix"]
            found = [piece.startswith(prefix) and piece != prefix for piece in pieces]
        else:
            mark = self._beginning()
            found = [not piece.startswith(mark) and any(map(str.isalnum, piece)) for piece in pieces]
        return np.array([goes_on and number not in special for number, goes_on in enumerate(found)], dtype=np.bool_)

    @property
    def unread(self) -> list[str]:
        """Special tokens that somebody added to the file, beside the usual ones: in a text they are text."""
        usual = {*self.special_ids.values(), self.unknown}
        added = self._plan.get("added_tokens", ())
        return [token["content"] for token in added if token.get("special") and token["id"] not in usual]

    def _beginning(self) -> str:
        """What begins the pieces that begin a word."""
        marks = {"ByteLevel": "Ġ", "Metaspace": "▁"}
        stage = self._plan.get("pre_tokenizer") or {}
        for part in stage.get("pretokenizers", [stage]):
            if part.get("type") in marks:
                return str(part.get("replacement", marks[part["type"]]))
        raise ValueError(
            "this tokenizer.json does not tell which of its pieces go on a word: its model is no WordPiece, and its "
            "pre-tokenizer neither ByteLevel nor Metaspace. Mask single tokens, or take another tokenizer."
        )

    def _find_unknown(self) -> int | None:
        model = self._plan["model"]
        if isinstance(model.get("unk_id"), int):  # unigram
            return int(model["unk_id"])
        return self.library.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def _open(content: bytes, file: Path) -> Library:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing("tokenizers", error) from error
    try:
        library = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no other kind
        raise ValueError(
            f"{file} is no tokenizer.json of the tokenizers library, or a damaged one: {error}. Take another."
        ) from error
    library.no_truncation()
    library.no_padding()
    # "[MASK]" in a text is four pieces, or as many as it may be.
    library.encode_special_tokens = True
    return library

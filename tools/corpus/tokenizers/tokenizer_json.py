"""`tokenizer.json` files, as the tokenizers library writes them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from tools.corpus.tokenizers.wordpiece import LONGEST_WORD, PREFIX, flags_of_prefix

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


LETTER, BYTES_AS_LETTERS = "\u0436", "\u00d0\u00b6"
"""A letter, and how it looks where each byte is a letter."""


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, taken as it is, but that it neither cuts nor pads nor reads special tokens in a text.

    Raises:
        ValueError: the file is missing, no such tokenizer, or lacks a special token.
    """

    library: Library
    """The tokenizers library's own object."""
    plan: dict[str, Any]
    """What the file says."""

    def __init__(self, file: Path) -> None:
        content, self._file = read(file), file
        self.library = _open(content, file)
        self.plan = json.loads(content)
        # Ids may have gaps, and a model needs a row for each.
        self.vocab_size = 1 + max(self.library.get_vocab(with_added_tokens=True).values(), default=0)
        added = [token["content"] for token in self.plan.get("added_tokens", ()) if token.get("special")]
        end, bare = self._end_alone(added), {step.get("type") for step in self._steps} <= {"ByteLevel"}
        self.special_ids = find_special(self.library.token_to_id, file, added=added, end=end, bare=bare)
        self.unknown = self._find_unknown()
        if self.is_wordpiece:
            self.longest_word = int(self.plan["model"].get("max_input_chars_per_word", LONGEST_WORD))
        self.spelled = spell_special(self.library.token_to_id, self.special_ids, self.unknown, file, added=added)
        self.fingerprint = fingerprint("json", content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        with self._naming():
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._as_text(found.ids) for found in encoded]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode_all_with_offsets([text])[0]

    def encode_all_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        with self._naming():
            found = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [self._as_text_with_offsets(each.ids, each.offsets) for each in found]

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """A file that could be opened may still lack what a text needs, such as the piece for what is unknown."""
        try:
            yield
        except Exception as error:
            if type(error) is not Exception:  # the library raises no other kind
                raise
            raise ValueError(f"{self._file} cannot cut a text: {error}. Take another.") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode([int(number) for number in ids], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.library.id_to_token(int(number)) or "" for number in ids]

    def laid_out(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids and types of a pair as the file's own template has them."""
        with self._naming():
            found = self.library.encode(first, second, add_special_tokens=True)
        return list(found.ids), list(found.type_ids)

    def cut(self, text: str) -> list[str]:
        """The parts of a text that pieces are looked for in."""
        normalizer, pre_tokenizer = self.library.normalizer, self.library.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        return [text] if pre_tokenizer is None else [part for part, _ in pre_tokenizer.pre_tokenize_str(text)]

    def _is_too_long(self, word: str) -> bool:
        return self.longest_word is not None and any(len(part) > self.longest_word for part in self.cut(word))

    @property
    def is_wordpiece(self) -> bool:
        return bool(self.plan["model"].get("type") == "WordPiece")

    @property
    def of_other_words_than_bert(self) -> str:
        """Where its WordPiece is not BERT's, in words; empty where it is."""
        model = self.plan["model"]
        most, prefix = self.longest_word, model.get("continuing_subword_prefix")
        if most != LONGEST_WORD:
            return f"max_input_chars_per_word = {most} (BERT: {LONGEST_WORD})"
        return "" if prefix in (None, PREFIX) else f"continuing_subword_prefix = {prefix!r} (BERT: {PREFIX!r})"

    @cached_property
    def continuations(self) -> NDArray[np.uint8]:
        """By the marks of the model, or else by the one that stands for a space when text is cut up."""
        model, pieces = self.plan["model"], self.pieces(range(self.vocab_size))
        if model.get("type") == "WordLevel":  # its pieces are words
            return np.zeros(self.vocab_size, dtype=np.uint8)
        special = {token["id"] for token in self.plan.get("added_tokens", ())} | set(self.special_ids.values())
        prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
        texts: list[str | None] = [self._text(piece) for piece in pieces]
        if suffix:
            texts = [self._text(piece.removesuffix(suffix)) + " " * piece.endswith(suffix) for piece in pieces]
        elif prefix:
            # BERT's own rules cut text at marks and ideographs before.
            ends = (self.plan.get("pre_tokenizer") or {}).get("type") != "BertPreTokenizer"
            return flags_of_prefix(pieces, prefix, special, ends=ends)
        else:
            mark = self._text(self._mark())
            texts = [text.replace(mark, " ") for text in map(self._text, pieces)]
            if self.unknown is not None:  # what is before it in a word has a piece of its own
                texts[self.unknown] = "a"
                special -= {self.unknown}
        for number in special:
            texts[number] = None
        return word_flags(texts, behind=bool(suffix))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return *super().names, *self.unread

    def read_names(self) -> None:
        self.library.encode_special_tokens, self.spelled = False, {}

    @property
    def unread(self) -> list[str]:
        """Special tokens that somebody added to the file, beside the usual ones: in a text they are text."""
        usual = {*self.special_ids.values(), self.unknown}
        added = self.plan.get("added_tokens", ())
        return [token["content"] for token in added if token.get("special") and token["id"] not in usual]

    def _mark(self) -> str:
        """What stands for a space in pieces, as in the "\u2581" of "\u2581the"."""
        found = re.search("a(.*)b", self._cut("a b"), re.DOTALL | re.IGNORECASE)
        if found is None or not found[1]:
            raise untold_words(
                "nothing stands for the space of a text, and its model marks neither what goes on a word nor what ends "
                "one"
            )
        return found[1]

    def _cut(self, text: str) -> str:
        """A text as the model has it, its parts one after another."""
        return "".join(self.cut(text))

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte that each character of a piece stands for, where pieces are of bytes."""
        if BYTES_AS_LETTERS not in self._cut(LETTER):
            return {}
        own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # as GPT-2 has it
        others = [byte for byte in range(256) if byte not in own]
        return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}

    def _text(self, piece: str) -> str:
        """A piece in characters."""
        if self.plan["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return BYTES
        if not self._byte_of or not self._byte_of.keys() >= set(piece):
            return piece
        return bytes(map(self._byte_of.__getitem__, piece)).decode("utf-8", "replace")

    @property
    def _steps(self) -> list[dict[str, Any]]:
        """What becomes of the ids of a text."""
        told = self.plan.get("post_processor")
        if not told:
            return []
        return list(told["processors"]) if told.get("type") == "Sequence" else [told]

    def _end_alone(self, added: Sequence[str]) -> int | None:
        """The special token that the file's template puts behind a text, where it puts nothing else around it."""
        templates = [step for step in self._steps if step.get("type") == "TemplateProcessing"]
        if len(templates) != 1 or [next(iter(part)) for part in templates[0]["single"]] != ["Sequence", "SpecialToken"]:
            return None
        name = templates[0]["single"][1]["SpecialToken"]["id"]
        number = self.library.token_to_id(name)
        is_it = name in added and templates[0]["special_tokens"][name]["ids"] == [number]
        return number if is_it else None

    def _find_unknown(self) -> int | None:
        model = self.plan["model"]
        if isinstance(model.get("unk_id"), int):  # unigram
            return int(model["unk_id"])
        return self.library.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def _open(content: bytes, file: Path) -> Library:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing("tokenizers", error) from error
    if content.startswith(codecs.BOM_UTF8):
        raise ValueError(
            f"{file} begins with a byte order mark (EF BB BF), with which the tokenizers library reads no file. Save "
            "it as UTF-8 without that mark."
        )
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

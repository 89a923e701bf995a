"""WordPiece vocabularies as BERT has them (Devlin et al., 2019, arXiv 1810.04805): a `vocab.txt`, cased or not."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tools.corpus.tokenizers.base import (
    FlatIds,
    Tokenizer,
    find_special,
    fingerprint,
    missing,
    read,
    smallest,
    word_flags,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


UNKNOWN, PREFIX = "[UNK]", "##"
LONGEST_WORD = 100
"""Characters; a longer word is unknown, as in BERT's own code."""
MOST_CASED = 0.01
"""Share of pieces with capital letters from which on a vocabulary is a cased one."""
FEW_ACCENTED = 0.001
"""Share of pieces with accents from which on a vocabulary was made of text that kept them."""
MOST_KNOWN = 1 << 19
"""Words whose ids are remembered at a time; they take some 150 bytes each."""
_parts = re.compile(r"[!-/:-@\[-`{-~]|[^ !-/:-@\[-`{-~]+").findall
"""A mark of ASCII, or what stands between spaces and such marks: BERT's rules never look across these borders, so that
each part has its ids wherever it stands."""


class WordPieceTokenizer(Tokenizer):
    """A `vocab.txt`: a piece a line, its id is the line's number from 0; "##" begins what goes on a word.

    Args:
        file: the vocabulary.
        lowercase: an uncased vocabulary: text is lowercased.
        strip_accents: text loses its accents, and syllables of Hangul and sounds of Kana come apart. None: as BERT has
            it, where text is lowercased.
        any_case: whoever says `lowercase` knows, whatever the pieces look like.

    Raises:
        ValueError: the file is missing, no such vocabulary, lacks a special token, or is cased where `lowercase` says
            that it is not, or the other way round.
    """

    library: Library
    """The tokenizers library's own object."""
    longest_word = LONGEST_WORD

    def __init__(
        self, file: Path, *, lowercase: bool, strip_accents: bool | None = None, any_case: bool = False
    ) -> None:
        content = read(file)
        self._names = read_vocabulary(content, file)
        if not any_case:
            _check_case(self._names, lowercase, file)
        ids = {piece: number for number, piece in enumerate(self._names)}
        if UNKNOWN not in ids:
            raise ValueError(f"{file} has no {UNKNOWN}, which a WordPiece vocabulary needs. Take another vocabulary.")
        self.vocab_size = len(ids)
        self.unknown: int | None = ids[UNKNOWN]
        self.special_ids = find_special(ids.get, file)
        # BERT's rules cut a text at each of the brackets, so that no name of a special token stays whole.
        self.spelled: dict[int, tuple[int, ...]] = {}
        # What BERT does by itself was not named in folders of before.
        accents = {} if strip_accents in (None, lowercase) else {"strip_accents": strip_accents}
        self.fingerprint = fingerprint("wordpiece", content, lowercase=lowercase, **accents)
        self.library = make_library(ids, lowercase=lowercase, strip_accents=strip_accents)
        self._lowercase = lowercase
        self._dtype = smallest(self.vocab_size)
        self._code = "H" if self._dtype.itemsize == 2 else "i"
        self._whole = {
            piece: self._to_bytes([number])
            for piece, number in ids.items()
            if piece.isascii() and piece.isalnum() and len(piece) <= LONGEST_WORD
        }
        self._known: dict[str, bytes] = {}
        self._reads_names = False

    def read_names(self) -> None:
        self.library.add_special_tokens(list(self.names))
        self._reads_names = True

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """As `encode`, some times faster: a word is looked up in the vocabulary once, and remembered."""
        if self._reads_names:
            return super().encode_flat(texts)
        words = list(map(_parts, texts))
        self._learn(set(chain.from_iterable(words)))
        ids_of = self._known.__getitem__
        found = [b"".join(map(ids_of, parts)) for parts in words]
        lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found)) // self._dtype.itemsize
        return FlatIds(ids=np.frombuffer(b"".join(found), dtype=self._dtype), lengths=lengths)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode_all_with_offsets([text])[0]

    def encode_all_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        found = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [(each.ids, each.offsets) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode([int(number) for number in ids], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._names[number] for number in ids]

    @cached_property
    def continuations(self) -> NDArray[np.uint8]:
        return flags_of_prefix(self._names, PREFIX, self.special_ids.values(), ends=False)

    def _is_too_long(self, word: str) -> bool:
        return len(self.library.normalizer.normalize_str(word)) > LONGEST_WORD

    def _learn(self, words: set[str]) -> None:
        """Makes `_known` hold these words."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        fresh = words.difference(self._known)  # `-` would go over all that is known
        # In these BERT's rules have nothing to do but to lowercase: the model itself is asked.
        plain = {word for word in fresh if word.isascii() and word.isalnum()}
        tokenize = self.library.model.tokenize
        for word in plain:
            name = word.lower() if self._lowercase else word
            found = self._whole.get(name)
            self._known[word] = self._to_bytes([token.id for token in tokenize(name)]) if found is None else found
        others = list(fresh - plain)
        self._known.update(zip(others, map(self._to_bytes, self.encode(others)), strict=True))

    def _to_bytes(self, ids: list[int]) -> bytes:
        return array(self._code, ids).tobytes()


def flags_of_prefix(pieces: Sequence[str], prefix: str, special: Collection[int], *, ends: bool) -> NDArray[np.uint8]:
    """`continuations` of pieces that go on a word where they have the prefix.

    Args:
        special: ids of special tokens.
        ends: as of `word_flags`; BERT's rules cut text at marks and ideographs before its pieces are looked up.
    """
    texts = (
        None if number in special else piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
        for number, piece in enumerate(pieces)
    )
    return word_flags(texts, ends=ends)


def read_vocabulary(content: bytes, file: Path) -> list[str]:
    """The pieces of a vocab.txt, in the order of their ids.

    Raises:
        ValueError: not UTF-8, an empty line, or a piece twice.
    """
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 at byte {error.start}; a vocab.txt has one piece a line.") from error
    pieces = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    seen: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=1):
        if not piece.strip(" \t"):
            raise ValueError(f"{file} has an empty line {number}; every line of a vocab.txt is a piece.")
        if piece in seen:
            raise ValueError(f"{file} has {piece!r} in line {seen[piece]} and in line {number}; a piece has one id.")
        seen[piece] = number
    return pieces


def make_library(ids: dict[str, int], *, lowercase: bool, strip_accents: bool | None) -> Library:
    """BERT's own way to the ids. Its special tokens are not made known: no text may turn into one."""
    try:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise missing("tokenizers", error) from error
    library = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=lowercase if strip_accents is None else strip_accents
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=PREFIX)
    return library


def count_cased(pieces: Sequence[str]) -> int:
    """Pieces with capital letters; those in brackets are names."""
    return sum(piece != piece.lower() for piece in pieces if not (piece.startswith("[") and piece.endswith("]")))


def is_cased(pieces: Sequence[str]) -> bool:
    """Whether so many have capital letters that text was not lowercased."""
    return count_cased(pieces) > MOST_CASED * len(pieces)


def guess_accents(file: Path) -> tuple[bool, str]:
    """Whether an uncased vocabulary is for text without accents, and why that is so, in words.

    It is unless more than `FEW_ACCENTED` of its pieces are such as no text without accents ever meets.

    Raises:
        ValueError: no such file, or no vocabulary.
    """
    pieces = read_vocabulary(read(file), file)
    accented = [piece for piece in pieces if piece != _without_accents(piece)]
    strip = len(accented) <= FEW_ACCENTED * len(pieces)
    such = f", such as {accented[0].removeprefix(PREFIX)!r}" if accented else ""
    return strip, (
        f"{file.name}: accents are {'dropped' if strip else 'kept'}, since {len(accented) or 'none'} of its "
        f"{len(pieces)} pieces {'has' if len(accented) <= 1 else 'have'} any{such}"
    )


def _without_accents(piece: str) -> str:
    """As BERT drops them: letters are taken apart, and marks that take no room left out."""
    return "".join(part for part in unicodedata.normalize("NFD", piece) if unicodedata.category(part) != "Mn")


def _check_case(pieces: Sequence[str], lowercase: bool, file: Path) -> None:
    cased = count_cased(pieces)
    if lowercase and is_cased(pieces):
        raise ValueError(
            f"{file} is a cased vocabulary: {cased} of its {len(pieces)} pieces have capital letters, which lowercased "
            "text never meets. Say --cased."
        )
    if not lowercase and not cased:
        raise ValueError(
            f"{file} is an uncased vocabulary: none of its {len(pieces)} pieces has capital letters. Leave out --cased."
        )

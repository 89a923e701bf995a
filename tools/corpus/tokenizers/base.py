"""What every tokenizer can do, and what its special tokens may be called."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.masking import ENDS, GOES_ON, SpecialTokens
from tools.common.files import read_file

# --- The makes of tokenizers, their files, and what is kept beside them -----------------------------------------------

Kind = Literal["sentencepiece", "wordpiece", "json"]
SETTINGS = "tokenizer-settings.json"
FILES: MappingProxyType[Kind, str] = MappingProxyType(
    {"sentencepiece": "tokenizer.model", "wordpiece": "vocab.txt", "json": "tokenizer.json"}
)
"""The file of each, in a folder that the step `tokenizer` has written."""


def fingerprint(kind: Kind, content: bytes, **settings: Any) -> str:
    """A hash of all that decides the ids."""
    head = json.dumps([kind, settings], sort_keys=True).encode()
    return hashlib.blake2b(head + b"\0" + content, digest_size=16).hexdigest()


def read(file: Path) -> bytes:
    """Raises ValueError where there is no such file."""
    try:
        return read_file(file)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"there is no tokenizer file {file.absolute()}; name one that exists.") from error


def missing(package: str, error: ImportError) -> ValueError:
    """For a package that this make of tokenizer needs."""
    return ValueError(f"this tokenizer needs the package {package} ({error}): pip install 'tensor3d[corpus]'")


# --- What every tokenizer can do --------------------------------------------------------------------------------------

SPECIAL_NAMES = MappingProxyType(
    {
        "pad": ("[PAD]", "<pad>", "<|pad|>"),
        "cls": ("[CLS]", "<s>", "<cls>", "<bos>", "<|begin_of_text|>"),
        "sep": ("[SEP]", "</s>", "<sep>", "<eos>", "<|end_of_text|>"),
        "mask": ("[MASK]", "<mask>", "<|mask|>"),
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


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """How texts become a sequence, by default as BERT has them: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]."""

    cut_left: bool = False
    """Whether a text that is too long loses its beginning, not its end."""
    between: int = 1
    """[SEP] between the texts of a pair; RoBERTa has two, and tokenizers without [CLS] may have none."""
    again: bool = False
    """Whether [CLS] stands before the second text of a pair, too, as Gemma has it: [CLS] A [SEP] [CLS] B [SEP]."""
    second_type: int = 1
    """Type of the second text and its [SEP]; all else has type 0."""
    pairs: bool = True
    """Whether it is known how pairs are laid out. Of tokenizers without [CLS] it may not be: single texts are all that
    their models were made for."""

    @property
    def tokens_between(self) -> int:
        """Special tokens between the texts of a pair."""
        return self.between + self.again

    def in_words(self) -> str:
        """Where it differs from BERT's."""
        told = [
            *(["texts that are too long lose their beginning"] if self.cut_left else []),
            *([f"{self.between} [SEP] between the texts of a pair"] if self.between != 1 else []),
            *(["[CLS] before the second text of a pair, too"] if self.again else []),
            *(["type 0 for the second text of a pair"] if self.second_type != 1 else []),
            *([] if self.pairs else ["no pairs"]),
        ]
        return ", ".join(told)


InTexts = Literal["text", "tokens"]
"""What the name of a special token in a text is: text, or that token, as the transformers library has it."""


@dataclass(frozen=True, kw_only=True)
class UnknownText:
    """How much of some texts a tokenizer has no pieces for. Two of them add up."""

    characters: int = 0
    """Of the texts."""
    unknown: int = 0
    """Characters that unknown tokens stand for."""
    too_long: int = 0
    """Of these, in words that are unknown for their length alone."""
    longest: int | None = None
    """Characters of the longest word that the tokenizer cuts into pieces."""

    def __add__(self, other: UnknownText) -> UnknownText:
        return UnknownText(
            characters=self.characters + other.characters,
            unknown=self.unknown + other.unknown,
            too_long=self.too_long + other.too_long,
            longest=self.longest if other.longest is None else other.longest,
        )

    def in_words(self) -> str:
        """Empty where nothing is unknown."""
        if not self.unknown:
            return ""
        told = f"{self.unknown:,} of {self.characters:,} characters are unknown to the tokenizer"
        if not self.too_long:
            return told
        return (
            f"{told}, {self.too_long:,} of them in words of more than {self.longest} characters, each of which is one "
            "unknown token: put spaces between the words of scripts without them, or take a model whose tokenizer has "
            "no such limit, as those of sentencepiece and of bytes"
        )


class Tokenizer(ABC):
    """Text to ids and back. Nothing in a text becomes a special token, not even "[MASK]" or "</s>", unless that is
    asked for (`read_names`)."""

    vocab_size: int
    fingerprint: str
    """Of the files and settings that decide the ids."""
    unknown: int | None
    """The id of what has no piece; None where everything has one."""
    special_ids: dict[str, int]
    """Ids by the names of `SPECIAL_NAMES`: all four; or "pad" and "sep" alone, where nothing stands before a text, as
    sentence-vector models have it that came of decoders; or "pad" alone, where nothing stands behind it either."""
    spelled: dict[int, tuple[int, ...]]
    """The ids of the special tokens' names as text; empty where the library never takes a text for a special token."""
    longest_word: int | None = None
    """Characters: a longer word is unknown, whatever pieces there are. None: there is no such limit."""
    layout: TextLayout = TextLayout()
    """What becomes of the ids, where its folder says so."""

    @cached_property
    def special(self) -> SpecialTokens:
        """Raises ValueError where there is no [CLS] and no [MASK]: what needs sequences of texts alone takes `before`,
        `between` and `end`."""
        if "cls" not in self.special_ids:
            end, good = "nothing", ""
            if self.behind:
                end = f"{self.pieces(self.behind)[0]!r} behind a text"
                good = "vectors of texts (tools.predict embed, tools.finetune embed), "
            raise ValueError(
                f"this tokenizer has no [CLS] and no [MASK], as those that came of decoders: {end} is all that it "
                f"adds. It is good for {good}classes and rankings; for corpora, pre-training, masks, tags and answers "
                "take a model whose tokenizer has them."
            )
        return SpecialTokens(vocab_size=self.vocab_size, **self.special_ids)

    @property
    def before(self) -> list[int]:
        """What stands before a text: [CLS], or nothing."""
        return [self.special_ids[role] for role in ("cls",) if role in self.special_ids]

    @property
    def between(self) -> list[int]:
        """What stands between the texts of a pair."""
        return self.behind * self.layout.between + self.before * self.layout.again

    @property
    def behind(self) -> list[int]:
        """What stands behind the last text: [SEP], or nothing."""
        return [self.special_ids[role] for role in ("sep",) if role in self.special_ids]

    @property
    def end(self) -> int:
        """The same. Raises ValueError where it is nothing: what looks at the last token would look at one of the
        text."""
        if not self.behind:
            raise ValueError(
                "this tokenizer puts nothing behind a text, as those of generators. Vectors of texts need a model "
                "whose tokenizer does; classes and rankings do without."
            )
        return self.behind[0]

    def special_tokens(self, *, pair: bool) -> int:
        """How many a sequence has."""
        return len(self.before) + (len(self.between) if pair else 0) + len(self.behind)

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text and where the piece of each begins and ends in it, in characters."""

    def encode_all_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The same of many texts, faster where the library takes them together."""
        return [self.encode_with_offsets(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text that has these ids; special tokens among them are shown by their names."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, as the vocabulary has it."""

    @property
    @abstractmethod
    def continuations(self) -> NDArray[np.uint8]:
        """uint8 (vocab_size,): `GOES_ON` and `ENDS` of each piece, as `tensor3d.data.masking` has them; 0 for special
        tokens.

        Raises:
            ValueError: the vocabulary does not tell where words begin or end.
        """

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the special tokens, those too that somebody added to the file."""
        ids = [*self.special_ids.values(), *([] if self.unknown is None else [self.unknown])]
        return tuple(self.pieces(ids))

    def count_named(self, texts: Iterable[str]) -> int:
        """How many texts have such a name in them."""
        names = self.names
        begin = {name[0] for name in names if name}  # few texts have a bracket at all
        return sum(any(mark in text for mark in begin) and any(name in text for name in names) for text in texts)

    def count_unknown(self, texts: Sequence[str], encoded: Sequence[Sequence[int | None]]) -> UnknownText:
        """How much of the texts has no piece; of `encoded`, their ids, those without an unknown token cost nothing."""
        of_all = UnknownText(characters=sum(map(len, texts)), longest=self.longest_word)
        missed = [text for text, ids in zip(texts, encoded, strict=True) if self.unknown in ids]
        if self.unknown is None or not missed:
            return of_all
        words = self._unknown_words(missed)
        long = [] if self.longest_word is None else [word for word in words if self._is_too_long(word)]
        found = UnknownText(unknown=sum(map(len, words)), too_long=sum(map(len, long)))
        return of_all + found

    def _unknown_words(self, texts: Sequence[str]) -> list[str]:
        """What the unknown tokens of the texts stand for."""
        return [
            text[begin:end]
            for text, (ids, places) in zip(texts, self.encode_all_with_offsets(texts), strict=True)
            for begin, end in {place for number, place in zip(ids, places, strict=True) if number == self.unknown}
        ]

    def _is_too_long(self, word: str) -> bool:
        """Whether a word is unknown for its length, as the tokenizer's rules have made it."""
        return self.longest_word is not None and len(word) > self.longest_word

    def read_names(self) -> None:
        """From here on the name of a special token in a text is that token.

        Raises:
            ValueError: this make of tokenizer does not tell them from text.
        """
        raise ValueError(
            "names of special tokens can be read as tokens by a vocab.txt or a tokenizer.json, and this is a "
            "sentencepiece model. Leave them text, or put the tokenizer.json of the library beside it."
        )

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """What `encode` gives, in arrays."""
        return flatten(self.encode(texts), self.vocab_size)

    def _as_text(self, ids: list[int]) -> list[int]:
        """Spells what the library took for special tokens."""
        if self.spelled.keys().isdisjoint(ids):
            return ids
        return [part for number in ids for part in self.spelled.get(number, (number,))]

    def _as_text_with_offsets(
        self, ids: list[int], offsets: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The same; each part of a name has the place of the whole name."""
        if self.spelled.keys().isdisjoint(ids):
            return ids, offsets
        spelled = [
            (part, place)
            for number, place in zip(ids, offsets, strict=True)
            for part in self.spelled.get(number, (number,))
        ]
        return [part for part, _ in spelled], [place for _, place in spelled]


# --- Where words end in a row of pieces -------------------------------------------------------------------------------

_UNSPACED = (
    *("CJK ", "IDEOGRAPHIC ", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI ", "NUSHU", "TANGUT"),
    *("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ", "TAI ", "NEW TAI ", "JAVANESE ", "BALINESE "),
)
"""How Unicode's names of characters begin in scripts that put no spaces between words."""
BYTES = "\ufffd"
"""The text of a piece that is a byte, or some, and no character."""
_JOINERS = "\u00ad\u200c\u200d"
"""The soft hyphen and the joiners stand inside of words."""


def word_flags(texts: Iterable[str | None], *, behind: bool = False, ends: bool = True) -> NDArray[np.uint8]:
    """uint8 (pieces,): `GOES_ON` and `ENDS` of each piece.

    Words are of letters, marks and digits. All else ends them, and so does each piece of a script without spaces, since
    nothing tells its words.

    Args:
        texts: of each piece, a space where the tokenizer marks the beginning or the end of a word; U+FFFD stands for
            bytes that are no character. None: a special token, 0.
        behind: marks stand behind words, so that a mark by itself ends one.
        ends: False where no piece need end a word: what follows a mark or an ideograph never goes on a word.
    """

    def flags(text: str | None) -> int:
        if not text:
            return 0
        if text == " ":
            return GOES_ON | ENDS if behind else 0
        return GOES_ON * is_of_word(text[0]) | ENDS * (ends and not is_of_word(text[-1]))

    return np.fromiter(map(flags, texts), dtype=np.uint8)


def untold_words(reason: str) -> ValueError:
    """For a vocabulary that does not tell where words begin or end."""
    return ValueError(
        f"this tokenizer does not tell which of its pieces go on a word: {reason}. Leave out --whole-words, so "
        "that single tokens are masked, or take another tokenizer."
    )


def is_of_word(character: str) -> bool:
    """A letter, mark or digit of a script that puts spaces between words, or what joins such."""
    if character.isascii():
        return character.isalnum()
    if unicodedata.category(character)[0] in "LMN":
        return not unicodedata.name(character, "").startswith(_UNSPACED)
    return character in _JOINERS


def is_mark(character: str) -> bool:
    """A mark or a joiner: it belongs to the character before it, which nobody sees without it."""
    return not character.isascii() and (unicodedata.category(character)[0] == "M" or character in _JOINERS)


def flatten(encoded: Sequence[Sequence[int]], vocab_size: int) -> FlatIds:
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    ids = np.fromiter(chain.from_iterable(encoded), dtype=smallest(vocab_size), count=int(lengths.sum()))
    return FlatIds(ids=ids, lengths=lengths)


def smallest(vocab_size: int) -> np.dtype[np.integer]:
    """The type that indexed datasets keep ids below `vocab_size` in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


def find_special(
    id_of: Callable[[str], int | None],
    file: object,
    *,
    added: Sequence[str] = (),
    end: int | None = None,
    bare: bool = False,
) -> dict[str, int]:
    """The ids of the special tokens.

    Args:
        id_of: the id of a piece; None where the vocabulary does not have it.
        file: named in the error.
        added: special tokens by the file itself, which go before mere pieces of the vocabulary: MPNet's has its own and
            all of BERT's. The first of them that has no other role is padding where none is: padding only fills slots
            that nobody looks at, and EuroBERT has its [SEP] for it, too.
        end: what the file itself puts behind a text, where it puts nothing before it. Unless a [CLS] and a [MASK] are
            among `added`, there is no more then: this is [SEP], and padding too where that has no name of its own.
            Vocabularies of decoders have pieces such as "<s>" and "</s>", which are text.
        bare: whether the file puts nothing around a text: then there may be none but padding.

    Raises:
        ValueError: one is missing.
    """
    bare = bare and not any(set(SPECIAL_NAMES[role]) & set(added) for role in ("cls", "mask"))
    if end is not None and not all(set(SPECIAL_NAMES[role]) & set(added) for role in ("cls", "mask")):
        padding = (id_of(name) for name in SPECIAL_NAMES["pad"] if name in added)
        return {"pad": next((number for number in padding if number is not None), end), "sep": end}
    found: dict[str, int] = {}
    others = {name for role, names in SPECIAL_NAMES.items() if role != "pad" for name in names}
    for role, names in SPECIAL_NAMES.items():
        more = [name for name in added if name not in others] if role == "pad" else []
        numbers = (id_of(name) for name in (*(name for name in names if name in added), *names, *more))
        number = next((number for number in numbers if number is not None), None)
        if number is None and bare and "pad" in found:
            return {"pad": found["pad"]}
        if number is None:
            raise no_special(file, role)
        found[role] = number
    return found


def no_special(file: object, role: str) -> ValueError:
    """For a file without this special token."""
    return ValueError(
        f"{file} has no token for {role!r}: {' or '.join(SPECIAL_NAMES[role])} is needed, unless a tokenizer.json has "
        "a template of its own that puts one special token behind a text and nothing before it. Take another "
        "vocabulary, or train one: python -m tools.corpus tokenizer --docs DIR --output DIR."
    )


def spell_special(
    id_of: Callable[[str], int | None],
    special_ids: Mapping[str, int],
    unknown: int | None,
    file: object,
    *,
    added: Sequence[str] = (),
) -> dict[int, tuple[int, ...]]:
    """The names of special tokens as text, character by character, by the tokens' ids.

    A library takes such a name in a text for the token where its model has the name among its pieces, or among those
    that the user added to it. Looking at what it gives finds also those that come of another spelling.

    Args:
        id_of: the id of a piece; None where the vocabulary does not have it.
        special_ids: what `find_special` found.
        unknown: the id of what has no piece.
        file: named in the error.
        added: special tokens by the file itself.

    Raises:
        ValueError: the unknown piece is a special token, so that text becomes one.
    """
    for role, number in special_ids.items():
        if number == unknown:
            raise ValueError(
                f"{file} has the id {number} for unknown pieces and for {role!r}, so that text would turn into a "
                "special token. Take another tokenizer."
            )
    names = {id_of(name): name for name in (*added, *(name for role in special_ids for name in SPECIAL_NAMES[role]))}
    return {
        number: tuple(part for name in names.get(number, "") if (part := _spell(name, id_of, unknown)) is not None)
        for number in special_ids.values()
    }


def _spell(character: str, id_of: Callable[[str], int | None], unknown: int | None) -> int | None:
    """The id of a character, of the byte that it is (as sentencepiece names bytes), or of its small letter."""
    ids = (id_of(piece) for piece in (character, f"<0x{ord(character):02X}>", character.lower()))
    return next((number for number in ids if number is not None), unknown)

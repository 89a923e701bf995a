"""The tokenizer in a folder that the transformers library has written, or that was published for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.corpus.tokenizers.added import ADDED, CONFIG, SPECIAL_MAP, check_added, check_named, read_table
from tools.corpus.tokenizers.base import Tokenizer
from tools.corpus.tokenizers.folder import install_tokenizer, open_tokenizer
from tools.corpus.tokenizers.kinds import FILES, Kind, read
from tools.corpus.tokenizers.wordpiece import count_cased, is_cased, read_vocabulary

_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OF_TOKENIZERS = (
    FILES["json"],
    FILES["wordpiece"],
    *_SENTENCEPIECE,
    CONFIG,
    SPECIAL_MAP,
    ADDED,
    "vocab.json",
    "merges.txt",
)
"""Files of such a folder that belong to its tokenizer."""
_REWRITE = (
    'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}") of the transformers library writes a '
    "tokenizer.json, which is read as it is."
)
_PROBE = ("The FOXES, \u00c9t\u00e9 \u6f22\u5b57\u3002 na\u00efve Stra\u00dfe \u00bd!", "iPhone 12 of THE McDonald's")
"""Two tokenizers that treat case, accents, ideographs and marks in another way differ in these."""


@dataclass(frozen=True, kw_only=True)
class FoundTokenizer:
    """The file that decides the ids, and how to read it."""

    kind: Kind
    file: Path
    lowercase: bool = False

    def in_words(self) -> str:
        """Its file, and whether it is lowercased text that the file is for."""
        case = f", {'lowercased' if self.lowercase else 'cased'}" if self.kind == "wordpiece" else ""
        return f"{self.file.name}{case}"

    def open(self) -> Tokenizer:
        """Raises ValueError for a damaged file, or one that lacks a special token."""
        return open_tokenizer(self.kind, self.file, lowercase=self.lowercase, any_case=True)

    def install(self, folder: Path) -> Tokenizer:
        """Puts it into a folder of ours, which is there; `load_tokenizer` opens it."""
        return install_tokenizer(self.kind, self.file, folder, lowercase=self.lowercase, any_case=True)


def find_tokenizer(folder: Path) -> FoundTokenizer:
    """tokenizer.json where there is one; else vocab.txt, with the case that tokenizer_config.json tells; else a
    sentencepiece model.

    Without a word in tokenizer_config.json text is lowercased, as the transformers library does it, unless that would
    make most of a cased vocabulary useless: then the folder has to say which it is.

    Raises:
        ValueError: no tokenizer's file, or settings with which BERT's own rules do not hold, or tokens beside the
            vocabulary.
    """
    for kind, file in _files(folder):
        return _found(folder, kind, file)
    raise ValueError(
        f"{folder} has no tokenizer: none of {FILES['json']}, {FILES['wordpiece']} and {', '.join(_SENTENCEPIECE)} is "
        "there. Put the files of the tokenizer that the model was trained with beside its weights."
    )


def with_same_ids(first: FoundTokenizer, folder: Path) -> Iterator[FoundTokenizer]:
    """Other tokenizers of a folder that give each text the ids that `first` gives. What cannot be read is left out: it
    decides nothing."""
    made = first.open()
    for kind, file in _files(folder):
        with suppress(ValueError):
            if file != first.file and _agree(made, (found := _found(folder, kind, file)).open()):
                yield found


def _files(folder: Path) -> Iterator[tuple[Kind, Path]]:
    """Those that are there, the first choice first."""
    names: list[tuple[Kind, str]] = [("json", FILES["json"]), ("wordpiece", FILES["wordpiece"])]
    names += [("sentencepiece", name) for name in _SENTENCEPIECE]
    return ((kind, folder / name) for kind, name in names if (folder / name).is_file())


def _found(folder: Path, kind: Kind, file: Path) -> FoundTokenizer:
    lowercase = kind == "wordpiece" and _lowercases(folder, file)
    found = FoundTokenizer(kind=kind, file=file, lowercase=lowercase)
    check = check_named if kind == "json" else check_added
    check(folder, found.open(), file, _REWRITE.format(folder=folder))
    return found


def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether they have the same pieces, and cut text alike. Two ways to cut a word that score the same are as good."""
    if one.vocab_size != other.vocab_size or one.special_ids != other.special_ids:
        return False
    ids = range(one.vocab_size)
    if one.pieces(ids) != other.pieces(ids):
        return False
    mine, theirs = ([made.pieces(found) for found in made.encode(_PROBE)] for made in (one, other))
    return ["".join(pieces) for pieces in mine] == ["".join(pieces) for pieces in theirs]


def tokenizer_files(folder: Path) -> list[Path]:
    """What belongs to the tokenizer of such a folder, to be copied as it is."""
    return [folder / name for name in OF_TOKENIZERS if (folder / name).is_file()]


def _lowercases(folder: Path, vocabulary: Path) -> bool:
    settings = read_table(folder / CONFIG)
    told, accents = settings.get("do_lower_case"), settings.get("strip_accents")
    lowercase = True if told is None else bool(told)
    if told is None and is_cased(pieces := read_vocabulary(read(vocabulary), vocabulary)):
        raise ValueError(
            f"{vocabulary} is a cased vocabulary: {count_cased(pieces)} of its {len(pieces)} pieces have capital "
            f"letters, and no do_lower_case in {folder / CONFIG} says whether text is lowercased. The transformers "
            f'library would lowercase it. Write {{"do_lower_case": false}} into that file if the model was trained '
            "on text as it is, or true."
        )
    odd: dict[str, Any] = {
        "strip_accents": accents is not None and bool(accents) != lowercase,
        "tokenize_chinese_chars": not settings.get("tokenize_chinese_chars", True),
        "do_basic_tokenize": not settings.get("do_basic_tokenize", True),
    }
    for name, found in odd.items():
        if found:
            raise ValueError(
                f"{folder / CONFIG} has {name} = {settings[name]!r} with do_lower_case = {lowercase}, which a "
                f"vocab.txt by itself cannot say. {_REWRITE.format(folder=folder)}"
            )
    return lowercase

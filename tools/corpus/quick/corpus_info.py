"""A prepared corpus: what lies in its folder, and how it is loaded."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import IndexedDataset, IndexedWriter, SpecialTokens
from tensor3d.data.segments import SPECIAL_TOKENS, SPECIAL_TOKENS_OF_SINGLE
from tools.common.files import parsed_json, read_file
from tools.common.workers import deal
from tools.corpus.quick.sentencepiece_tokenizer import TRAINING_COUNTS, load_tokenizer, special_tokens
from tools.corpus.sentences import LEFT_OUT

# --- The training documents in one file pair or in several, of which a machine may hold some only ---------------------

TRAIN = "train"
_KINDS = ("bin", "idx")


def shard_names(shards: int) -> list[str]:
    """Names of the file pairs, without .bin and .idx."""
    return [TRAIN] if shards == 1 else [f"{TRAIN}-{i:05d}-of-{shards:05d}" for i in range(shards)]


def deal_documents(tokens: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """int64 (documents,): the shard of each document; every shard gets one at least.

    Args:
        tokens: int64 (documents,), of each document, above 0.
        shards: how many.

    Raises:
        ValueError: fewer than one, or more shards than documents.
    """
    check_shards(shards, len(tokens))
    return np.array(deal(tokens.tolist(), shards), dtype=np.int64)


def check_shards(shards: int, documents: int | None = None) -> None:
    """Raises ValueError for fewer than one shard, or more than there are training documents."""
    if shards < 1:
        raise ValueError(f"shards must be at least 1. Got {shards}.")
    if documents is not None and shards > documents:
        raise ValueError(
            f"{documents} training documents cannot fill {shards} shards: each needs one. Lower shards, or add text."
        )


def write_shards(folder: Path, shards: int, *, vocab_size: int) -> None:
    """Replaces the training documents in one pair of files by those in several. Documents keep their order."""
    if shards == 1:
        return
    whole = IndexedDataset(folder / TRAIN)
    bounds = whole.starts[whole.documents]
    dealt = deal_documents(np.diff(bounds), shards)
    for shard, name in enumerate(shard_names(shards)):
        with IndexedWriter(folder / name, vocab_size=vocab_size) as writer:
            for document in np.flatnonzero(dealt == shard).tolist():
                items = range(whole.documents[document], whole.documents[document + 1])
                writer.add_document([whole[item].tolist() for item in items])
    for kind in _KINDS:
        (folder / f"{TRAIN}.{kind}").unlink()


def open_shards(folder: Path, shards: int) -> tuple[IndexedDataset | None, ...]:
    """Opens the shards that are there; None for the others.

    Raises:
        ValueError: none is there, or only one file of a pair is, or one is damaged.
    """
    opened: list[IndexedDataset | None] = []
    for name in shard_names(shards):
        there = [kind for kind in _KINDS if (folder / f"{name}.{kind}").is_file()]
        if len(there) == 1:
            missing = next(kind for kind in _KINDS if kind not in there)
            raise ValueError(
                f"{folder} is incomplete: {name}.{missing} is missing, though {name}.{there[0]} is there. Copy it "
                "here, or remove the folder and prepare it again."
            )
        opened.append(IndexedDataset(folder / name) if there else None)
    if not any(shard is not None for shard in opened):
        raise ValueError(
            f"{folder} is incomplete: none of the training shards is there, of {shards}; the first is "
            f"{shard_names(shards)[0]}.bin and .idx. Copy some here, or remove the folder and prepare it again."
        )
    return tuple(opened)


# --- A prepared corpus ------------------------------------------------------------------------------------------------

INFO, TOKENIZER, HELD_OUT = "corpus.json", "tokenizer.model", "heldout"
REQUIRED = (INFO, TOKENIZER, f"{HELD_OUT}.bin", f"{HELD_OUT}.idx")
"""Files without which no machine can use a corpus; of the training shards it needs its own only."""


def in_words(counts: dict[str, int]) -> str:
    """3 sentences left out, 12 characters left out."""
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """The contents of corpus.json. Counts are of the whole corpus where nothing else is said."""

    source: str
    """"embedded", or the path that was read; absolute, but for corpora of before."""
    vocab_size: int
    """Pieces of the tokenizer."""
    held_out: float
    """Share of the words that was asked to be held out."""
    seed: int
    """Chooses the documents that are held out."""
    shards: int
    """File pairs that the training documents were dealt into."""
    documents: int
    sentences: int
    words: int
    """Between spaces."""
    pieces: int
    train_documents: int
    train_pieces: int
    held_out_documents: int
    held_out_pieces: int
    unigram_entropy: float
    """Nats a piece of the training documents: the loss of a model that knows the frequencies only."""
    fingerprint: str
    """Hash of the source's text and of the settings."""
    sentences_left_out: int = 0
    """Those with neither letter nor digit, or of control characters alone."""
    characters_left_out: int = 0
    """Of these sentences, without spaces."""
    sentences_cut: int = 0
    """Those that were too long for the tokenizer's training, which had them in parts."""
    reserved_characters_left_out: int = 0
    """From the tokenizer's training."""
    files_without_text: int = 0
    """Of a source of text files: those that are empty, or hold nothing but blank lines."""
    language: str | None = None
    """ISO 639-1 code, by whose rules the text was cut into sentences. None: a corpus of before tells it not."""

    @property
    def left_out(self) -> dict[str, int]:
        """What of the text is no text; without what is 0."""
        return {name: value for name in LEFT_OUT if (value := getattr(self, name))}

    @property
    def trained_on(self) -> dict[str, int]:
        """What was changed of the text that the tokenizer was trained on; without what is 0."""
        return {name: value for name in TRAINING_COUNTS if (value := getattr(self, name))}

    @property
    def omissions(self) -> str:
        """What of the source is not in the corpus, in words; empty where all of it is."""
        files = {"files_without_text": self.files_without_text} if self.files_without_text else {}
        return in_words(files | self.left_out)

    @property
    def has_held_out(self) -> bool:
        return self.held_out_documents > 0

    @property
    def train_tokens(self) -> int:
        return self.train_pieces

    def mean_length(self, max_length: int, short_probability: float, *, single: bool = False) -> float:
        """Tokens of a pair or a single text, the special ones counted, estimated from the mean document.

        A document of n tokens is cut into pairs of `max_length`, of which the last is half as long on average; the
        share `short_probability` of pairs has a random length.
        """
        special = SPECIAL_TOKENS_OF_SINGLE if single else SPECIAL_TOKENS
        content, document = max_length - special, self.train_pieces / self.train_documents
        mean = content * (1 - short_probability / 2)
        return mean * document / (document + content / 2) + special

    def in_words(self) -> str:
        """A line for the user."""
        return (
            f"{self.pieces:,} pieces of {self.vocab_size:,}, unigram entropy {self.unigram_entropy:.3f} nats; "
            f"{self.documents:,} documents, {self.held_out_documents:,} of them held out"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A prepared corpus, memory-mapped."""

    info: CorpusInfo
    special: SpecialTokens
    train: tuple[IndexedDataset | None, ...]
    """By shard; None for one that is not on this machine."""
    held_out: IndexedDataset
    tokenizer: Path
    """The sentencepiece model."""


def load_corpus(output: Path) -> Corpus:
    """Opens a folder that `prepare` has written, or a copy of it that lacks some of the training shards.

    Raises:
        ValueError: the folder is no prepared corpus, a file in it is missing or damaged, or it has no shard at all.
    """
    output = Path(output)
    info = read_info(output)
    missing = [name for name in REQUIRED if not (output / name).is_file()]
    if missing:
        raise ValueError(
            f"{output} is incomplete: {', '.join(missing)} is missing. Remove the folder and prepare it again."
        )
    tokenizer = load_tokenizer(output / TOKENIZER)
    if tokenizer.vocab_size() != info.vocab_size:
        raise ValueError(
            f"{output / TOKENIZER} has {tokenizer.vocab_size()} pieces where {INFO} speaks of {info.vocab_size}; "
            "remove the folder and prepare it again."
        )
    return Corpus(
        info=info,
        special=special_tokens(info.vocab_size),
        train=open_shards(output, info.shards),
        held_out=IndexedDataset(output / HELD_OUT),
        tokenizer=output / TOKENIZER,
    )


def read_info(output: Path) -> CorpusInfo:
    """Raises ValueError unless the folder holds a readable corpus.json."""
    path = output / INFO
    try:
        values = parsed_json(read_file(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{output} is no prepared corpus: it has no {INFO}. "
            f"Run: python -m tools.corpus prepare --source embedded --output {output}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Remove the folder and prepare it again.") from error
    fields = dataclasses.fields(CorpusInfo)
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if not isinstance(values, dict) or not needed <= set(values) <= names:
        raise ValueError(
            f"{path} does not hold exactly the entries {sorted(names)}. Remove the folder and prepare again."
        )
    return CorpusInfo(**values)


def write_info(info: CorpusInfo, output: Path) -> None:
    """Only for a folder that nobody else sees yet: the file is written in place."""
    text = json.dumps(dataclasses.asdict(info), indent=2)
    (output / INFO).write_text(text + "\n", encoding="utf-8")

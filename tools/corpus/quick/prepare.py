"""From text to a folder that training reads: tokenizer, documents, figures."""

from __future__ import annotations

import dataclasses
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from time import perf_counter, time
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import IndexedDataset, IndexedWriter
from tools.common.files import append, make_folder, naming, nearest, remove
from tools.common.log import progress as progress_of
from tools.common.signals import ending_on_sigterm
from tools.common.workers import usable_cores
from tools.corpus.quick.corpus_info import (
    HELD_OUT,
    INFO,
    TOKENIZER,
    TRAIN,
    CorpusInfo,
    check_shards,
    in_words,
    load_corpus,
    read_info,
    write_info,
    write_shards,
)
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.quick.text_sources import EmbeddedSource, Source, TextSource
from tools.corpus.sentences import LEFT_OUT, check_language, split_sentences
from tools.corpus.tokenize.documents import COUNTS, batches, encode_documents, entropy
from tools.corpus.tokenizers.sentencepiece import SentencePieceTokenizer

_log = logging.getLogger(__name__)

# --- Sentences on their way to the tokenizer, in a text file, so that a corpus need not fit into memory ---------------


class Spool:
    """One sentence a line; an empty line ends a document."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.words: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """int64 (documents,): words of each document, between spaces."""
        self.sentences = 0
        self.left_out = dict.fromkeys(LEFT_OUT, 0)

    def write(self, documents: Iterable[str], language: str) -> None:
        """Splits documents into sentences; one without any is left out."""
        words: list[int] = []
        with self._path.open("w", encoding="utf-8", newline="\n") as file:
            for document in documents:
                if sentences := split_sentences(document, language, self.left_out):
                    file.write("\n".join(sentences) + "\n\n")
                    words.append(sum(len(sentence.split()) for sentence in sentences))
                    self.sentences += len(sentences)
        self.words = np.array(words, dtype=np.int64)

    def documents(self) -> Iterator[list[str]]:
        """The sentences of each document."""
        with self._path.open(encoding="utf-8", newline="\n") as file:
            sentences: list[str] = []
            for line in file:
                if line == "\n":
                    yield sentences
                    sentences = []
                else:
                    sentences.append(line[:-1])


# --- Folders that appear whole or not at all, also when two processes make the same one -------------------------------


@contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """An empty folder beside `output`, removed at the end with whatever is left in it, also where SIGTERM is that end.
    Those that a kill has left a day ago are removed.

    Raises:
        OSError: the disk is full; it names `output`, which an error of a write to an open file does not.
    """
    make_folder(output.parent)
    _sweep(output)
    draft = output.with_name(f".{output.name}.{uuid.uuid4().hex}.tmp")
    with ending_on_sigterm():
        draft.mkdir()
        try:
            with naming(output):
                yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


_DAY = 86400.0  # longer than any preparation is silent
_HEX = "[0-9a-f]" * 32


def _sweep(output: Path) -> None:
    """Removes what `draft_of` has made for the same folder, and could not remove."""
    for left in output.parent.glob(f".{glob.escape(output.name)}.{_HEX}.tmp"):
        with suppress(OSError):
            newest = max(each.lstat().st_mtime for each in (left, *left.iterdir()))
            if time() - newest > _DAY:
                remove(left)


def publish(draft: Path, output: Path, is_current: Callable[[], bool]) -> None:
    """Renames `draft` to `output`, in the place of an older folder if there is one.

    A folder cannot be replaced by another in one step, so an older one is first moved aside. Whoever finds that
    somebody else was faster, and that what is there now is as good (`is_current`), leaves it.
    """
    while not is_current():
        try:
            os.rename(draft, output)
        except OSError:
            if not output.is_dir():
                raise
            # It is gone when another process has just moved it; then we look again.
            with draft_of(output) as aside, suppress(FileNotFoundError):
                os.rename(output, aside / "older")
        else:
            return


@contextmanager
def taking_turns(output: Path) -> Iterator[None]:
    """Lets processes on one machine that want the same folder wait for one another, so that one of them does the work.

    It saves work and is not needed for correctness: a file system that knows no locks is no obstacle.
    """
    make_folder(output.parent)
    path = output.with_name(f".{output.name}.lock")
    with append(path) as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


# --- From text to a folder that training reads ------------------------------------------------------------------------

EMBEDDED = "embedded"
VERSION = 1
"""Part of the fingerprint: raised whenever the same text would be prepared differently."""
TOKENIZER_SENTENCES = 2_000_000
"""More do not change a vocabulary for the better; of a larger corpus every n-th sentence is used."""
_BLOCK = 1 << 22
_Item = TypeVar("_Item")


def prepare(
    source: str,
    output: Path,
    *,
    vocab_size: int,
    held_out: float = 0.02,
    seed: int = 0,
    shards: int = 1,
    language: str = "en",
    progress: bool = False,
    check: Callable[[Path], object] = lambda _: None,
) -> CorpusInfo:
    """Splits text into sentences, trains a tokenizer on it and writes the documents as ids.

    `output` then holds tokenizer.model, train.bin/.idx, heldout.bin/.idx and corpus.json. It appears whole or not at
    all. If it is there already, made from the same text with the same settings, nothing is written, also where it is a
    copy without some of the shards; if the text or a setting has changed, it is replaced, and the log says what has
    changed.

    Args:
        source: "embedded", a UTF-8 text file, or a folder of *.txt files; in text a blank line ends a document.
        output: the folder.
        vocab_size: pieces of the tokenizer.
        held_out: share of the words that is kept from training, in whole documents, at least one. 0: none.
        seed: chooses the documents that are held out.
        shards: deals the training documents, whole ones, into so many file pairs of about as many tokens,
            train-00000-of-00008.bin/.idx and so on, so that machines can keep some of them on their own disks.
        language: ISO 639-1 code: its rules say where a sentence ends.
        progress: shows what is being done.
        check: called with the folder that is about to take the place of an older one. Where it raises, the older one
            stays.

    Raises:
        ValueError: a source that is missing, empty, not UTF-8 or too small for the vocabulary, for holding out or for
            the shards; a setting out of range; an output that exists and is no prepared corpus.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is a share of the words, from 0 to below 1. Got {held_out}.")
    if seed < 0:
        raise ValueError(f"seed must be at least 0. Got {seed}.")
    check_shards(shards)
    check_language(language)
    output = Path(output)
    nearest(output)
    text = open_source(source)
    settings = [VERSION, text.fingerprint(), vocab_size, float(held_out), seed, shards]
    # Folders of before were all prepared by the rules of English.
    settings += [] if language == "en" else [language]
    fingerprint = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
    path = source if source == EMBEDDED else str(Path(source).absolute())
    if not _is_current(output, fingerprint):
        _check_replaceable(output)
        with taking_turns(output), draft_of(output) as draft:
            if not _is_current(output, fingerprint):
                train, aside, told = _write_ids(
                    text,
                    draft,
                    source=path,
                    vocab_size=vocab_size,
                    held_out=held_out,
                    seed=seed,
                    shards=shards,
                    language=language,
                    progress=progress,
                )
                info = CorpusInfo(
                    source=path,
                    vocab_size=vocab_size,
                    held_out=held_out,
                    seed=seed,
                    shards=shards,
                    documents=train["documents"] + aside["documents"],
                    sentences=train["sentences"] + aside["sentences"],
                    words=train["words"] + aside["words"],
                    pieces=train["tokens"] + aside["tokens"],
                    train_documents=train["documents"],
                    train_pieces=train["tokens"],
                    held_out_documents=aside["documents"],
                    held_out_pieces=aside["tokens"],
                    unigram_entropy=unigram_entropy(IndexedDataset(draft / TRAIN), vocab_size),
                    fingerprint=fingerprint,
                    files_without_text=len(text.without_text),
                    language=language,
                    **told,
                )
                write_shards(draft, shards, vocab_size=vocab_size)
                write_info(info, draft)
                if (older := _info_of_older(output)) is not None:
                    check(draft)
                publish(draft, output, is_current=lambda: _is_current(output, fingerprint))
                _tell(info, older, output, text.without_text)
    return read_info(output)


def open_source(source: str) -> Source:
    return EmbeddedSource() if source == EMBEDDED else TextSource(Path(source))


def choose_held_out(words: NDArray[np.int64], share: float, seed: int) -> NDArray[np.bool_]:
    """bool (documents,): True for those held out.

    Documents are taken in random order; one that would exceed the share of the words is passed over. If none fits, the
    shortest is taken.

    Raises:
        ValueError: something is to be held out and there is one document only.
    """
    chosen = np.zeros(len(words), dtype=np.bool_)
    if share == 0:
        return chosen
    if len(words) < 2:
        raise ValueError(
            "the corpus is a single document, so none can be held out for evaluation. Separate documents by blank "
            "lines; tools.pretrain also trains without (data.held_out = 0)."
        )
    left = share * float(words.sum())
    for document in np.random.default_rng(seed).permutation(len(words)).tolist():
        if words[document] <= left:
            chosen[document] = True
            left -= float(words[document])
    if not chosen.any():
        chosen[np.argmin(words)] = True
    return chosen


def unigram_entropy(dataset: IndexedDataset, vocab_size: int) -> float:
    """Entropy of the frequencies of the pieces, in nats a piece."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(dataset.ids), _BLOCK):
        counts += np.bincount(dataset.ids[start : start + _BLOCK], minlength=vocab_size)
    return entropy(counts)


def _write_ids(
    text: Source,
    draft: Path,
    *,
    source: str,
    vocab_size: int,
    held_out: float,
    seed: int,
    shards: int,
    language: str,
    progress: bool,
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Writes the tokenizer and both datasets, the training documents in one; returns the `COUNTS` of each, and what
    was left out of the text, or changed for the tokenizer's training."""
    path = draft / "sentences.spool"
    spool = Spool(path)
    spool.write(_shown(text.documents(), "reading", "documents", progress), language)
    if not len(spool.words):
        raise ValueError(
            f"the corpus is empty: not one document of {source!r} has a sentence. Name a source with text in it."
        )
    aside = choose_held_out(spool.words, held_out, seed)
    check_shards(shards, int((~aside).sum()))

    training = compress(spool.documents(), ~aside)
    sentences = (sentence for document in training for sentence in document)
    sampled = islice(sentences, 0, None, -(-spool.sentences // TOKENIZER_SENTENCES))
    told = train_tokenizer(
        _shown(sampled, "training the tokenizer", "sentences", progress), draft / TOKENIZER, vocab_size=vocab_size
    )

    tokenizer = SentencePieceTokenizer(draft / TOKENIZER, threads=usable_cores())
    counts: tuple[dict[str, int], dict[str, int]] = (dict.fromkeys(COUNTS, 0), dict.fromkeys(COUNTS, 0))
    documents = _shown(zip(spool.documents(), aside, strict=True), "tokenising", "documents", progress)
    with (
        IndexedWriter(draft / TRAIN, vocab_size=vocab_size) as train,
        IndexedWriter(draft / HELD_OUT, vocab_size=vocab_size) as kept,
    ):
        for some in batches(documents, lambda pair: sum(map(len, pair[0]))):
            for writer, added, wanted in zip((train, kept), counts, (False, True), strict=True):
                if chosen := [document for document, is_aside in some if is_aside == wanted]:
                    writer.add_documents(*encode_documents(chosen, tokenizer, added))
    path.unlink()
    left_out = {name: spool.left_out[name] + sum(count[name] for count in counts) for name in LEFT_OUT}
    return *counts, {**left_out, **told}


def _is_current(output: Path, fingerprint: str) -> bool:
    """Whether the folder is a sound corpus made from the same text and settings."""
    try:
        return load_corpus(output).info.fingerprint == fingerprint
    except ValueError:
        return False


def _info_of_older(output: Path) -> CorpusInfo | None:
    """What the corpus says of itself that is about to be replaced; None where there is none, or it is damaged."""
    try:
        return read_info(output)
    except ValueError:
        return None


_COMPARED = ("source", "language", "vocab_size", "held_out", "seed", "shards")


def _tell(info: CorpusInfo, older: CorpusInfo | None, output: Path, without_text: Sequence[Path]) -> None:
    """Says in the log what a user of the same name or a folder of many files would not notice."""
    if without_text:
        more = f", and {len(without_text) - 1:,} more" if len(without_text) > 1 else ""
        _log.warning("%s has no text%s: left out of the corpus.", without_text[0].absolute(), more)
    if older is not None and older.fingerprint != info.fingerprint:
        # A corpus of before has its source as it was named, and tells no language.
        named = older.source if older.source == EMBEDDED else str(Path(older.source).absolute())
        before = dataclasses.asdict(older) | {"source": named, "language": older.language or info.language}
        pairs = [(name, before[name], getattr(info, name)) for name in _COMPARED]
        changes = [f"{name} was {was}, is {now}" for name, was, now in pairs if was != now]
        changed = "; ".join(changes) or f"the text of {info.source} has changed"
        _log.warning("%s held another corpus, which is replaced: %s.", output.absolute(), changed)


def _check_replaceable(output: Path) -> None:
    """Refuses to replace what is not ours."""
    if output.exists() and not (output / INFO).is_file() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists and is no prepared corpus; it is not overwritten. Choose another output.")


def _shown(items: Iterable[_Item], what: str, unit: str, shown: bool) -> Iterator[_Item]:
    yield from progress_of(items, desc=what, unit=f" {unit}", shown=shown, lines=True)


# --- `python -m tools.corpus prepare`: a small corpus in one go -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """Prepare a small corpus in one go: sentences, a tokenizer, documents of ids. Pre-training does it by itself.

    A folder that is up to date is left as it is.
    """

    output: Path
    """Folder to write."""
    source: str = "embedded"
    """"embedded", a UTF-8 text file, or a folder of *.txt files. In text a blank line ends a document."""
    vocab_size: int = 2048
    """Pieces of the tokenizer."""
    held_out: float = 0.02
    """Share of the words kept from training, 0 to below 1."""
    seed: int = 0
    """Chooses the documents that are held out."""
    shards: int = 1
    """File pairs into which the training documents are dealt, for disks of single machines."""
    language: str = "en"
    """ISO 639-1 code: its rules say where a sentence ends."""


def run(command: PrepareCommand) -> str:
    """Prepares the corpus; what it has come to, in words."""
    start = perf_counter()
    info = prepare(
        command.source,
        command.output,
        vocab_size=command.vocab_size,
        held_out=command.held_out,
        seed=command.seed,
        shards=command.shards,
        language=command.language,
        progress=sys.stderr.isatty(),
    )
    return f"{command.output}: ready in {perf_counter() - start:.1f} s\n{in_lines(info)}"


def in_lines(info: CorpusInfo) -> str:
    """What the corpus has come to."""
    dealt = f", dealt into {info.shards} shards" if info.shards > 1 else ""
    return "\n".join(
        [
            f"  text        {info.words:,} words, {info.sentences:,} sentences, {info.documents:,} documents",
            f"  vocabulary  {info.vocab_size:,} pieces, unigram entropy {info.unigram_entropy:.3f} nats a piece",
            *([f"  its training {in_words(info.trained_on)}"] if info.trained_on else []),
            *([f"  not text    {info.omissions}"] if info.omissions else []),
            f"  training    {info.train_pieces:,} pieces in {info.train_documents:,} documents{dealt}",
            f"  held out    {info.held_out_pieces:,} pieces in {info.held_out_documents:,} documents",
        ]
    )

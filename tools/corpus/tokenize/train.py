"""`python -m tools.corpus tokenizer`: a vocabulary, trained on documents or taken as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tools.common.files import write_file
from tools.corpus.pipeline import Manifest, Options, Stage, Team
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.sentences import check_language
from tools.corpus.tokenize.documents import (
    document_files,
    fingerprint_documents,
    ranges_of,
    read_sample,
    share_out,
    write_sample,
)
from tools.corpus.tokenizers import FILES, Kind, Tokenizer, install_tokenizer
from tools.corpus.tokenizers.base import missing
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.corpus.tokenizers.wordpiece import guess_accents

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions(Options):
    """Train a sentencepiece model on documents (--docs), or check a tokenizer that is there and take it as it is
    (--vocab-file, --model-file or --tokenizer-file)."""

    docs: tuple[Path, ...] = ()
    """Outputs of the step extract, to train on."""
    model: Literal["unigram", "bpe", "bpe-bytes"] = "unigram"
    """What is trained: a sentencepiece model, or merges of bytes in a tokenizer.json, as GPT-2 and RoBERTa have them:
    no character is unknown."""
    vocab_size: int = 30_000
    """Pieces to train, the special tokens among them."""
    sentences: int = 200_000
    """Sentences to train on, drawn evenly from the documents. Each costs some 3 kB of memory."""
    lowercase: bool = False
    """The trained model folds case."""
    character_coverage: float = 0.9995
    """Share of the characters of the text that get pieces of their own; for scripts with few characters 1.0. Bytes make
    all of them."""
    language: str = "en"
    """ISO 639-1 code: its rules say where a sentence ends."""
    seed: int = 0
    """Chooses the documents to train on."""
    vocab_file: Path | None = None
    """A WordPiece vocab.txt, such as BERT's."""
    cased: bool = False
    """The --vocab-file is a cased one: text keeps its capitals and accents."""
    strip_accents: bool | None = None
    """Whether text loses its accents before it is looked up in the --vocab-file. Default: with --cased it keeps them;
    else it keeps them where the vocabulary has pieces with accents, which is said."""
    model_file: Path | None = None
    """A sentencepiece model."""
    tokenizer_file: Path | None = None
    """A tokenizer.json of the tokenizers library."""


def tokenizer(options: TokenizerOptions, team: Team) -> Manifest:
    """Writes the tokenizer's file and tokenizer-settings.json, for `load_tokenizer`.

    Raises:
        ValueError: not exactly one source, an option out of range, a file that is no tokenizer or lacks a special
            token, documents that are too few for the vocabulary.
    """
    given = {
        "--vocab-file": options.vocab_file,
        "--model-file": options.model_file,
        "--tokenizer-file": options.tokenizer_file,
        "--docs": options.docs or None,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ValueError(
            f"the tokenizer comes from exactly one of {', '.join(given)}. Got {' and '.join(named) or 'none of them'}."
        )
    if options.cased and options.vocab_file is None:
        raise ValueError("--cased speaks of a --vocab-file; a trained model keeps case unless --lowercase is given.")
    if options.strip_accents is not None and options.vocab_file is None:
        raise ValueError(
            f"--strip-accents speaks of a --vocab-file. Got {options.strip_accents} with {named[0]}; leave it out."
        )
    return _train(options, team) if options.docs else _take(options, team)


def _take(options: TokenizerOptions, team: Team) -> Manifest:
    sources: dict[Kind, Path | None] = {
        "wordpiece": options.vocab_file,
        "sentencepiece": options.model_file,
        "json": options.tokenizer_file,
    }
    kind, file = next((kind, file) for kind, file in sources.items() if file is not None)
    lowercase, strip_accents = kind == "wordpiece" and not options.cased, options.strip_accents
    if lowercase and strip_accents is None:
        strip_accents, told = guess_accents(file)
        if team.rank == 0:
            _log.info("%s; --strip-accents True or False says otherwise", told)
    case: dict[str, Any] = {"lowercase": lowercase, "strip_accents": strip_accents}
    made = open_tokenizer(kind, file, **case)
    _ = made.special  # samples need all of them
    settings = {"kind": kind, "fingerprint": made.fingerprint}
    with Stage.open(options, "tokenizer", settings, team) as step:
        if step.done:
            return step.manifest
        return step.finish(step.on_first(lambda: _counts(install_tokenizer(kind, file, step.folder, **case))))


def _train(options: TokenizerOptions, team: Team) -> Manifest:
    _check_training(options)
    files = document_files(options.docs)
    kind: Kind = "json" if options.model == BYTES else "sentencepiece"
    settings = {
        "kind": kind,
        "docs": fingerprint_documents(files),
        **{
            name: getattr(options, name)
            for name in ("model", "vocab_size", "sentences", "lowercase", "character_coverage", "language", "seed")
        },
    }
    with Stage.open(options, "tokenizer", settings, team) as step:
        if step.done:
            return step.manifest
        units = share_out(ranges_of(files), options.sentences)
        results = step.run("sample", units, partial(write_sample, seed=options.seed, language=options.language))

        def train() -> dict[str, Any]:
            file, sample, told = step.scratch / FILES[kind], read_sample(units, step.scratch), {}
            if options.model == "bpe-bytes":
                if not any(result["sentences"] for result in results):
                    raise ValueError("the documents have no sentence to train on. Name others, or extract them anew.")
                train_bytes(sample, file, vocab_size=options.vocab_size, lowercase=options.lowercase)
            else:
                told = train_tokenizer(
                    sample,
                    file,
                    vocab_size=options.vocab_size,
                    model=options.model,
                    lowercase=options.lowercase,
                    character_coverage=options.character_coverage,
                )
            made = install_tokenizer(kind, file, step.folder)
            return {**_counts(made), "sentences": sum(result["sentences"] for result in results), **told}

        return step.finish(step.on_first(train))


def _check_training(options: TokenizerOptions) -> None:
    check_language(options.language)
    for name, least in (("vocab_size", 1), ("sentences", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}. Got {getattr(options, name)}.")

    if options.model == BYTES and options.character_coverage != TokenizerOptions.character_coverage:
        raise ValueError(
            f"--character-coverage says nothing of --model {BYTES}, whose bytes make every character. Got "
            f"{options.character_coverage}; leave it out."
        )


# --- Merges of bytes (Radford et al. 2019, section 2.2; RoBERTa's too) ------------------------------------------------

BYTES: Literal["bpe-bytes"] = "bpe-bytes"
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""With RoBERTa's names and ids."""
_ALPHABET = 256


def train_bytes(sentences: Iterable[str], path: Path, *, vocab_size: int, lowercase: bool = False) -> None:
    """Trains byte-pair encoding over bytes and writes it to `path`, a tokenizer.json. The same sentences give the same
    pieces.

    A space goes to the word behind it, and each sentence begins with one, so that a word has the same pieces wherever
    it stands, and a piece tells whether it begins a word.

    Args:
        vocab_size: pieces, with 5 special tokens and 256 bytes.
        lowercase: the model folds case, also in the text that it is given later.

    Raises:
        ValueError: a vocabulary without room for all bytes, or one that the text is too small for.
    """
    least = _ALPHABET + len(_SPECIAL)
    if vocab_size < least:
        raise ValueError(
            f"--vocab-size must be at least {least} with --model {BYTES}: 256 bytes and {len(_SPECIAL)} special "
            f"tokens. Got {vocab_size}."
        )
    try:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    except ImportError as error:
        raise missing("tokenizers", error) from error
    library = Library(models.BPE())
    if lowercase:
        library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(sentences, trainer)
    if (found := library.get_vocab_size()) < vocab_size:
        raise ValueError(
            f"the text has too few different words for --vocab-size {vocab_size}: merges of its bytes come to {found} "
            "pieces. Train on more text, or ask for fewer pieces."
        )
    write_file(path, library.to_str(pretty=True) + "\n")


def _counts(made: Tokenizer) -> dict[str, Any]:
    return {"vocab_size": made.vocab_size}

"""`python -m tools.corpus tokenize`: documents to ids, in one indexed dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tensor3d.data.indexed_dataset import IndexedWriter
from tools.corpus.pipeline import Manifest, Options, Stage, Team, read_manifest
from tools.corpus.sentences import check_language
from tools.corpus.tokenize.documents import (
    COUNTS,
    DocumentRange,
    document_files,
    fingerprint_documents,
    ranges_of,
    read_part,
    write_part,
)
from tools.corpus.tokenizers import copy_tokenizer, load_tokenizer

DOCUMENTS, TOKENIZER = "documents", "tokenizer"
"""What lies in the output: DOCUMENTS.bin and .idx, and a folder with the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(Options):
    """Split documents into sentences and write their ids: a sentence an item, with the bounds of documents."""

    docs: tuple[Path, ...]
    """Outputs of the step extract, in the order in which they follow one another."""
    tokenizer: Path
    """Output of the step tokenizer."""
    language: str = "en"
    """ISO 639-1 code: its rules say where a sentence ends."""
    most_unknown: float = 0.2
    """Share of unknown tokens, or of characters in words that are unknown for their length, in 1 to 16 MiB of
    documents, above which the tokenizer is taken for a wrong one."""


def tokenize(options: TokenizeOptions, team: Team) -> Manifest:
    """Writes documents.bin and .idx, and the folder tokenizer/ with the tokenizer that made them.

    Raises:
        ValueError: an input that is missing or of another step, an option out of range, not one sentence in all
            documents.
        BadInput: a damaged line, or a tokenizer that is not for the text.
    """
    _check(options)
    made = load_tokenizer(read_manifest(options.tokenizer, "tokenizer").folder)
    files = document_files(options.docs)
    settings = {
        "docs": fingerprint_documents(files),
        "tokenizer": made.fingerprint,
        "language": options.language,
        "most_unknown": options.most_unknown,
    }
    with Stage.open(options, "tokenize", settings, team) as step:
        if step.done:
            return step.manifest
        work = partial(
            write_part,
            tokenizer=options.tokenizer.absolute(),
            fingerprint=made.fingerprint,
            language=options.language,
            most_unknown=options.most_unknown,
        )
        units = ranges_of(files, evenly=True)
        results = step.run("ids", units, work)
        counts = {name: sum(result.get(name, 0) for result in results) for name in COUNTS}
        if not counts["documents"]:
            raise ValueError(
                f"not one document of {', '.join(map(str, options.docs))} has a sentence. Name documents with text in "
                "them."
            )
        step.on_first(lambda: _publish(step, units, options.tokenizer, made.vocab_size))
        return step.finish({**counts, "vocab_size": made.vocab_size})


def _publish(step: Stage, units: Sequence[DocumentRange], tokenizer: Path, vocab_size: int) -> None:
    """The parts of all units as one pair of files, one part after another."""
    with IndexedWriter(step.scratch / DOCUMENTS, vocab_size=vocab_size) as writer:
        for unit in units:
            writer.add_documents(*read_part(unit, step.scratch, vocab_size))
    for kind in ("bin", "idx"):
        os.replace(step.scratch / f"{DOCUMENTS}.{kind}", step.folder / f"{DOCUMENTS}.{kind}")
    copy_tokenizer(tokenizer, step.folder / TOKENIZER)


def _check(options: TokenizeOptions) -> None:
    if not options.docs:
        raise ValueError("--docs names no folder; give at least one output of `python -m tools.corpus extract`.")
    check_language(options.language)
    if not 0 <= options.most_unknown <= 1:
        raise ValueError(f"--most-unknown is a share of the tokens, 0 to 1. Got {options.most_unknown}.")

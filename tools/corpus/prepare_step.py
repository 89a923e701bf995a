"""`python -m tools.corpus prepare`: a small corpus in one go."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tools.corpus.info import CorpusInfo
from tools.corpus.prepare import prepare


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
        progress=sys.stderr.isatty(),
    )
    return f"{command.output}: ready in {perf_counter() - start:.1f} s\n{_words(info)}"


def _words(info: CorpusInfo) -> str:
    dealt = f", dealt into {info.shards} shards" if info.shards > 1 else ""
    return "\n".join(
        [
            f"  text        {info.words:,} words, {info.sentences:,} sentences, {info.documents:,} documents",
            f"  vocabulary  {info.vocab_size:,} pieces, unigram entropy {info.unigram_entropy:.3f} nats a piece",
            f"  training    {info.train_pieces:,} pieces in {info.train_documents:,} documents{dealt}",
            f"  held out    {info.held_out_pieces:,} pieces in {info.held_out_documents:,} documents",
        ]
    )

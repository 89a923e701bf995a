"""`python -m tools.corpus prepare --source embedded --output DIR --vocab-size 2048`"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import tyro

from tools.corpus.prepare import prepare

app = tyro.extras.SubcommandApp()


@app.command(name="prepare")
def prepare_corpus(
    *,
    output: Path,
    source: str = "embedded",
    vocab_size: int = 2048,
    held_out: float = 0.02,
    seed: int = 0,
    shards: int = 1,
) -> None:
    """Prepares a corpus for pre-training: sentences, a tokenizer, documents of ids.

    A folder that is up to date is left as it is.

    Args:
        output: Folder to write.
        source: "embedded", a UTF-8 text file, or a folder of *.txt files. In text a blank line ends a document.
        vocab_size: Pieces of the tokenizer.
        held_out: Share of the words kept from training, 0 to below 1.
        seed: Chooses the documents that are held out.
        shards: File pairs into which the training documents are dealt, for disks of single machines.
    """
    start = perf_counter()
    info = prepare(
        source,
        output,
        vocab_size=vocab_size,
        held_out=held_out,
        seed=seed,
        shards=shards,
        progress=sys.stderr.isatty(),
    )
    print(f"{output}: ready in {perf_counter() - start:.1f} s")
    print(f"  text        {info.words:,} words, {info.sentences:,} sentences, {info.documents:,} documents")
    print(f"  vocabulary  {info.vocab_size:,} pieces, unigram entropy {info.unigram_entropy:.3f} nats a piece")
    print(
        f"  training    {info.train_pieces:,} pieces in {info.train_documents:,} documents"
        + (f", dealt into {info.shards} shards" if info.shards > 1 else "")
    )
    print(f"  held out    {info.held_out_pieces:,} pieces in {info.held_out_documents:,} documents")


def main() -> int:
    """Exit status 2 for what the user can mend, said in one line."""
    try:
        app.cli(prog="python -m tools.corpus")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

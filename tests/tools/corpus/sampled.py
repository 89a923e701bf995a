"""Small corpora of which every id says where it stood, and samples of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensor3d.data import IndexedWriter, StoredShard
from tools.corpus.pipeline import Manifest, local_team
from tools.corpus.pipeline.step import write_manifest
from tools.corpus.samples.options import SamplesOptions
from tools.corpus.samples.reader import Samples, open_samples
from tools.corpus.samples.step import samples
from tools.corpus.tokenizers import install_tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FIRST = len(SPECIAL)
"""The first id of text."""
Documents = list[list[list[int]]]


def write_tokenizer(folder: Path, pieces: int, *, every_third_goes_on: bool = False) -> Path:
    """A vocabulary of so many pieces of text; in one kind those whose id divides by 3 go on a word."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [
        f"##p{number}" if every_third_goes_on and number % 3 == 0 else f"p{number}"
        for number in range(FIRST, FIRST + pieces)
    ]
    vocabulary = folder / "draft.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *names]) + "\n")
    install_tokenizer("wordpiece", vocabulary, folder, lowercase=True)
    vocabulary.unlink()
    return folder


def unique_ids(documents: int, seed: int = 0, first: int = FIRST) -> Documents:
    """Documents of 1 to 6 sentences of 2 to 6 ids; every id occurs once, in order."""
    rng = np.random.default_rng(seed)
    made: Documents = []
    for _ in range(documents):
        made.append([])
        for size in rng.integers(2, 7, size=rng.integers(1, 7)).tolist():
            made[-1].append(list(range(first, first + size)))
            first += size
    return made


def write_ids(folder: Path, documents: Documents, *, pieces: int = 4000, **vocabulary: Any) -> Path:
    """A folder as the step `tokenize` leaves it."""
    write_tokenizer(folder / "tokenizer", pieces, **vocabulary)
    with IndexedWriter(folder / "documents", vocab_size=FIRST + pieces) as writer:
        for document in documents:
            writer.add_document(document)
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    write_manifest(Manifest(step="tokenize", settings={}, counts={}, files=files, left_out=0, folder=folder))
    return folder


def options(output: Path, *corpora: object, **changes: Any) -> SamplesOptions:
    small: dict[str, Any] = {"max_length": 16, "run_tokens": 200, "held_out": 0.1, "max_sequences": 4}
    return SamplesOptions(output=output, corpora=tuple(map(str, corpora)), **{**small, **changes})


def made(output: Path, *corpora: object, workers: int = 1, **changes: Any) -> Samples:
    samples(options(output, *corpora, **changes), local_team(workers))
    return open_samples(output)


def content(shard: StoredShard | None) -> list[tuple[list[int], list[int], int]]:
    """A, B and the label of each sequence."""
    assert shard is not None
    found = shard.segments(np.arange(len(shard)))
    sizes = np.stack([found.a_length, found.b_length], axis=1).reshape(-1)
    parts = [part.tolist() for part in np.split(found.ids, np.cumsum(sizes)[:-1])]
    return list(zip(parts[::2], parts[1::2], found.label.tolist(), strict=True))


def training(opened: Samples) -> list[tuple[list[int], list[int], int]]:
    return [sequence for shard in opened.shards for sequence in content(shard)]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

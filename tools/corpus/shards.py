"""The training documents in one file pair or in several, of which a machine may hold some only."""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import IndexedDataset, IndexedWriter

TRAIN = "train"
_KINDS = ("bin", "idx")


def shard_names(shards: int) -> list[str]:
    """Names of the file pairs, without .bin and .idx."""
    return [TRAIN] if shards == 1 else [f"{TRAIN}-{i:05d}-of-{shards:05d}" for i in range(shards)]


def deal_documents(tokens: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """int64 (documents,): the shard of each document; every shard gets one at least.

    The longest documents come first, each to the shard with the fewest tokens (longest processing time first; Graham,
    1969), so no shard is ahead of another by more than its own shortest document.

    Args:
        tokens: int64 (documents,), of each document, above 0.
        shards: how many.

    Raises:
        ValueError: fewer than one, or more shards than documents.
    """
    check_shards(shards, len(tokens))
    dealt = np.empty(len(tokens), dtype=np.int64)
    filled = [(0, shard) for shard in range(shards)]
    for document in np.argsort(-tokens, kind="stable").tolist():
        total, shard = filled[0]
        dealt[document] = shard
        heapq.heapreplace(filled, (total + int(tokens[document]), shard))
    return dealt


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

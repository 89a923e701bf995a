"""Small datasets for the tests of this folder."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensor3d.data import (
    IndexedDataset,
    IndexedWriter,
    PackedBatch,
    PretrainingData,
    ShardedPairs,
    SpecialTokens,
    TrainBatch,
)

VOCABULARY = SpecialTokens(vocab_size=100, pad=0, cls=2, sep=3, mask=4)


def write(prefix: Path, documents: list[list[list[int]]], vocab_size: int = 100) -> IndexedDataset:
    """A dataset of documents of sentences of ids."""
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def write_random(prefix: Path, *, documents: int, seed: int = 0, longest: int = 12) -> IndexedDataset:
    """Documents of 1 to 9 sentences of 1 to `longest` ordinary ids."""
    rng = np.random.default_rng(seed)
    return write(
        prefix,
        [
            [rng.integers(5, 100, size=rng.integers(1, longest + 1)).tolist() for _ in range(rng.integers(1, 10))]
            for _ in range(documents)
        ],
    )


def pretraining(*shards: IndexedDataset, **limits: Any) -> PretrainingData:
    """Data of the sample vocabulary; the seed is that of the pairs too."""
    source = ShardedPairs(shards, max_length=limits["max_length"], seed=limits["seed"])
    return PretrainingData(source, VOCABULARY, **limits)


@contextmanager
def files_to_open(more: int) -> Iterator[None]:
    """This process may open so many more files; it can still raise that limit itself."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/dev/fd")}
    free = (number for number in count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def same_batch(left: PackedBatch, right: PackedBatch) -> bool:
    names = [
        field.name for field in fields(PackedBatch) if field.name not in ("sequences", "read", "draws", "planes_alike")
    ]
    alike = all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)
    return alike and left.sequences.lengths == right.sequences.lengths


def same_step(left: TrainBatch, right: TrainBatch) -> bool:
    names = ("index", "targets", "sequences", "tokens", "fill", "imbalance")
    alike = all(getattr(left, name) == getattr(right, name) for name in names)
    return alike and all(map(same_batch, left.batches, right.batches))

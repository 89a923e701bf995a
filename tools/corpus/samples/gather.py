"""The second phase: each shard gathers its pieces of all parts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tensor3d.data import IndexedWriter
from tensor3d.data.masking import masked_counts
from tensor3d.data.stored import LABELS, MASKS
from tools.corpus.samples.draw import PARTS, DrawRules
from tools.corpus.samples.parts import Piece, read_piece
from tools.corpus.work import Context, Unit, draft


@dataclass(frozen=True, kw_only=True)
class GatherUnit(Unit):
    """A shard, or the held-out sequences; its name is that of its files."""

    pieces: tuple[Piece, ...]


def gather(rules: DrawRules, unit: GatherUnit, context: Context) -> dict[str, Any]:
    """Writes the files of a shard. Returns its sequences, its tokens and its histogram of lengths."""
    pieces = np.zeros(rules.special.vocab_size, dtype=np.int64)
    prefix = context.folder / unit.name
    histogram = np.zeros(rules.max_length + 1, dtype=np.int64)
    with ExitStack() as stack:
        text = stack.enter_context(IndexedWriter(prefix, vocab_size=rules.largest))
        masks = None
        if rules.static:
            beside = prefix.with_name(f"{prefix.name}.{MASKS}")
            masks = stack.enter_context(IndexedWriter(beside, vocab_size=rules.largest))
        labels = None
        if not rules.single:
            labels = stack.enter_context(draft(prefix.with_name(f"{prefix.name}.{LABELS}")))
            _begin_labels(labels, sum(piece.end - piece.begin for piece in unit.pieces))
        for piece in unit.pieces:
            sequences = read_piece(context.scratch / PARTS, piece)
            count, each = sequences.items.shape
            text.add_documents(sequences.ids, sequences.items.reshape(-1), np.full(count, each))
            if masks is not None:
                counts = masked_counts(sequences.lengths)
                masks.add_documents(sequences.masks, np.repeat(counts, 2), np.full(count, 2))
            if labels is not None:
                labels.write(sequences.labels.tobytes())
            pieces += np.bincount(sequences.ids, minlength=len(pieces))
            histogram += np.bincount(sequences.lengths, minlength=len(histogram))
            context.progress(sequences.ids.nbytes)
    with draft(_counts_path(context.scratch, unit.name)) as file:
        np.save(file, pieces)
    tokens = int(histogram @ np.arange(len(histogram)))
    return {"sequences": int(histogram.sum()), "tokens": tokens, "histogram": histogram.tolist()}


def _begin_labels(file: BinaryIO, sequences: int) -> None:
    """What stands before the bytes of an array of so many labels: they are written as they come."""
    kind = np.lib.format.dtype_to_descr(np.dtype(np.uint8))
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (sequences,)})


def unigram_entropy(scratch: Path, shards: Iterable[str]) -> float:
    """Nats a token of the text in some shards, which have been gathered: the loss of a model that knows the
    frequencies only."""
    counts = np.sum([np.load(_counts_path(scratch, name)) for name in shards], axis=0)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _counts_path(scratch: Path, name: str) -> Path:
    return scratch / PARTS / f"{name}.counts.npy"

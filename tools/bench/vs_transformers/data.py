"""What `bench library` trains on: the packs of pre-training, and the very same sequences in padded batches.

B sequences of a padded batch, W its width in tokens, R masked tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d import CubeShape
from tensor3d.data import Loader, PackedBatch, PretrainingData, SpecialTokens, TrainBatch
from tensor3d.data.packed_batch import IGNORED
from tensor3d.packing import packs_per_step
from tools.bench.harness.synthetic_data import RandomPairs

FULL, PADDED, SORTED = "full", "padded", "sorted"
"""Kinds of padded batches: sequences that fill their rows; of many lengths, in the order in which they come; of many
lengths, sorted within the step, each batch as wide as its longest sequence."""
_EPOCH = 10_000  # sequences that are drawn and packed together
_MOST_IN_A_PACK = 12  # of as many tokens as the longest sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence, after masking."""

    ids: NDArray[np.int64]
    """int64 (tokens,)"""
    types: NDArray[np.int64]
    """int64 (tokens,)"""
    masked: NDArray[np.int64]
    """int64 (masked,): places to guess, in the sequence."""
    labels: NDArray[np.int64]
    """int64 (masked,): what stood there."""
    next_label: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch:
    """A micro-batch as `transformers` takes it."""

    ids: Tensor
    """int64 (B, W)"""
    types: Tensor
    """int64 (B, W)"""
    mask: Tensor | None
    """int64 (B, W): 1 where a token is; None where nothing is padded."""
    labels: Tensor
    """int64 (B, W): what stood at the masked places, -100 elsewhere."""
    rows: Tensor
    """int64 (R,): the masked places, as rows of (B * W)."""
    row_labels: Tensor
    """int64 (R,): what stood there."""
    next_labels: Tensor
    """int64 (B,)"""

    @property
    def slots(self) -> int:
        return self.ids.numel()

    def to(self, device: torch.device) -> PaddedBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: Any = {name: value if value is None else value.to(device) for name, value in values.items()}
        return PaddedBatch(**moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """A step, for both. All tensors lie on the device."""

    step: TrainBatch
    padded: list[PaddedBatch]

    @property
    def padded_slots(self) -> int:
        return sum(batch.slots for batch in self.padded)

    @property
    def packed_slots(self) -> int:
        return sum(batch.ids.numel() for batch in self.step.batches)


def samples_of(batch: PackedBatch) -> list[Sample]:
    """The sequences of a packed micro-batch of one device, in its order."""
    length_at = dict(zip(batch.sequences.starts, batch.sequences.lengths, strict=True))
    used = batch.masked >= 0
    masked, labels = batch.masked[used].numpy(), batch.masked_labels[used].numpy()
    real = batch.first >= 0
    samples = []
    for first, label in zip(batch.first[real].tolist(), batch.next_labels[real].tolist(), strict=True):
        end = first + length_at[first]
        here = slice(*np.searchsorted(masked, [first, end]).tolist())
        samples.append(
            Sample(
                ids=batch.ids[first:end].numpy(),
                types=batch.types[first:end].numpy(),
                masked=masked[here] - first,
                labels=labels[here],
                next_label=label,
            )
        )
    return samples


def padded_batch(samples: Sequence[Sample], width: int, pad: int) -> PaddedBatch:
    """Each sequence a row."""
    ids = np.full((len(samples), width), pad, dtype=np.int64)
    types, mask = np.zeros_like(ids), np.zeros_like(ids)
    labels = np.full_like(ids, IGNORED)
    for row, sample in enumerate(samples):
        tokens = len(sample.ids)
        ids[row, :tokens], types[row, :tokens], mask[row, :tokens] = sample.ids, sample.types, 1
        labels[row, sample.masked] = sample.labels
    rows = np.concatenate([row * width + sample.masked for row, sample in enumerate(samples)])
    return PaddedBatch(
        ids=torch.from_numpy(ids),
        types=torch.from_numpy(types),
        mask=None if mask.all() else torch.from_numpy(mask),
        labels=torch.from_numpy(labels),
        rows=torch.from_numpy(rows),
        row_labels=torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        next_labels=torch.tensor([sample.next_label for sample in samples]),
    )


def padded_batches(samples: Sequence[Sample], kind: str, size: int, longest: int, pad: int) -> list[PaddedBatch]:
    """The sequences of a step, dealt out evenly over as few batches as there can be: all do nearly the same work.

    Args:
        kind: FULL, PADDED or SORTED.
        size: sequences of a batch, at most.
        longest: width of a batch, but for the sorted ones, which are as wide as their own longest.
    """
    if kind == SORTED:
        samples = sorted(samples, key=lambda sample: len(sample.ids))
    count = -(-len(samples) // size)
    bounds = [-(-len(samples) * number // count) for number in range(count + 1)]
    parts = [samples[first:end] for first, end in pairwise(bounds)]
    widths = [max(len(sample.ids) for sample in part) if kind == SORTED else longest for part in parts]
    return [padded_batch(part, width, pad) for part, width in zip(parts, widths, strict=True)]


def works(
    kind: str,
    histogram: NDArray[np.integer],
    *,
    steps: int,
    sequences: int,
    micro_batch: int,
    packs: int,
    longest: int,
    capacity: int | None = None,
    special: SpecialTokens,
    seed: int,
    device: torch.device,
) -> list[Work]:
    """Different steps of about as many sequences, packed as pre-training packs them.

    Args:
        histogram: weights of the lengths; those of kind FULL all have the longest.
        sequences: of a step, rounded to whole micro-batches of packs.
        micro_batch: sequences of a padded micro-batch, at most.
        packs: packs of a packed one.
        longest: tokens of the longest sequence.
        capacity: slots of a pack, at least as many. Default: so many.
        device: where the batches of both sides lie.
    """
    if kind == FULL:
        histogram = np.bincount([longest])
    capacity = capacity or longest
    fullest = capacity // longest * (1 if kind == FULL else _MOST_IN_A_PACK)
    source = RandomPairs(histogram, max(_EPOCH, sequences), special=special, seed=seed)
    data = PretrainingData(
        source,
        special,
        capacity=capacity,
        max_length=longest,
        max_sequences=fullest,
        seed=seed,
    )
    loader = Loader(
        data,
        global_batch=packs_per_step(sequences, data.packing_factor, packs),
        packs_per_rank=packs,
        shape=CubeShape(),
        rank=0,
        end_step=steps,
        with_read_rows=True,
    )
    with loader:
        return [_work(step, kind, micro_batch, longest, special.pad, device) for step in loader]


def _work(step: TrainBatch, kind: str, size: int, longest: int, pad: int, device: torch.device) -> Work:
    samples = [sample for batch in step.batches for sample in samples_of(batch)]
    padded = [batch.to(device) for batch in padded_batches(samples, kind, size, longest, pad)]
    assert sum(len(batch.rows) for batch in padded) == step.targets, "a masked token was lost"
    assert len(samples) == step.sequences, "a sequence was lost"
    return Work(step=replace(step, batches=[batch.to(device) for batch in step.batches]), padded=padded)

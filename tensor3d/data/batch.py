"""A plane's micro-batch as tensors.

Legend: k packs per rank, y and z sizes of the plane, rows = k * z * capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.data.layout import check_rows
from tensor3d.data.ragged import first_rows, ranges
from tensor3d.data.read_rows import UNUSED, ReadRows, read_rows
from tensor3d.queries import Queries
from tensor3d.sequences import Sequences

IGNORED = -100
"""The label that cross-entropy ignores, as PyTorch has it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Whole sequences for one pack, one after another, after masking. Unused slots are not stored."""

    ids: NDArray[np.int64]
    """int64 (tokens,)"""
    types: NDArray[np.int64]
    """int64 (tokens,): segment of each token, 0 or 1."""
    lengths: NDArray[np.int64]
    """int64 (sequences,): tokens of each sequence."""
    masked: NDArray[np.int64]
    """int64 (masked,): tokens of the pack to guess."""
    masked_labels: NDArray[np.int64]
    """int64 (masked,): what stood there."""
    next_labels: NDArray[np.int64]
    """int64 (sequences,): 0 where segment B follows A, 1 where it was drawn at random."""

    @classmethod
    def empty(cls) -> Pack:
        """A pack without sequences; it fills up a micro-batch and adds to no loss."""
        return cls(**{field.name: np.empty(0, dtype=np.int64) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One plane's micro-batch as one rank holds it. All but `sequences` is the same on all members of the plane.

    R and C are the budgets of the plane's packs, rounded up to a multiple of lcm(y, z).
    """

    ids: Tensor
    """int64 (rows,): the plane's packs one after another; pad in unused slots."""
    positions: Tensor
    """int64 (rows,): place of each token in its sequence; 0 in unused slots."""
    types: Tensor
    """int64 (rows,): segment of each token; 0 in unused slots."""
    sequences: Sequences
    """The sequences of this rank's own k packs; the unused tail of a pack is one more."""
    masked: Tensor
    """int64 (R,): plane row of each token to guess, -1 where unused."""
    masked_labels: Tensor
    """int64 (R,): what stood there, -100 where unused."""
    first: Tensor
    """int64 (C,): plane row of each sequence's [CLS], -1 where unused."""
    next_labels: Tensor
    """int64 (C,): next-sentence label of each sequence, -100 where unused."""
    read: ReadRows | None = None
    """For a model whose last layer computes only the rows that heads read."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on a device. From pinned memory the copy is asynchronous, ordered by the current stream."""
        read = None if self.read is None else self.read.chosen.own.to(device)
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), self.sequences.to(device), read)

    def pin_memory(self) -> PackedBatch:
        """The batch in page-locked memory, from which a copy to a GPU runs beside the computation."""
        sequences = Sequences(cu_seqlens=self.sequences.cu_seqlens.pin_memory(), lengths=self.sequences.lengths)
        return self._map(Tensor.pin_memory, sequences, None if self.read is None else self.read.chosen.own.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor], sequences: Sequences, own: Queries | None) -> PackedBatch:
        names = (field.name for field in fields(self) if field.name not in ("sequences", "read"))
        read = None if self.read is None or own is None else self.read.moved(function, own)
        return PackedBatch(sequences=sequences, read=read, **{name: function(getattr(self, name)) for name in names})


def collate(
    packs: Sequence[Pack],
    *,
    capacity: int,
    masked_per_pack: int,
    max_sequences: int,
    y: int,
    z: int,
    slice_index: int,
    pad: int,
    with_read_rows: bool = False,
) -> PackedBatch:
    """Lays a plane's packs out as one rank's tensors.

    Args:
        packs: the k * z packs of the plane; member `slice_index` of z owns the k from `slice_index * k` on.
        capacity: token slots of a pack.
        masked_per_pack: tokens to guess in a pack, at most.
        max_sequences: sequences of a pack, at most.
        y, z: sizes of the plane.
        slice_index: this rank's place on the axis z.
        pad: the id of unused slots.
        with_read_rows: also say which rows heads read (`PackedBatch.read`).

    Raises:
        ValueError: a pack over a limit, or packs and rows that do not divide among z and y.
    """
    if not packs or len(packs) % z:
        raise ValueError(
            f"a plane needs the same number of packs, at least 1, for each member of z={z}. Got {len(packs)}."
        )
    if not 0 <= slice_index < z:
        raise ValueError(f"slice_index must lie between 0 and {z - 1}. Got {slice_index}.")
    k = len(packs) // z
    check_rows(packs_per_rank=k, z=z, capacity=capacity, y=y)
    for number, pack in enumerate(packs):
        _check(number, pack, capacity=capacity, masked_per_pack=masked_per_pack, max_sequences=max_sequences)

    ids = np.full((len(packs), capacity), pad, dtype=np.int64)
    positions, types = np.zeros_like(ids), np.zeros_like(ids)
    for row, pack in enumerate(packs):
        tokens = len(pack.ids)
        ids[row, :tokens] = pack.ids
        types[row, :tokens] = pack.types
        positions[row, :tokens] = ranges(np.zeros_like(pack.lengths), pack.lengths)

    multiple = math.lcm(y, z)
    rows = range(0, len(packs) * capacity, capacity)
    masked_slots = _round_up(len(packs) * masked_per_pack, multiple)
    first_slots = _round_up(len(packs) * max_sequences, multiple)
    masked = [row + pack.masked for row, pack in zip(rows, packs, strict=True)]
    first = [row + first_rows(pack.lengths) for row, pack in zip(rows, packs, strict=True)]
    read = None
    if with_read_rows:
        budget, slots = masked_per_pack + max_sequences, (masked_slots, first_slots)
        read = read_rows(
            masked, first, capacity=capacity, budget=budget, slots=slots, y=y, z=z, slice_index=slice_index
        )
    own = packs[slice_index * k : (slice_index + 1) * k]
    return PackedBatch(
        ids=torch.from_numpy(ids.reshape(-1)),
        positions=torch.from_numpy(positions.reshape(-1)),
        types=torch.from_numpy(types.reshape(-1)),
        sequences=Sequences.from_lengths([length for pack in own for length in _covering(pack, capacity)]),
        masked=_filled(masked, masked_slots, UNUSED),
        masked_labels=_filled((pack.masked_labels for pack in packs), masked_slots, IGNORED),
        first=_filled(first, first_slots, UNUSED),
        next_labels=_filled((pack.next_labels for pack in packs), first_slots, IGNORED),
        read=read,
    )


def _check(number: int, pack: Pack, *, capacity: int, masked_per_pack: int, max_sequences: int) -> None:
    for what, value, limit, name in (
        ("tokens", len(pack.ids), capacity, "capacity"),
        ("masked positions", len(pack.masked), masked_per_pack, "masked_per_pack"),
        ("sequences", len(pack.lengths), max_sequences, "max_sequences"),
    ):
        if value > limit:
            raise ValueError(f"pack {number} has {value} {what}, more than {name}={limit}. Pack again with this limit.")


def _covering(pack: Pack, capacity: int) -> list[int]:
    """Lengths that cover the whole pack: its sequences, then the unused tail."""
    lengths: list[int] = pack.lengths.tolist()
    tail = capacity - sum(lengths)
    return [*lengths, tail] if tail else lengths


def _filled(parts: Iterable[NDArray[np.int64]], size: int, rest: int) -> Tensor:
    """int64 (size,): the parts one after another, then `rest`."""
    values = np.concatenate(list(parts))
    filled = np.full(size, rest, dtype=np.int64)
    filled[: len(values)] = values
    return torch.from_numpy(filled)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

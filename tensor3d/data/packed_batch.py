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

from tensor3d.batches.row_selection import RowSelection
from tensor3d.batches.sequences import Sequences
from tensor3d.data.array_utils import first_rows, ranges
from tensor3d.distributed.cube_shape import CubeShape

# --- The rows of a plane that a model's heads read: masked places and [CLS] -------------------------------------------
#
# Of k packs on each of z row slices, every slice has the same number of slots for them, so that what is computed for
# these rows alone lies on the cube as evenly as what is computed for all.
#
# U slots of a plane, U/z of each slice; R masked and C [CLS] slots as of `PackedBatch`

UNUSED = -1
"""Where no row is meant."""


def read_rows(
    masked: Sequence[NDArray[np.int64]],
    first: Sequence[NDArray[np.int64]],
    *,
    capacity: int,
    budget: int,
    slots: tuple[int, int],
    shape: CubeShape,
    rank: int,
) -> RowSelection:
    """Those of a plane's packs; the heads are that for masked tokens (R,) and that for [CLS] (C,).

    Args:
        masked, first: of each pack, rows of the plane.
        capacity: rows of a pack.
        budget: of a pack, masked places and [CLS] together, at most.
        slots: R and C.
        shape, rank: the cube, and this rank of it.
    """
    z, slice_index = shape.z, shape.coordinate(rank)["z"]
    k = len(masked) // z
    own_slots = _round_up(k * budget, shape.y)
    rows = np.full((z, own_slots), UNUSED, dtype=np.int64)
    places = [np.full(size, UNUSED, dtype=np.int64) for size in slots]
    filled = [0, 0]
    for i in range(z):
        here = 0
        for number in range(i * k, (i + 1) * k):
            for which, chosen in enumerate((masked[number], first[number])):
                rows[i, here : here + len(chosen)] = chosen
                begin, filled[which] = filled[which], filled[which] + len(chosen)
                places[which][begin : filled[which]] = i * own_slots + here + np.arange(len(chosen))
                here += len(chosen)
    mine = rows[slice_index]
    own = np.where(mine == UNUSED, UNUSED, mine - slice_index * k * capacity)
    return RowSelection(
        rows=torch.from_numpy(own),
        numbers=own,
        plane_rows=torch.from_numpy(rows.reshape(-1)),
        heads=tuple(map(torch.from_numpy, places)),
    )


# --- Which packs of a global batch a rank works on --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """A rank's place in a cube, and how packs are dealt to it.

    A micro-batch is `data * x * z * k` packs. Its planes, in the order (data, x), take `z * k` consecutive packs each.
    The members of a plane share their tokens, and member `z` owns the `k` packs that its attention works on. All planes
    take what is theirs from one list, so that a step has the same packs on any cube.

    Raises:
        ValueError: a size below 1, a rank that the cube does not have, or rows that do not divide among the members
            of y.
    """

    shape: CubeShape
    rank: int
    packs_per_rank: int
    """k: packs on each face-y row slice."""
    capacity: int
    """Token slots of a pack."""

    def __post_init__(self) -> None:
        self.shape.coordinate(self.rank)  # refuses a rank outside
        if self.packs_per_rank < 1:
            raise ValueError(f"packs_per_rank must be at least 1. Got {self.packs_per_rank}.")
        check_rows(self.shape, self.packs_per_rank, self.capacity)

    @property
    def micro_batch(self) -> int:
        """Packs of a micro-batch, over all planes."""
        return self.shape.planes * self.plane_packs

    @property
    def plane_packs(self) -> int:
        """Packs of a micro-batch on one plane."""
        return self.shape.z * self.packs_per_rank

    @property
    def plane_start(self) -> int:
        """First pack of this rank's plane within a micro-batch."""
        return self.shape.plane_of(self.rank) * self.plane_packs


def check_rows(shape: CubeShape, packs_per_rank: int, capacity: int) -> None:
    """Raises ValueError unless the rows of a plane divide among the members of y."""
    rows = packs_per_rank * shape.z * capacity
    if rows % shape.y:
        raise ValueError(
            f"a plane of {packs_per_rank} packs per rank * z={shape.z} * capacity {capacity} has {rows} rows, "
            f"which do not divide by y={shape.y}. Change packs_per_rank, the capacity or the cube."
        )


def fit_packs_per_rank(global_batch: int, shape: CubeShape, packs_per_rank: int | None) -> int:
    """The number of packs per rank: the given one, or the largest that makes the global batch one micro-batch.

    Raises:
        ValueError: the global batch is not a whole number of micro-batches, or a number is below 1.
    """
    if global_batch < 1 or (packs_per_rank is not None and packs_per_rank < 1):
        raise ValueError(
            f"global_batch and packs_per_rank must be at least 1. Got {global_batch} and {packs_per_rank}."
        )
    unit = shape.planes * shape.z * (packs_per_rank or 1)
    if global_batch % unit:
        per_rank = "" if packs_per_rank is None else f" * packs_per_rank={packs_per_rank}"
        near = sorted({max(unit, global_batch // unit * unit), -(-global_batch // unit) * unit})
        raise ValueError(
            f"a global batch of {global_batch} packs does not divide by data={shape.data} * x={shape.x} * z={shape.z}"
            f"{per_rank} = {unit}. Take {' or '.join(map(str, near))} packs, or another cube."
        )
    return packs_per_rank or global_batch // unit


# --- A plane's micro-batch as tensors ---------------------------------------------------------------------------------

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
    draws: NDArray[np.int64] | None = None
    """int64 (masked,): 64 random bits of each token to guess, for a model that draws one in its place."""

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
    read: RowSelection | None = None
    """For a model whose last layer computes only the rows that heads read."""
    draws: Tensor | None = None
    """int64 (R,): random bits of each token to guess, for a model that draws one in its place; 0 where unused."""
    planes_alike: bool = False
    """Whether all planes of the cube have as many rows, so that no rank has to ask the others how many theirs are."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on a device. From pinned memory the copy is asynchronous, ordered by the current stream."""
        read = None if self.read is None else self.read.to(device)
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), self.sequences.to(device), read)

    def pin_memory(self) -> PackedBatch:
        """The batch in page-locked memory, from which a copy to a GPU runs beside the computation."""
        sequences = Sequences(cu_seqlens=self.sequences.cu_seqlens.pin_memory(), lengths=self.sequences.lengths)
        return self._map(Tensor.pin_memory, sequences, None if self.read is None else self.read.pin_memory())

    def _map(
        self, function: Callable[[Tensor], Tensor], sequences: Sequences, read: RowSelection | None
    ) -> PackedBatch:
        every = ((field.name, getattr(self, field.name)) for field in fields(self))
        tensors = {name: function(value) for name, value in every if isinstance(value, Tensor)}
        return PackedBatch(sequences=sequences, read=read, planes_alike=self.planes_alike, **tensors)


def collate(
    packs: Sequence[Pack],
    *,
    capacity: int,
    masked_per_pack: int,
    max_sequences: int,
    shape: CubeShape,
    rank: int,
    pad: int,
    with_read_rows: bool = False,
    planes_alike: bool = False,
) -> PackedBatch:
    """Lays a plane's packs out as one rank's tensors.

    Args:
        packs: the k * z packs of the plane; member `i` of z owns the k from `i * k` on.
        capacity: token slots of a pack.
        masked_per_pack: tokens to guess in a pack, at most.
        max_sequences: sequences of a pack, at most.
        shape, rank: the cube, and this rank of it.
        pad: the id of unused slots.
        with_read_rows: also say which rows heads read (`PackedBatch.read`).
        planes_alike: the caller vouches that all planes have as many packs of this capacity.

    Raises:
        ValueError: a pack over a limit, or packs and rows that do not divide among z and y.
    """
    z, slice_index = shape.z, shape.coordinate(rank)["z"]
    if not packs or len(packs) % z:
        raise ValueError(
            f"a plane needs the same number of packs, at least 1, for each member of z={z}. Got {len(packs)}."
        )
    k = len(packs) // z
    check_rows(shape, k, capacity)
    for number, pack in enumerate(packs):
        _check(number, pack, capacity=capacity, masked_per_pack=masked_per_pack, max_sequences=max_sequences)

    ids = np.full((len(packs), capacity), pad, dtype=np.int64)
    positions, types = np.zeros_like(ids), np.zeros_like(ids)
    for row, pack in enumerate(packs):
        tokens = len(pack.ids)
        ids[row, :tokens] = pack.ids
        types[row, :tokens] = pack.types
        positions[row, :tokens] = ranges(np.zeros_like(pack.lengths), pack.lengths)

    multiple = math.lcm(shape.y, z)
    rows = range(0, len(packs) * capacity, capacity)
    masked_slots = _round_up(len(packs) * masked_per_pack, multiple)
    first_slots = _round_up(len(packs) * max_sequences, multiple)
    masked = [row + pack.masked for row, pack in zip(rows, packs, strict=True)]
    first = [row + first_rows(pack.lengths) for row, pack in zip(rows, packs, strict=True)]
    read = None
    if with_read_rows:
        budget, slots = masked_per_pack + max_sequences, (masked_slots, first_slots)
        read = read_rows(masked, first, capacity=capacity, budget=budget, slots=slots, shape=shape, rank=rank)
    own = packs[slice_index * k : (slice_index + 1) * k]
    draws = [pack.draws for pack in packs if pack.draws is not None]
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
        draws=_filled(draws, masked_slots, 0) if len(draws) == len(packs) else None,
        planes_alike=planes_alike,
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

"""Texts of one batch, packed and laid onto the cube, and what the model says of them, in the order of the texts.

N texts of the batch, k = z packs of a plane (one for each rank's rows on face y), rows = z * capacity
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d import Cube, CubeShape
from tensor3d.data.array_utils import first_rows, ranges
from tensor3d.data.packed_batch import UNUSED, Pack, PackedBatch, collate
from tensor3d.distributed.collectives import all_gather
from tensor3d.packing import PackAssignment, pack_evenly, restore_order

# Batches of ever other numbers of rows make allocators and kernel caches grow: on a CPU from 450 to 1480 MB in 400
# steps of some 5,500 rows, and to 650 MB and no further with rows rounded. Small batches stay as small as can be.
_ROUNDED_TO, _FEW_SIZES_FROM = 64, 2048  # token slots of a pack


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedText:
    """One sequence as the model reads it, with its special tokens."""

    ids: NDArray[np.int64]
    """int64 (tokens,)"""
    types: NDArray[np.int64]
    """int64 (tokens,): 0 for the first text of a pair, 1 for the second."""
    masked: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int64 (masked,): places in the sequence whose pieces are asked for, ascending."""
    hidden: NDArray[np.int64] | None = None
    """int64 (masked,): what stood there, where that is to be compared."""

    @property
    def key(self) -> bytes:
        """The same of texts that are equal to the model, and of no others: 16 bytes."""
        told = np.concatenate(([len(self.ids)], self.ids, self.types, self.masked), dtype=np.int64)
        return hashlib.blake2b(told.tobytes(), digest_size=16).digest()


def distinct_texts(texts: Sequence[EncodedText]) -> tuple[list[EncodedText], list[int]]:
    """Each text once, in the order in which they come first, and which of these each of them is.

    For whatever is to be equal of equal texts: the last bits of what a model says of one follow from its batch, too.
    """
    places: dict[bytes, int] = {}
    first: list[EncodedText] = []
    of_texts = []
    for text in texts:
        of_texts.append(places.setdefault(text.key, len(first)))
        if of_texts[-1] == len(first):
            first.append(text)
    return first, of_texts


@dataclass(frozen=True, kw_only=True, eq=False)
class TextBatch:
    """A batch of texts as one rank holds it; results come back in the order of the texts."""

    batch: PackedBatch
    """This plane's packs. `first` has a slot for each text of the plane, pack by pack, then unused ones."""
    packs: PackAssignment
    """All packs of the batch: planes take consecutive ones."""
    capacity: int
    """Token slots of a pack."""
    texts: NDArray[np.int64]
    """int64 (C,): which text each slot of `batch.first` is; -1 where unused."""
    owner: Tensor
    """int64 (rows,): slot of `batch.first` that each row of the plane belongs to; C where unused."""
    lengths: NDArray[np.int64]
    """int64 (N,): tokens of each text."""
    masked: NDArray[np.int64]
    """int64 (N,): places of each text whose pieces are asked for."""
    cube: Cube

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64 (N,): row of each text's first token, counted over the planes one after another."""
        order = self.packs.sequences
        sizes = np.diff(self.packs.offsets)
        pack_of = np.repeat(np.arange(len(sizes)), sizes)
        before = first_rows(self.lengths[order])
        first_of_pack = np.repeat(before[self.packs.offsets[:-1][sizes > 0]], sizes[sizes > 0])
        starts = np.empty(len(order), dtype=np.int64)
        starts[order] = pack_of * self.capacity + before - first_of_pack
        return starts

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """One value for each text, (N, ...), as those of this plane's slots, (C, ...), on the cube's device.

        Args:
            fill: what stands in unused slots: -100 for labels.
        """
        slots = torch.from_numpy(self.texts)
        taken = values[slots.clamp(min=0)]
        taken[slots < 0] = fill
        return taken.to(self.cube.device)

    def spread_tokens(self, values: Sequence[NDArray[np.int64]], fill: int) -> Tensor:
        """A number for each token, of each text (tokens,), as those of the plane's rows, (rows,), on the cube's device.

        Args:
            fill: what stands in unused rows: -100 for labels.
        """
        count = self.batch.ids.shape[0]
        before = self.cube.shape.plane_of(self.cube.rank) * count
        starts, rows = self.starts - before, np.full(count, fill, dtype=np.int64)
        for text in self.texts[self.texts >= 0].tolist():
            rows[starts[text] : starts[text] + self.lengths[text]] = values[text]
        return torch.from_numpy(rows).to(self.cube.device)

    def of_texts(self, values: Tensor) -> Tensor:
        """One value for each slot of the plane, (C, ...), the same on all its ranks, as one for each text, (N, ...),
        on the host of every rank."""
        return self.in_order(self._of_all_planes(values))

    def in_order(self, values: Tensor) -> Tensor:
        """Those of the slots of all planes, one plane after another, as one for each text, (N, ...). Differentiable."""
        sizes = self._of_planes(np.diff(self.packs.offsets))
        return restore_order(self.packs, self._used(values, sizes))

    def of_tokens(self, values: Tensor) -> list[Tensor]:
        """One value for each row of the plane, (rows, ...), the same on all its ranks, as those of each text's tokens,
        on the host of every rank."""
        whole = self._of_all_planes(values)
        return [
            whole[start : start + length]
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def of_masked(self, values: Tensor) -> Tensor:
        """One value for each slot of `batch.masked`, (R, ...), the same on all ranks of the plane, as those of the
        texts' masked places, text by text, on the host of every rank."""
        order = self.packs.sequences
        counts = self.masked[order]
        ends = np.concatenate(([0], np.cumsum(counts)))
        sizes = self._of_planes(np.diff(ends[self.packs.offsets]))
        by_pack = self._used(self._of_all_planes(values), sizes)
        first = np.empty(len(order), dtype=np.int64)
        first[order] = ends[:-1]
        return by_pack[torch.from_numpy(ranges(first, self.masked))]

    def _of_planes(self, of_packs: NDArray[np.int64]) -> list[int]:
        sums: list[int] = of_packs.reshape(self.cube.shape.planes, -1).sum(1).tolist()
        return sums

    def _of_all_planes(self, values: Tensor) -> Tensor:
        return all_gather(values.detach(), self.cube.over("data", "x")).wait().cpu()

    def _used(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of the slots of all planes, those that come first in each."""
        slots = values.shape[0] // len(sizes)
        return torch.cat([values[i * slots : i * slots + size] for i, size in enumerate(sizes)])


def collate_texts(texts: Sequence[EncodedText], cube: Cube, *, alone: bool = False) -> TextBatch:
    """Packs a batch, one pack for each rank's rows on face y and as small as they can be, and lays it onto the cube.

    Every rank passes the same texts. Which text meets which rank depends on the cube; no result does.

    Args:
        alone: every text has a pack of its own, with the slots of the longest: what packing is to be compared with.

    Raises:
        ValueError: no text, or one without a token.
    """
    shape = cube.shape
    lengths = np.array([len(text.ids) for text in texts], dtype=np.int64)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError(f"a batch needs at least one text, and each text a token. Got lengths {lengths.tolist()[:8]}.")
    capacity, packs = (_apart if alone else _together)(lengths, shape)
    masked = np.array([len(text.masked) for text in texts], dtype=np.int64)
    plane = shape.plane_of(cube.rank)
    bounds = list(pairwise(packs.offsets.tolist()))
    per_plane = len(packs) // shape.planes
    own = bounds[plane * per_plane : (plane + 1) * per_plane]
    batch = collate(
        [_pack([texts[i] for i in packs.sequences[first:last].tolist()]) for first, last in own],
        capacity=capacity,
        masked_per_pack=max(int(masked[packs.sequences[first:last]].sum()) for first, last in bounds),
        max_sequences=int(np.diff(packs.offsets).max()),
        shape=shape,
        rank=cube.rank,
        pad=0,
        planes_alike=True,
    )
    slots = batch.first.shape[0]
    numbers = np.full(slots, UNUSED, dtype=np.int64)
    of_plane = packs.sequences[own[0][0] : own[-1][1]]
    numbers[: len(of_plane)] = of_plane
    owner = np.full(batch.ids.shape[0], slots, dtype=np.int64)
    for slot, (row, text) in enumerate(zip(batch.first.tolist(), of_plane.tolist(), strict=False)):
        owner[row : row + lengths[text]] = slot
    return TextBatch(
        batch=batch.to(cube.device),
        packs=packs,
        capacity=capacity,
        texts=numbers,
        owner=torch.from_numpy(owner).to(cube.device),
        lengths=lengths,
        masked=masked,
        cube=cube,
    )


def _together(lengths: NDArray[np.int64], shape: CubeShape) -> tuple[int, PackAssignment]:
    # Packs for the members of z whose rows divide by y.
    step = shape.y // math.gcd(shape.y, shape.z)
    if lengths.sum() >= _FEW_SIZES_FROM * shape.planes * shape.z:
        step = math.lcm(step, _ROUNDED_TO)
    return pack_evenly(lengths, shape.planes * shape.z, multiple_of=step)


def _apart(lengths: NDArray[np.int64], shape: CubeShape) -> tuple[int, PackAssignment]:
    count = len(lengths)
    ranks = shape.planes * shape.z
    k = -(-count // ranks)
    step = shape.y // math.gcd(shape.y, k * shape.z)
    capacity = -(-int(lengths.max()) // step) * step
    offsets = np.minimum(np.arange(k * ranks + 1), count)
    return capacity, PackAssignment(offsets=offsets, sequences=np.arange(count))


def _pack(texts: Sequence[EncodedText]) -> Pack:
    if not texts:
        return Pack.empty()
    lengths = np.array([len(text.ids) for text in texts], dtype=np.int64)
    masked = [first + text.masked for first, text in zip(first_rows(lengths), texts, strict=True)]
    together = np.concatenate(masked).astype(np.int64)
    return Pack(
        ids=np.concatenate([text.ids for text in texts]).astype(np.int64),
        types=np.concatenate([text.types for text in texts]).astype(np.int64),
        lengths=lengths,
        masked=together,
        masked_labels=np.concatenate(
            [np.zeros_like(text.masked) if text.hidden is None else text.hidden for text in texts]
        ).astype(np.int64),
        next_labels=np.zeros_like(lengths),
    )

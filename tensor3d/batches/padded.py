"""Padded batches as packed rows, and back: so that code written for (batch, sequence) tensors uses packed attention.

B sequences of a plane, S slots of each in the padded batch, R rows of the plane (z*k packs of equal capacity),
R' rows and H' columns of this rank, H hidden size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.packing import PackAssignment, pack_batch, pack_evenly
from tensor3d.sharding.activation_layout import Face, check_divides, check_face, gather_plane, other
from tensor3d.sharding.layout_checks import check_origin
from tensor3d.sharding.redistribute import local_rows

Batch = TypeVar("Batch", Tensor, list[Any], tuple[Any, ...])


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedPacks:
    """A plane's padded batch as packed rows, and the way back. All but `sequences` is the same on the whole plane."""

    ids: Tensor
    """(R,): the plane's packs one after another; `pad` in unused slots."""
    positions: Tensor
    """int64 (R,): place of each token among the real ones of its sequence; 0 in unused slots."""
    sequences: Sequences
    """Those of this rank's rows on face y; the unused tail of a pack is one more."""
    first: Tensor
    """int64 (C,): plane row of each sequence's first real token, in the order of the batch, then -1 up to a multiple of
    lcm(y, z): ready for `select`."""
    capacity: int
    """Token slots of a pack."""
    source: Tensor
    """int64 (R,): number `b*S + s` of the token in each row; -1 in unused slots."""
    places: Tensor
    """int64 (B, S): plane row of each token; -1 where the batch was padded."""

    @property
    def rows(self) -> int:
        """R: rows of the plane, unused slots among them."""
        return self.source.shape[0]

    @property
    def owner(self) -> Tensor:
        """int64 (R,): place in `first` of the sequence that each row belongs to, -1 in unused slots: ready for
        `sum_rows`."""
        return torch.where(self.source >= 0, self.source // self.places.shape[1], -1)

    @property
    def lengths(self) -> Tensor:
        """int64 (C,): tokens of each sequence of `first`; 0 where it is filled up."""
        return F.pad((self.places >= 0).sum(1), (0, len(self.first) - len(self.places)))

    @out_of_graphs
    def pack(self, values: Tensor, fill: float = 0) -> Tensor:
        """Any values beside the ids, such as token types or labels, (B, S, ...), to (R, ...); differentiable.

        Args:
            fill: what stands in unused slots: -100 for labels.

        Raises:
            ValueError: another B or S.
        """
        self._check_batch(values, "values")
        return _taken(values.flatten(0, 1), self.source, fill)

    @out_of_graphs
    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """The inverse of `pack`: (R, ...), one value for each row of the plane, to (B, S, ...); differentiable.

        Args:
            fill: what stands where the batch was padded.

        Raises:
            ValueError: another number of rows.
        """
        if values.shape[:1] != (self.rows,):
            raise ValueError(
                f"pad needs one value for each of the plane's {self.rows} rows. Got shape {tuple(values.shape)}. What "
                "lies on a face goes through `pad_hidden`."
            )
        return _taken(values, self.places.flatten(), fill).unflatten(0, self.places.shape)

    @out_of_graphs
    def pad_hidden(self, hidden: Tensor, cube: Cube, face: Face = "z") -> Tensor:
        """A hidden state or logits on a face, (R', H'), to (B, S, H), whole on every rank of the plane, 0 in padding.

        Meant for small outputs: the full matrix is gathered. Columns may be cut unevenly, as the logits of an odd
        vocabulary are. Differentiable: every rank of the plane computes the same loss from the result, so sum it over
        data and x alone. In backward each rank takes its own block of the gradient, and nothing is sent.

        Elements received: `RH - R'H'`, with columns padded to be even, and the widths, which the host waits for; none
        backward.

        Raises:
            ValueError: an unknown face, the other face, or not this plane's rows.
        """
        check_face(face)
        if hidden.dim() == 3 and hidden.shape[0] == 1:
            hidden = hidden.squeeze(0)
        axis = cube.axis(other(face))
        if hidden.dim() != 2 or hidden.shape[0] * axis.size != self.rows:
            raise ValueError(
                f"of these packs a rank holds (rows, columns) with {self.rows}/{axis.name} = {self.rows // axis.size} "
                f"rows on face {face}. Got shape {tuple(hidden.shape)}. Is it on face {other(face)}?"
            )
        check_origin(hidden, face, cube, "pad_hidden")
        return self.pad(gather_plane(hidden, cube, face))

    @out_of_graphs
    def shard_hidden(self, hidden: Tensor, cube: Cube, face: Face = "z") -> Tensor:
        """This rank's shard (R', H') on a face of a padded tensor (B, S, H) that every rank of the plane holds.

        Nothing is sent, and only the shard is copied. Differentiable: the gradient of `hidden` is that of this rank's
        rows and columns, and zero elsewhere, as with `local_block`. So if every rank computes `hidden` alike, the
        module that does must sum its parameters' gradients over all axes: data, x, y and z.

        Raises:
            ValueError: another B or S, not three dims, or columns that do not divide by the face's axis.
        """
        check_face(face)
        self._check_batch(hidden, "hidden")
        if hidden.dim() != 3:
            raise ValueError(f"shard_hidden needs (batch, sequence, hidden). Got shape {tuple(hidden.shape)}.")
        columns = check_divides("hidden", hidden.shape[2], cube, face)
        own = hidden.flatten(0, 1).narrow(1, cube.axis(face).index * columns, columns)
        return _taken(own, local_rows(self.source, cube, face), 0)

    def _check_batch(self, values: Tensor, what: str) -> None:
        wanted, found = tuple(self.places.shape), tuple(values.shape)
        if found[:2] != wanted:
            raise ValueError(
                f"{what} must have the shape {wanted} of the packed ids in its first two dims. Got {found}."
            )


@out_of_graphs
def pack_padded(
    input_ids: Tensor, attention_mask: Tensor | None, cube: Cube, *, capacity: int | None = None, pad: int = 0
) -> PaddedPacks:
    """Packs a padded batch so that attention on face y is local: z*k packs of equal capacity, k for each member of z.

    Real tokens keep their order, wherever the padding stands. Nothing is sent; lengths are read on the host, which
    waits for a mask on a device. The results lie on the cube's device.

    Args:
        input_ids: (B, S), the sequences of this rank's plane (see `local_shard`); each of its ranks passes the same.
        attention_mask: (B, S), 1 for a token and 0 for padding; None: all are tokens.
        capacity: token slots of a pack. Default: the least with which the sequences fit one pack for each member of z.
            Planes may then differ in rows; pass one capacity where their work should be alike.
        pad: the id of unused slots.

    Raises:
        ValueError: shapes that differ, a mask of other values, a sequence without a token or longer than the capacity,
            or a capacity whose packs do not divide among y.
    """
    y, z = cube.shape.y, cube.shape.z
    kept = _checked(input_ids, attention_mask)
    lengths = kept.sum(1).numpy()
    step = y // math.gcd(y, z)  # z*k packs of a multiple of it are rows that divide by y, for any k
    if capacity is None:
        capacity, packs = pack_evenly(lengths, z, multiple_of=step)
    else:
        _check_capacity(capacity, step, lengths, cube)
        packs = pack_batch(lengths, capacity, multiple_of=z)

    count = len(packs.offsets) - 1
    starts = torch.from_numpy(_starts(packs, lengths, capacity))
    within = kept.cumsum(1) - 1
    places = torch.where(kept, starts.unsqueeze(1) + within, -1)
    source = torch.full((count * capacity,), -1)
    source[places[kept]] = torch.nonzero(kept.flatten()).flatten()
    positions = torch.zeros_like(source)
    positions[places[kept]] = within[kept]
    first = F.pad(starts, (0, -len(starts) % math.lcm(y, z)), value=-1)

    device, per_member = cube.device, count // z
    own = range(cube.coordinate["z"] * per_member, (cube.coordinate["z"] + 1) * per_member)
    covering = [length for pack in own for length in _covering(packs, pack, lengths, capacity)]
    source = source.to(device)
    return PaddedPacks(
        ids=_taken(input_ids.to(device).flatten(), source, pad),
        positions=positions.to(device),
        sequences=Sequences.from_lengths(covering, device),
        first=first.to(device),
        capacity=capacity,
        source=source,
        places=places.to(device),
    )


@out_of_graphs
def local_shard(batch: Batch, cube: Cube) -> Batch:
    """Of a global batch, a tensor or a list, the part of this rank's plane: dim 0 lies over data, then x.

    Raises:
        ValueError: it does not divide among the planes.
    """
    planes = cube.shape.planes
    if isinstance(batch, Tensor) and batch.dim() == 0:
        raise ValueError(f"a global batch has a dim for its sequences. Got the single value {batch}.")
    if not len(batch) or len(batch) % planes:
        raise ValueError(
            f"a global batch must divide among the data={cube.shape.data} * x={cube.shape.x} = {planes} planes of the "
            f"cube. Got {len(batch)} sequences. Take a multiple of {planes}, leave out an incomplete last batch "
            "(drop_last=True of a DataLoader), or choose another cube."
        )
    share, plane = len(batch) // planes, cube.shape.plane_of(cube.rank)
    return batch[plane * share : (plane + 1) * share]


def _checked(ids: Tensor, mask: Tensor | None) -> Tensor:
    """bool (B, S) on the host: which are tokens."""
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must have the shape (batch, sequence), not empty. Got {tuple(ids.shape)}.")
    if mask is None:
        return torch.ones(ids.shape, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have input_ids' shape {tuple(ids.shape)}. Got {tuple(mask.shape)}.")
    mask = mask.detach().cpu()
    kept = mask != 0
    if not torch.equal(mask, kept.to(mask.dtype)):
        raise ValueError(
            "attention_mask must hold 1 for each token and 0 for padding. Got values from "
            f"{mask.min().item():g} to {mask.max().item():g}. Pass the tokenizer's mask, not one to add to scores."
        )
    empty = torch.nonzero(~kept.any(1)).flatten().tolist()
    if empty:
        raise ValueError(f"sequence {empty[0]} has no token: attention_mask is 0 all along. Leave it out of the batch.")
    return kept


def _check_capacity(capacity: int, step: int, lengths: NDArray[np.int64], cube: Cube) -> None:
    # For any number of packs alike, so that all planes refuse it, whatever sequences they hold.
    if capacity < 1 or capacity % step:
        raise ValueError(
            f"capacity must be at least 1 and divide by {step}, so that packs for the members of z={cube.shape.z} are "
            f"rows that divide by y={cube.shape.y}. Got {capacity}. Take {-(-max(capacity, 1) // step) * step}."
        )
    if lengths.max() > capacity:
        longest = int(lengths.argmax())
        raise ValueError(
            f"sequence {longest} has {lengths[longest]} tokens, more than the capacity of {capacity}. Truncate it, or "
            "raise the capacity."
        )


def _starts(packs: PackAssignment, lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """int64 (B,): plane row in which each sequence begins."""
    ends = np.concatenate(([0], np.cumsum(lengths[packs.sequences])))
    sizes = np.diff(packs.offsets)
    shift = np.arange(len(sizes)) * capacity - ends[packs.offsets[:-1]]
    starts = np.empty_like(lengths)
    starts[packs.sequences] = ends[:-1] + np.repeat(shift, sizes)
    return starts


def _covering(packs: PackAssignment, pack: int, lengths: NDArray[np.int64], capacity: int) -> list[int]:
    """Lengths that cover the whole pack: its sequences, then the unused tail."""
    held: list[int] = lengths[packs.sequences[packs.offsets[pack] : packs.offsets[pack + 1]]].tolist()
    tail = capacity - sum(held)
    return [*held, tail] if tail else held


def _taken(values: Tensor, numbers: Tensor, fill: float) -> Tensor:
    """Entries of `values` by number along dim 0; `fill` for -1."""
    values = values.to(numbers.device)
    taken = values.index_select(0, numbers.clamp(min=0))
    unused = (numbers < 0).view(-1, *[1] * (values.dim() - 1))
    return taken.masked_fill(unused, fill)

"""The optimiser's state sharded over `data`: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054, §5.1).

    R rows of this rank's block of a parameter, n elements of it, D ranks along data, C = ceil(R/D) rows of a share

Ranks along `data` hold copies of every block. Each keeps the moments of C rows of it alone, steps these rows, and gets
the others' rows by all-gathers. Gradients are summed over `data` whole, under the backward pass, as without it: so
clipping and hooks see the same bits.

At rest a rank holds 2 C n/R elements of state a parameter at most, and not 2 n. Received a step: (D - 1) C n/R elements
a parameter, all-gathered over data in buckets, in the parameters' type.

A share is a block of the logical tensor, cut by one axis more than the parameter, the innermost one: so checkpoints and
norms know it as they know any block. Scalars have no rows: each rank steps them.

AdamW's steps are those without it to the bit where torch's kernel treats elements alike wherever they stand, as on a
GPU. On a CPU it works on vectors of 64 bytes at most and does what is left over one by one, with another rounding: bits
are the same where the elements of shares divide by such a vector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from tensor3d.distributed.collectives import Axis, CommHandle, all_gather
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import MESH_AXES
from tensor3d.sharding.param_layout import chunk_bounds, local

_DATA = MESH_AXES.index("data")
_IN_FLIGHT = 2  # buckets: one travels while the one before it is copied


def lies_in_share(parameter: Tensor, cube: Cube) -> bool:
    """Whether ranks along data hold copies of a parameter of which each can take some rows."""
    return (
        cube.axis("data").size > 1
        and isinstance(parameter, DTensor)
        and parameter.dim() > 0
        and parameter.placements[_DATA].is_replicate()
    )


def is_whole(tensor: Tensor) -> bool:
    """Whether no share over data has been taken of it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.mesh_dim_names != MESH_AXES:
        return True
    return tensor.placements[_DATA].is_replicate()


def share_placements(parameter: Tensor) -> tuple[Placement, ...]:
    """DTensor's, of what lies in shares of a parameter."""
    assert isinstance(parameter, DTensor)
    return (*parameter.placements[:_DATA], Shard(0), *parameter.placements[_DATA + 1 :])


def share(block: Tensor, cube: Cube) -> Tensor:
    """(R, ...) -> this rank's rows of it, C at most; of a contiguous block the memory itself."""
    axis = cube.axis("data")
    first, last = chunk_bounds(block.shape[0], axis.size, axis.index)
    return block[first:last].contiguous()


def check_share(parameter: Tensor, cube: Cube) -> None:
    """Raises ValueError where shares of a parameter would not be parts of its memory, which kernels write to."""
    if lies_in_share(parameter, cube) and not local(parameter).is_contiguous():
        raise ValueError(
            f"shard_over_data needs parameters whose rows lie one after another. Got one of shape "
            f"{tuple(parameter.shape)} with the strides {local(parameter).stride()}. Make it of a contiguous tensor."
        )


class _Piece(NamedTuple):
    """Elements `first` to `last` of each member's share of a block, which travel in one bucket."""

    block: Tensor
    """(n,)"""
    share: int
    """Elements of a share; the last ones may have less."""
    first: int
    last: int

    def of(self, member: int) -> Tensor:
        """What the member has of it: part of the block's memory, maybe nothing."""
        begin, end = (member * self.share + place for place in (self.first, self.last))
        return self.block[begin:end]


def gather_shares(parameters: Iterable[Tensor], cube: Cube) -> None:
    """Gives every rank along data the rows that the others have stepped, in place. All parameters travel, with a
    gradient or without: so ranks cannot differ in what they send. Every rank calls it alike."""
    axis = cube.axis("data")
    by_type: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
    for parameter in parameters:
        if lies_in_share(parameter, cube):
            block = local(parameter)
            rows = block.shape[0]
            each = -(-rows // axis.size) * (block.numel() // rows) if rows else 0
            by_type.setdefault(block.dtype, []).append((block.view(-1), each))
    travelling: deque[tuple[CommHandle, list[_Piece]]] = deque()
    for blocks in by_type.values():
        for bucket in _buckets(blocks, axis.size):
            travelling.append((_send(bucket, axis), bucket))
            if len(travelling) == _IN_FLIGHT:
                _receive(*travelling.popleft(), axis)
    for sent, bucket in travelling:
        _receive(sent, bucket, axis)


def _buckets(blocks: Sequence[tuple[Tensor, int]], members: int) -> Iterator[list[_Piece]]:
    """All shares end to end, cut into buckets which are gathered to one size, as those of gradients are."""
    total = sum(each for _, each in blocks)
    size = bucket_elements(members, blocks[0][0].element_size(), total * members) // members
    bucket: list[_Piece] = []
    free = size
    for block, each in blocks:
        first = 0
        while first < each:
            last = min(each, first + free)
            bucket.append(_Piece(block, each, first, last))
            free, first = free - (last - first), last
            if not free:
                yield bucket
                bucket, free = [], size
    if bucket:
        yield bucket


def _send(bucket: Sequence[_Piece], axis: Axis) -> CommHandle:
    own = [piece.of(axis.index) for piece in bucket]
    sent = bucket[0].block.new_zeros(sum(piece.last - piece.first for piece in bucket))
    torch._foreach_copy_([part[: len(mine)] for part, mine in zip(_parts(sent, bucket), own, strict=True)], own)
    return all_gather(sent, axis)


def _receive(sent: CommHandle, bucket: Sequence[_Piece], axis: Axis) -> None:
    """Copies the other members' parts to their places."""
    gathered = sent.wait().view(axis.size, -1)
    if axis.traffic.is_dry:  # nothing has come
        return
    for member in range(axis.size):
        if member != axis.index:
            places = [piece.of(member) for piece in bucket]
            parts = _parts(gathered[member], bucket)
            torch._foreach_copy_(places, [part[: len(place)] for part, place in zip(parts, places, strict=True)])


def _parts(flat: Tensor, bucket: Sequence[_Piece]) -> tuple[Tensor, ...]:
    return flat.split([piece.last - piece.first for piece in bucket])

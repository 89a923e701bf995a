"""The optimiser's state sharded over `data`: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054, §5.1). What a
share is: distributed/data_shares.py.

    R rows of this rank's block of a parameter, n elements of it, D ranks along data, C = ceil(R/D) rows of a share

Ranks along `data` hold copies of every block. Each keeps the moments of C rows of it alone, steps these rows, and gets
the others' rows by all-gathers. Gradients are summed over `data` whole, under the backward pass, as without it: so
clipping and hooks see the same bits; or, in stage 2 (§5.2), each rank gets the sums of its shares alone
(distributed/grad_buckets.py), and all else is the same.

At rest a rank holds 2 C n/R elements of state a parameter at most, and not 2 n. Received a step: (D - 1) C n/R elements
a parameter, all-gathered over data in buckets, in the parameters' type.

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

from tensor3d.distributed.collectives import Axis, CommHandle, all_gather
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.data_shares import lies_in_share, share_elements
from tensor3d.sharding.param_layout import local

_IN_FLIGHT = 2  # buckets: one travels while the one before it is copied


def check_share(parameter: Tensor, cube: Cube) -> None:
    """Raises ValueError where shares of a parameter would not be parts of its memory, which kernels write to."""
    if lies_in_share(parameter, cube.axis("data")) and not local(parameter).is_contiguous():
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
        if lies_in_share(parameter, axis):
            block = local(parameter)
            each = share_elements(block.shape, axis.size)
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

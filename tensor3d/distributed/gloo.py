"""Collectives between CPUs by direct exchange: every member sends to every other one at once.

gloo's own all-gather and all-reduce pass blocks around a ring, in up to 2(n-1) steps that each wait for a neighbour,
which takes longest where members share cores; and its reduce-scatter is an all-reduce of everything, twice the bytes.
Its all-to-all has one step. What is received here is what the ring model counts (distributed/comm_stats.py), to the
byte.

n members
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tensor3d.distributed.comm_stats import FEW

Wait = Callable[[Any], object]
"""Waits for the work of a further exchange, as for the first."""
Finish = Callable[[Tensor, Wait], Tensor]
"""Makes the result of a collective of what it has received, once that is there."""
_LARGEST = 2**20
"""Bytes of a result up to which steps cost more than bytes: above it a ring needs no second copy of what is sent."""


def exchanges(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether collectives of `tensor` are gloo's."""
    return tensor.is_cpu and "cpu:gloo" in dist.get_backend_config(group)


def gathers_directly(bytes_of_result: int, members: int) -> bool:
    """Whether an all-gather or all-reduce of that size is to go by exchange. A ring of two is one already."""
    return members > 2 and bytes_of_result <= _LARGEST


def start_reduce_scatter(parts: Tensor, group: dist.ProcessGroup | None, members: int) -> tuple[Tensor, Any, Finish]:
    """Of contiguous `parts` (n*m, ...): what is received, the work, and what makes (m, ...) of it: the sum in the order
    of the members."""
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)
    return received, work, lambda arrived, wait: _sum_of_members(arrived, members=members)


def start_all_gather(shard: Tensor, group: dist.ProcessGroup | None, members: int) -> tuple[Tensor, Any, Tensor]:
    """Of a contiguous `shard` (m, ...): the result (n*m, ...), the work, and what is sent."""
    sent = shard.expand(members, *shard.shape).flatten(0, 1).contiguous()
    result = torch.empty_like(sent)
    return result, dist.all_to_all_single(result, sent, group=group, async_op=True), sent


def start_all_reduce(part: Tensor, group: dist.ProcessGroup | None, members: int) -> tuple[Tensor, Any, Finish, Tensor]:
    """Of a contiguous `part`: what is received, the work, what makes the sum of it, in place, and what is sent.

    Of few numbers in one exchange of an even number of them. Of more in two, the second where the first is waited for:
    members must wait for their collectives in one order.
    """
    flat = part.view(-1)
    if flat.shape[0] <= FEW:
        even = max(2, -(-flat.shape[0] // 2) * 2)
        received, work, sent = start_all_gather(F.pad(flat, (0, even - flat.shape[0])), group, members)

        def finish(arrived: Tensor, wait: Wait) -> Tensor:
            flat.copy_(_sum_of_members(arrived, members=members)[: flat.shape[0]])
            return part

        return received, work, finish, sent
    sent = F.pad(flat, (0, -(-flat.shape[0] // members) * members - flat.shape[0]))
    received, work, sums = start_reduce_scatter(sent, group, members)

    def finish_both(arrived: Tensor, wait: Wait) -> Tensor:
        result, gathering, _ = start_all_gather(sums(arrived, wait), group, members)
        wait(gathering)
        flat.copy_(result[: flat.shape[0]])
        return part

    return received, work, finish_both, sent


def _sum_of_members(received: Tensor, *, members: int) -> Tensor:
    first, second, *others = received.view(members, received.shape[0] // members, *received.shape[1:]).unbind()
    if received.dtype.itemsize < 4:  # rounded once
        return torch.stack([first, second, *others]).sum(0)
    total = first + second
    for other in others:
        total += other
    return total

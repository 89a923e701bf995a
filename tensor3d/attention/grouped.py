"""One batch of attention for each length class (Zeng et al. 2022, arXiv 2208.08124, §4.1), on GPUs each on its stream.

T rows of a rank, R rows that ask, S slots of all groups, h heads of a rank, d head dimension
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.attention.backends import AttentionArgs, apart
from tensor3d.attention.cpu import in_place, serves, with_dropout
from tensor3d.attention.flash_version import flash_version
from tensor3d.attention.relative import attend
from tensor3d.batches.length_groups import LengthGroup, LengthGroups
from tensor3d.ops.autograd_function import Function, once_differentiable
from tensor3d.torch_private import storage_id

Slots = tuple[Tensor, ...]
"""q, k and v of a group, (slots, h, d) each."""


def grouped(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """Saved for backward: q, k, v and the result in slots, S each, and the kernel's statistics. On a CPU, with dropout:
    see `with_dropout`; without, of sequences that it takes as they lie: see `in_place`."""
    sequences, queries = call.sequences, call.queries
    grouping = sequences.grouping_of(queries, call.window, call.causal)
    if serves(k, call, grouping):
        return in_place(q, k, v, call, grouping)
    slots = list(zip(*_slots(q, k, v, grouping), strict=True))
    asked = [(group, own) for group, own in zip(grouping.groups, slots, strict=True) if group.asked != 0]
    with suitable_kernels(call.dropout):
        if k.is_cuda and len(asked) > 1:
            results = _on_streams(asked, call)
        else:
            results = [_attend(group, own, call) for group, own in asked]
    if queries is not None:
        # The slot of those that are not used; and nothing of q, k and v, so that a backward pass comes through here
        # where all are unused, as on the other ranks.
        unused = v.new_zeros(1, *v.shape[1:])
        results += [unused if call.relative is None else call.relative.without_rows(unused), q[:0], k[:0], v[:0]]
    if grouping.restore is None:
        return torch.cat(results) if len(results) > 1 else results[0]
    if grouping.ask is not None:  # slots of padding are not restored, so no gradient comes back through them
        return torch.cat(results).index_select(0, grouping.restore)
    restored: Tensor = _Restored.apply(grouping, *results)
    return restored


@contextmanager
def suitable_kernels(dropout: float) -> Iterator[None]:
    """SDPA without cuDNN, which makes a plan for every new shape, which takes far longer than to compute it: groups
    have other shapes in every micro-batch. And, where probabilities are dropped, without what has taken the place of
    FlashAttention: SDPA would choose it still, and it would refuse."""
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    flash = dropout and flash_version() is not None and torch.backends.cuda.flash_sdp_enabled()
    if cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if flash:
        torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        if cudnn:
            torch.backends.cuda.enable_cudnn_sdp(True)
        if flash:
            torch.backends.cuda.enable_flash_sdp(True)


def _slots(q: Tensor, k: Tensor, v: Tensor, grouping: LengthGroups) -> list[Slots]:
    """q, k and v, each of every group."""
    if grouping.gather is not None and grouping.ask is None:
        return _by_tensor(_Gathered.apply(q, k, v, grouping), len(grouping.groups))
    if grouping.gather is None:
        v = apart(v, k)
    places = (grouping.gather if grouping.ask is None else grouping.ask, grouping.gather, grouping.gather)
    chosen = [t if place is None else t.index_select(0, place) for t, place in zip((q, k, v), places, strict=True)]
    if len(grouping.groups) == 1:
        return [(t,) for t in chosen]
    sizes = [group.slots for group in grouping.groups]
    asking = [group.asking_slots for group in grouping.groups]
    return [t.split(each) for t, each in zip(chosen, (asking, sizes, sizes), strict=True)]


def _by_tensor(parts: tuple[Tensor, ...], groups: int) -> list[Slots]:
    return [parts[first : first + groups] for first in range(0, 3 * groups, groups)]


# Where sequences are whole and all rows ask, each has one slot, and the way back of a gather is another one: by zeros
# and sums, as PyTorch goes back from `index_select`, more is named and moved.


class _Gathered(Function):
    """q, k and v (T, h, d) to the slots of each group of q, of k and of v. Saves nothing.

    What a slot of padding gets as a gradient is nothing: no row that asks has read it, or its own is not restored.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, grouping: LengthGroups) -> tuple[Tensor, ...]:
        assert grouping.gather is not None
        ctx.grouping, ctx.keeps_face = grouping, True
        fused = None if q.device.type == "cpu" else _fused(q, k, v)
        if fused is not None:
            chosen = fused.index_select(0, grouping.gather).unbind(2)
        else:
            chosen = tuple(t.index_select(0, grouping.gather) for t in (q, k, v))
        sizes = [group.slots for group in grouping.groups]
        return tuple(part for t in chosen for part in t.split(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.cat(gradients).index_select(0, ctx.grouping.restore_each).chunk(3), None


class _Restored(Function):
    """The results of all groups, in slots, to the rows (T, h, d). Saves nothing."""

    @staticmethod
    def forward(ctx: Any, grouping: LengthGroups, *results: Tensor) -> Tensor:
        assert grouping.restore is not None
        ctx.grouping, ctx.keeps_face = grouping, True
        slots = torch.cat(results) if len(results) > 1 else results[0]
        return slots.index_select(0, grouping.restore)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grouping = ctx.grouping
        if all(group.mask is None for group in grouping.groups):
            slots = gradient.index_select(0, grouping.gather)
        else:  # slots of padding have none
            slots = gradient.new_zeros(len(grouping.gather), *gradient.shape[1:])
            slots.index_copy_(0, grouping.restore, gradient)
        return None, *slots.split([group.slots for group in grouping.groups])


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """(T, h, 3, d), whose thirds they are; None: they lie in another way."""
    rows, heads, width = q.shape
    first, step = q.storage_offset(), 1
    alike = q.stride() == k.stride() == v.stride() == (3 * heads * width, 3 * width, step)
    apart = (k.storage_offset() - first, v.storage_offset() - first) == (width, 2 * width)
    if not (alike and apart and storage_id(q) == storage_id(k) == storage_id(v)):
        return None
    return q.as_strided((rows, heads, 3, width), (3 * heads * width, 3 * width, width, step))


def _attend(group: LengthGroup, slots: Slots, call: AttentionArgs) -> Tensor:
    """(asking slots of the group, h, d)"""
    members = len(group.members)
    q, k, v = (t.view(members, len(t) // members, *t.shape[1:]).transpose(1, 2) for t in slots)
    if call.relative is not None:
        return attend(q, k, v, call.relative, group, call).transpose(1, 2).flatten(0, 1)
    mask, causal = group.masking(call.window, call.causal)
    if call.dropout and k.device.type == "cpu":
        result = with_dropout(q, k, v, group.band(None, True) if causal else mask, call.dropout)
    else:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=call.dropout, is_causal=causal)
    return result.transpose(1, 2).flatten(0, 1)


def _on_streams(asked: Sequence[tuple[LengthGroup, Slots]], call: AttentionArgs) -> list[Tensor]:
    """The groups beside one another. Autograd runs the backward of each on the stream of its forward, and lets streams
    wait where gradients go from one to another.

    What one stream takes from the allocator and another one uses must not be given away before the other is done with
    it, which `record_stream` tells the allocator: q, k and v are kept until their group's backward, on its own stream;
    the result comes from its stream's memory and is read on the current one.
    """
    device = asked[0][1][0].device
    current, results = torch.cuda.current_stream(device), []
    relative = [] if call.relative is None else call.relative.tensors
    masks = [group.masking(call.window, call.causal)[0] for group, _ in asked]  # made here, whoever uses them
    begun = current.record_event()
    for number, ((group, slots), mask) in enumerate(zip(asked, masks, strict=True)):
        stream = _stream(device, number)
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            result = _attend(group, slots, call)
        for tensor in (*slots, *([] if mask is None else [mask]), *relative):
            tensor.record_stream(stream)
        result.record_stream(current)
        results.append(result)
    for number in range(len(asked)):
        current.wait_stream(_stream(device, number))
    return results


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same ones again: each has its own pool of memory."""
    return torch.cuda.Stream(device)

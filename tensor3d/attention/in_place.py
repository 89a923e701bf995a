"""Sequences where they lie, on a CPU: PyTorch's flash kernel for each, its results written to their rows at once.

SDPA gives each sequence a result, and autograd each a gradient, all of which live until they are joined: twice the
memory, none of it in a cache or known to the system yet. Here one result lives as long as it takes to copy it.

The kernel's backward pass is slow on short sequences of narrow types (docs/attention.md). The shortest go back in fp32,
by the same kernel; those of middling length, where the processor multiplies bf16, in whole products, from probabilities
made again.

T rows of a rank, h heads of a rank, d head dimension
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensor3d.attention import products
from tensor3d.attention.call import Call, apart
from tensor3d.grouping import Grouping, LengthGroup

# What SDPA itself calls on a CPU, where nothing is dropped.
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SHORT, MIDDLING = 128, 512
"""Rows of a sequence: below the first the kernel is fastest in fp32, up to the second whole products are faster."""


def serves(k: Tensor, call: Call, grouping: Grouping) -> bool:
    """Whether the sequences can be taken so: as they lie, all rows asking, without dropout, mask or window."""
    as_they_lie = grouping.gather is None and call.queries is None
    whole = call.window is None and not call.dropout
    # Whoever forbids the kernel, as `torch.nn.attention.sdpa_kernel` does, gets SDPA's other ones.
    return k.device.type == "cpu" and as_they_lie and whole and torch.backends.cuda.flash_sdp_enabled()


def in_place(q: Tensor, k: Tensor, v: Tensor, call: Call, grouping: Grouping) -> Tensor:
    """Saved for backward: q, k, v, the result itself, and the kernel's statistics."""
    v = apart(v, k)
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    result: Tensor = _InPlace.apply(q, k, v, grouping.groups, call.causal)
    return result


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: tuple[LengthGroup, ...], causal: bool) -> Tensor:
        result, statistics = torch.empty(q.shape, dtype=q.dtype, device=q.device), []
        for rows, queries, keys, values in _of_each(groups, result, q, k, v):
            own, statistic = _FORWARD(queries, keys, values, 0.0, causal)
            rows.copy_(own)
            statistics.append(statistic)
        ctx.save_for_backward(q, k, v, result, *statistics)
        ctx.groups, ctx.causal, ctx.keeps_face = groups, causal, True
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, *statistics = ctx.saved_tensors
        found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        parts = _of_each(ctx.groups, *found, gradient.contiguous(), q, k, v, result)
        for group, own, statistic in zip(ctx.groups, parts, statistics, strict=True):
            if in_products(q.dtype, group.length):
                _backward_in_products(own, group.band(None, True) if ctx.causal else None)
            else:
                _backward_by_the_kernel(own, statistic, ctx.causal)
        return *found, None, None


def in_products(dtype: torch.dtype, length: int) -> bool:
    """Whether sequences of that length go back in whole products."""
    return SHORT <= length <= MIDDLING and products.has_products_in(dtype)


def _backward_in_products(own: tuple[Tensor, ...], mask: Tensor | None) -> None:
    """Writes the first three of `_of_each` in the backward pass, the gradients of q, k and v."""
    *places, above, q, k, v, _ = own
    hidden = None if mask is None else (~mask).expand(*q.shape[:3], -1)
    for part in products.parts(q, k):
        matrices = (t[part].flatten(0, 1) for t in (above, q, k, v))
        found = _of_part(*matrices, hidden=None if hidden is None else hidden[part])
        for place, each in zip(places, found, strict=True):
            place[part] = each.view(place[part].shape)
        del found, each  # not beside the next part's


def _of_part(above: Tensor, q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None) -> tuple[Tensor, ...]:
    return products.gradients(above, q, k, v, probabilities=products.probabilities_of(q, k, hidden=hidden))


def _backward_by_the_kernel(own: tuple[Tensor, ...], statistic: Tensor, causal: bool) -> None:
    """The same."""
    places, given = own[:3], own[3:]
    if given[0].dtype.itemsize < 4 and given[0].shape[2] < SHORT:
        given = tuple(t.float() for t in given)
    for place, each in zip(places, _BACKWARD(*given, statistic, 0.0, causal), strict=True):
        place.copy_(each)


def _of_each(groups: tuple[LengthGroup, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each group, of every tensor: views (members, h, length, d) of (T, h, d)."""
    slots = [group.slots for group in groups]
    parts = zip(*(t.transpose(0, 1).unsqueeze(0).split(slots, 2) for t in tensors), strict=True)
    for group, own in zip(groups, parts, strict=True):
        members = len(group.members)
        yield own if members == 1 else tuple(t.squeeze(0).unflatten(1, (members, -1)).transpose(0, 1) for t in own)

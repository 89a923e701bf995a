"""Sequences where they lie, on a CPU: PyTorch's flash kernel for each, its results written to their rows at once.

SDPA gives each sequence a result, and autograd each a gradient, all of which live until they are joined: twice the
memory, none of it in a cache or known to the system yet. Here one result lives as long as it takes to copy it.

The kernel's backward pass is slow on short sequences of narrow types (docs/attention.md). The shortest go back in fp32,
by the same kernel; those of middling length, where the processor multiplies bf16, in whole products, from probabilities
made again.

T rows of a rank, h heads of a rank, d head dimension
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tensor3d.attention.backends import AttentionArgs, apart
from tensor3d.batches.length_groups import LengthGroup, LengthGroups
from tensor3d.ops.as_type import without_autocast
from tensor3d.ops.autograd_function import Function, once_differentiable
from tensor3d.ops.dropout import gain_of, keep_mask, only
from tensor3d.torch_private import (
    flash_attention_cpu,
    flash_attention_cpu_backward,
    has_bf16_products,
    is_there,
    softmax_backward,
)

# ----------------------------------------------------------------------------------------------------------------------
# Attention in whole products, a few heads at once, on a CPU: where no kernel of PyTorch's does it, or none as fast.
#
# b heads of all members in hand, d head dimension

_AT_ONCE = 2**20
"""Probabilities, at least those of one head: of more, no step finds in a cache what the one before has left there."""


def parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Members and heads of (members, heads, rows, d) that are computed at once: whole members, or some heads of one."""
    members, heads, rows = q.shape[:3]
    step, some = at_once(heads, rows * k.shape[2])
    for first in range(0, members, step):
        for head in range(0, heads, some):
            yield slice(first, first + step), slice(head, head + some)


def at_once(heads: int, probabilities: int) -> tuple[int, int]:
    """How many members, and how many of their heads, are computed at once.

    Args:
        heads: of a member.
        probabilities: of a head.
    """
    some = max(1, _AT_ONCE // probabilities)
    return max(1, some // max(1, heads)), max(1, min(some, heads))


def probabilities_of(q: Tensor, k: Tensor, *, hidden: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)), (b, rows of q, rows of k), of q's type; scores, and the softmax over them, in fp32 at
    least, as in PyTorch's fused kernels.

    Args:
        q, k: (b, rows, d)
        hidden: bool, of as many elements in that order: what is not seen; each query sees some.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = product(q.to(wide) * (1 / math.sqrt(q.shape[-1])), k.to(wide).transpose(1, 2))
    if hidden is not None:
        scores.view(hidden.shape).masked_fill_(hidden, -math.inf)
    scores = scores.softmax(-1)
    return scores.to(q.dtype)


def gradients(
    above: Tensor, q: Tensor, k: Tensor, v: Tensor, *, probabilities: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, by that of the result, (b, rows, d) each, in the type in which it multiplies.

    Args:
        kept: which probabilities the result is of, if not of all; what stays is not scaled.
    """
    above, q, k, v, probabilities = (multipliable(t) for t in (above, q, k, v, probabilities))
    scale, left = 1 / math.sqrt(q.shape[-1]), probabilities if kept is None else only(probabilities, kept)
    dv = product(left.transpose(1, 2), above)
    del left
    of_probabilities = product(above, v.transpose(1, 2))
    if kept is not None:
        of_probabilities = only(of_probabilities, kept)
    of_scores = softmax_backward(of_probabilities, probabilities, -1, probabilities.dtype)
    del of_probabilities
    return product(of_scores, k).mul_(scale), product(of_scores.transpose(1, 2), q).mul_(scale), dv


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, by batch, in their type: or, if that is bf16 or fp16, in one that is `multipliable`."""
    with without_autocast(a.device):  # which would narrow those for scores
        return torch.bmm(multipliable(a), multipliable(b))


def multipliable(tensor: Tensor) -> Tensor:
    """The same numbers in a type for products. fp16 has too small a range for gradients of probabilities; and of bf16,
    where the processor has no products, PyTorch takes far longer for them than for converting."""
    return tensor.float() if tensor.dtype.itemsize < 4 and not has_products_in(tensor.dtype) else tensor


def has_products_in(dtype: torch.dtype) -> bool:
    """Whether to multiply in this narrow type on this processor."""
    mkldnn = torch.backends.mkldnn
    if dtype != torch.bfloat16 or not (mkldnn.is_available() and mkldnn.enabled):
        return False
    return has_bf16_products()


# ----------------------------------------------------------------------------------------------------------------------
# Attention with dropout of its probabilities on a CPU, in whole products: no kernel of PyTorch's drops there.
#
# SDPA computes it step by step, over all sequences at once: it keeps probabilities three times, in fp32 whatever it is
# given, and draws a truth value for each. Here the products are of the inputs' own type where the processor has them, a
# few heads' at once, and a probability and a byte are kept.
#
# h heads, d head dimension


def with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, like q; of the probabilities only what dropout leaves, so much the larger.

    Saved for backward: q, k, v, the probabilities, and which of them stay, in a byte each. Its gradient has none.

    Args:
        q, k, v: (members, h, rows, d), of q maybe other rows than of k and v.
        mask: bool, broadcast to (members, h, rows of q, rows of k), True where a query sees a key; each sees some.
    """
    # Within `forward` it cannot be told whether anything will be differentiated.
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    result: Tensor = _WithDropout.apply(q, k, v, mask, p, differentiated)
    return result


class _WithDropout(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, differentiated: bool
    ) -> Tensor:
        result, kept = torch.empty(q.shape, dtype=q.dtype, device=q.device), []
        hidden = None if mask is None else (~mask).expand(*q.shape[:3], -1)
        for part in parts(q, k):
            queries, keys, values = (t[part].flatten(0, 1) for t in (q, k, v))
            probabilities = probabilities_of(queries, keys, hidden=None if hidden is None else hidden[part])
            stays = keep_mask(probabilities, p)
            own = product(only(probabilities, stays), values).mul_(gain_of(p))
            result[part] = own.view(result[part].shape)
            if differentiated:
                kept += [probabilities, stays]
        ctx.save_for_backward(q, k, v, *kept)
        ctx.p, ctx.keeps_face = p, True
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        for part, probabilities, stays in zip(parts(q, k), kept[::2], kept[1::2], strict=True):
            above, *own = (t[part].flatten(0, 1) for t in (gradient, q, k, v))
            above = multipliable(above) * gain_of(ctx.p)
            for place, each in zip(found, gradients(above, *own, probabilities=probabilities, kept=stays), strict=True):
                place[part] = each.view(place[part].shape)
        return *found, None, None, None


# --- Sequences where they lie, on a CPU -------------------------------------------------------------------------------

SHORT, MIDDLING = 128, 512
"""Rows of a sequence: below the first the kernel is fastest in fp32, up to the second whole products are faster."""


def serves(k: Tensor, call: AttentionArgs, grouping: LengthGroups) -> bool:
    """Whether the sequences can be taken so: as they lie, all rows asking, without dropout, mask or window."""
    as_they_lie = grouping.gather is None and call.queries is None
    whole = call.window is None and call.relative is None and not call.dropout and is_there(flash_attention_cpu)
    # Whoever forbids the kernel, as `torch.nn.attention.sdpa_kernel` does, gets SDPA's other ones.
    return k.device.type == "cpu" and as_they_lie and whole and torch.backends.cuda.flash_sdp_enabled()


def in_place(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, grouping: LengthGroups) -> Tensor:
    """Saved for backward: q, k, v, the result itself, and the kernel's statistics."""
    v = apart(v, k)
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    result: Tensor = _InPlace.apply(q, k, v, grouping.groups, call.causal)
    return result


class _InPlace(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: tuple[LengthGroup, ...], causal: bool) -> Tensor:
        result, statistics = torch.empty(q.shape, dtype=q.dtype, device=q.device), []
        for rows, queries, keys, values in _of_each(groups, result, q, k, v):
            own, statistic = flash_attention_cpu(queries, keys, values, 0.0, causal)
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
    return SHORT <= length <= MIDDLING and has_products_in(dtype)


def _backward_in_products(own: tuple[Tensor, ...], mask: Tensor | None) -> None:
    """Writes the first three of `_of_each` in the backward pass, the gradients of q, k and v."""
    *places, above, q, k, v, _ = own
    hidden = None if mask is None else (~mask).expand(*q.shape[:3], -1)
    for part in parts(q, k):
        matrices = (t[part].flatten(0, 1) for t in (above, q, k, v))
        found = _of_part(*matrices, hidden=None if hidden is None else hidden[part])
        for place, each in zip(places, found, strict=True):
            place[part] = each.view(place[part].shape)
        del found, each  # not beside the next part's


def _of_part(above: Tensor, q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None) -> tuple[Tensor, ...]:
    return gradients(above, q, k, v, probabilities=probabilities_of(q, k, hidden=hidden))


def _backward_by_the_kernel(own: tuple[Tensor, ...], statistic: Tensor, causal: bool) -> None:
    """The same."""
    places, given = own[:3], own[3:]
    if given[0].dtype.itemsize < 4 and given[0].shape[2] < SHORT:
        given = tuple(t.float() for t in given)
    for place, each in zip(places, flash_attention_cpu_backward(*given, statistic, 0.0, causal), strict=True):
        place.copy_(each)


def _of_each(groups: tuple[LengthGroup, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each group, of every tensor: views (members, h, length, d) of (T, h, d)."""
    whole = [t.unsqueeze(0).transpose(1, 2) for t in tensors]
    slots = [group.slots for group in groups]
    parts: Iterable[Sequence[Tensor]] = [whole]
    if len(groups) > 1:
        parts = zip(*(t.split(slots, 2) for t in whole), strict=True)
    for group, own in zip(groups, parts, strict=True):
        members = len(group.members)
        if members > 1:
            own = [t.squeeze(0).unflatten(1, (members, -1)).transpose(0, 1) for t in own]
        yield tuple(own)

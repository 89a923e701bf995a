"""Attention with dropout of its probabilities on a CPU, in whole products: no kernel of PyTorch's drops there.

SDPA computes it step by step, over all sequences at once: it keeps probabilities three times, in fp32 whatever it is
given, and draws a truth value for each. Here the products are of the inputs' own type, a few heads' at once, and a
probability and a byte are kept.

h heads, d head dimension
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensor3d.dropping import draw_kept, only

_AT_ONCE = 2**20
"""Probabilities, at least those of one head: of more, no step finds in a cache what the one before has left there."""


def with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, p: float) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, of the probabilities only what dropout leaves.

    Scores and the softmax over them are in fp32 at least, as in PyTorch's fused kernels. Saved for backward: q, k, v,
    the probabilities, and which of them stay, in a byte each.

    Args:
        q, k, v: (members, h, rows, d), of q maybe other rows than of k and v.
        mask: bool, broadcast to (members, h, rows of q, rows of k), True where a query sees a key; each sees some.
        causal: instead of a mask, a query sees the key of its own place and those before.
    """
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    result: Tensor = _WithDropout.apply(q, k, v, mask, p)
    return result


class _WithDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
        result, kept = torch.empty(q.shape, dtype=q.dtype, device=q.device), []
        hidden = None if mask is None else (~mask).expand(*q.shape[:3], -1)
        for part in _parts(q, k):
            out, queries, keys, values = (t[part].flatten(0, 1) for t in (result, q, k, v))
            probabilities = _probabilities(queries, keys, None if hidden is None else hidden[part])
            stays = draw_kept(probabilities, p)
            torch.bmm(only(probabilities, stays), values, out=out).mul_(1 / (1 - p))
            kept += [probabilities, stays]
        ctx.save_for_backward(q, k, v, *kept)
        ctx.p, ctx.keeps_face = p, True
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        for part, probabilities, stays in zip(_parts(q, k), kept[::2], kept[1::2], strict=True):
            dq, dk, dv, above, queries, keys, values = (t[part].flatten(0, 1) for t in (*found, gradient, q, k, v))
            above = above * (1 / (1 - ctx.p))
            torch.bmm(only(probabilities, stays).transpose(1, 2), above, out=dv)
            of_kept = only(torch.bmm(above, values.transpose(1, 2)), stays)
            of_scores = torch._softmax_backward_data(of_kept, probabilities, -1, probabilities.dtype)
            torch.bmm(of_scores, keys, out=dq).mul_(scale)
            torch.bmm(of_scores.transpose(1, 2), queries, out=dk).mul_(scale)
        return *found, None, None


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Members and heads of them that are computed at once: whole members, or some heads of one."""
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
    return max(1, some // heads), min(some, heads)


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """(members * heads, rows of q, rows of k), of q's type"""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q.to(wide) * (1 / math.sqrt(q.shape[-1])), k.to(wide).transpose(1, 2))
    if hidden is not None:
        scores.view(hidden.shape).masked_fill_(hidden, -math.inf)
    return scores.softmax(-1).to(q.dtype)

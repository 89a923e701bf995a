"""Attention with dropout of its probabilities on a CPU, in whole products: no kernel of PyTorch's drops there.

SDPA computes it step by step, over all sequences at once: it keeps probabilities three times, in fp32 whatever it is
given, and draws a truth value for each. Here the products are of the inputs' own type where the processor has them, a
few heads' at once, and a probability and a byte are kept.

h heads, d head dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensor3d.attention.products import gradients, multipliable, parts, probabilities_of, product
from tensor3d.dropping import draw_kept, gain_of, only


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


class _WithDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, differentiated: bool
    ) -> Tensor:
        result, kept = torch.empty(q.shape, dtype=q.dtype, device=q.device), []
        hidden = None if mask is None else (~mask).expand(*q.shape[:3], -1)
        for part in parts(q, k):
            queries, keys, values = (t[part].flatten(0, 1) for t in (q, k, v))
            probabilities = probabilities_of(queries, keys, hidden=None if hidden is None else hidden[part])
            stays = draw_kept(probabilities, p)
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

"""Attention in whole products, a few heads at once, on a CPU: where no kernel of PyTorch's does it, or none as fast.

b heads of all members in hand, d head dimension
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tensor3d.dropping import only

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
    of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
    del of_probabilities
    return product(of_scores, k).mul_(scale), product(of_scores.transpose(1, 2), q).mul_(scale), dv


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, by batch, in their type: or, if that is bf16 or fp16, in one that is `multipliable`."""
    with torch.autocast("cpu", enabled=False):  # which would narrow those for scores
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
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

"""The order of rows in a fused weight: so that a cut takes whole heads, and both of a gated unit.

    parts (q, k, v; gate, up), groups (heads; inner units), d rows of each part in each group

where some parts have several d in a group, as queries of grouped-query attention, where a group is a head of keys

torch's `in_proj_weight`, and most others', stacks its parts: rows are ordered (part, group, d). Layers here order them
(group, part, d), since a chunk of whole groups then has all its parts: `Attention3D.qkv` with parts=3, groups=heads,
and `GatedMLP3D.gate_up` with parts=2, groups=inner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_fused_rows(stacked: Tensor, *, parts: int | Sequence[int], groups: int) -> Tensor:
    """Rows ordered (part, group, d), as torch has them, brought into the order (group, part, d) of a fused weight here.

        qkv = to_fused_rows(attention.in_proj_weight, parts=3, groups=attention.num_heads)      # nn.MultiheadAttention
        gate_up = to_fused_rows(torch.cat([gate.weight, up.weight]), parts=2, groups=inner)
        order = to_fused_rows(torch.arange(3 * hidden), parts=3, groups=heads)                  # qkv = weight[order]
        qkv = to_fused_rows(torch.cat([q.weight, k.weight, v.weight]), parts=(heads // kv_heads, 1, 1), groups=kv_heads)

    Args:
        stacked: (parts*groups*d, ...), a full weight or bias, or the numbers of its rows.
        parts: 3 of `Attention3D`, 2 of `GatedMLP3D`. Or of each part how many d it has in a group: of `Attention3D`
            with fewer heads of keys and values `(heads // kv_heads, 1, 1)`.
        groups: heads of `Attention3D`, those of keys and values where they are fewer; inner units of `GatedMLP3D`.

    Returns:
        A new tensor of the same shape; differentiable.

    Raises:
        ValueError: rows that are no multiple of parts*groups.
    """
    widths, d = _measured(stacked, parts, groups)
    cut = stacked.split([groups * width * d for width in widths])
    return torch.cat(
        [part.unflatten(0, (groups, width * d)) for part, width in zip(cut, widths, strict=True)], 1
    ).flatten(0, 1)


def from_fused_rows(fused: Tensor, *, parts: int | Sequence[int], groups: int) -> Tensor:
    """The way back: rows ordered (group, part, d) to (part, group, d).

        in_proj_weight = from_fused_rows(layer.qkv.weight.full_tensor(), parts=3, groups=layer.heads)

    Arguments and errors as of `to_fused_rows`.
    """
    widths, d = _measured(fused, parts, groups)
    cut = fused.unflatten(0, (groups, sum(widths) * d)).split([width * d for width in widths], 1)
    return torch.cat([part.flatten(0, 1) for part in cut])


def _measured(tensor: Tensor, parts: int | Sequence[int], groups: int) -> tuple[tuple[int, ...], int]:
    """Of each part how many d it has in a group, and d."""
    widths = (1,) * parts if isinstance(parts, int) else tuple(parts)
    whole = groups * sum(widths)
    if not widths or min(widths) < 1 or groups < 1 or tensor.dim() == 0 or tensor.shape[0] % whole:
        raise ValueError(
            f"a fused weight has a multiple of parts*groups rows. Got shape {tuple(tensor.shape)} with parts={parts} "
            f"and groups={groups}. Pass the full tensor, with parts=3 and groups=heads of Attention3D (if kv_heads are "
            "fewer, parts=(heads // kv_heads, 1, 1) and groups=kv_heads), parts=2 and groups=inner of GatedMLP3D."
        )
    return widths, tensor.shape[0] // whole

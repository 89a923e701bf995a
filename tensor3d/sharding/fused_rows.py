"""The order of rows in a fused weight: so that a cut takes whole heads, and both of a gated unit.

    parts (q, k, v; gate, up), groups (heads; inner units), d rows of each part in each group

torch's `in_proj_weight`, and most others', stacks its parts: rows are ordered (part, group, d). Layers here order them
(group, part, d), since a chunk of whole groups then has all its parts: `Attention3D.qkv` with parts=3, groups=heads,
and `GatedMLP3D.gate_up` with parts=2, groups=inner.
"""

from __future__ import annotations

from torch import Tensor


def to_fused_rows(stacked: Tensor, *, parts: int, groups: int) -> Tensor:
    """Rows ordered (part, group, d), as torch has them, brought into the order (group, part, d) of a fused weight here.

        qkv = to_fused_rows(attention.in_proj_weight, parts=3, groups=attention.num_heads)      # nn.MultiheadAttention
        gate_up = to_fused_rows(torch.cat([gate.weight, up.weight]), parts=2, groups=inner)
        order = to_fused_rows(torch.arange(3 * hidden), parts=3, groups=heads)                  # qkv = weight[order]

    Args:
        stacked: (parts*groups*d, ...), a full weight or bias, or the numbers of its rows.
        parts: 3 of `Attention3D`, 2 of `GatedMLP3D`.
        groups: heads of `Attention3D`, inner units of `GatedMLP3D`.

    Returns:
        A new tensor of the same shape; differentiable.

    Raises:
        ValueError: rows that are no multiple of parts*groups.
    """
    return _swapped(stacked, parts, groups)


def from_fused_rows(fused: Tensor, *, parts: int, groups: int) -> Tensor:
    """The way back: rows ordered (group, part, d) to (part, group, d).

        in_proj_weight = from_fused_rows(layer.qkv.weight.full_tensor(), parts=3, groups=layer.heads)

    Arguments and errors as of `to_fused_rows`.
    """
    return _swapped(fused, groups, parts)


def _swapped(tensor: Tensor, outer: int, inner: int) -> Tensor:
    if outer < 1 or inner < 1 or tensor.dim() == 0 or tensor.shape[0] % (outer * inner):
        raise ValueError(
            f"a fused weight has a multiple of parts*groups rows. Got shape {tuple(tensor.shape)} with {outer} and "
            f"{inner}. Pass the full tensor, with parts=3 and groups=heads of Attention3D, parts=2 and groups=inner of "
            "GatedMLP3D."
        )
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)

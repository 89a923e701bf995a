"""Self-attention over packed sequences.

M tokens of the cube, H hidden size, h heads, d = H/h head dimension
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d.attention import Backend, attention
from tensor3d.cube import Cube
from tensor3d.faces import check_divides
from tensor3d.layers.dropout import check_dropout
from tensor3d.layers.linear import Linear3D
from tensor3d.sequences import Sequences

Recompute = Literal["none", "layer", "attention"]
"""What of a transformer layer is computed again in backward."""


class Attention3D(nn.Module):
    """Multi-head self-attention, face z to face z: fused QKV (z to y), attention on face y, projection (y to z).

    On face y a rank holds whole packs and whole heads, so that attention itself sends nothing. Rows of the fused QKV
    weight are ordered (head, q/k/v, head dimension), so that a cut over y takes whole heads.

    Args:
        hidden: H, divides by heads, y and z.
        heads: h, divides by y.
        causal: a token sees itself and what came before it in its sequence.
        dropout: of the attention probabilities.
        recompute: `"attention"` keeps q, k and v alone for backward, and computes again what lies between them and the
            projection. `"layer"` is for the layer around this one.
        reshard_after_forward: as in `Linear3D`.

    Raises:
        ValueError: sizes that do not divide, named with the axis; a dropout as `Dropout3D` refuses it; an unknown
            `recompute`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        cube: Cube,
        causal: bool = False,
        *,
        dropout: float = 0.0,
        backend: Backend = "grouped",
        bias: bool = True,
        std: float = 0.02,
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}. Got {recompute!r}.")
        check_divides("heads", heads, cube, "y")
        check_divides("hidden", hidden, cube, "y")
        check_divides("hidden", hidden, cube, "z")
        if hidden % heads:
            raise ValueError(f"hidden must divide by heads={heads}. Got {hidden}.")
        check_dropout(dropout, cube)
        self.heads, self.head_dim, self.cube = heads, hidden // heads, cube
        self.causal, self.dropout, self.backend, self.recompute = causal, dropout, backend, recompute
        reshard = reshard_after_forward
        self.qkv = Linear3D(hidden, 3 * hidden, cube, "z", bias, std=std, reshard_after_forward=reshard)
        self.out = Linear3D(hidden, hidden, cube, "y", bias, std=std, reshard_after_forward=reshard)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """(M/xy, H/z) on face z, to the same. `sequences` are those of this rank's rows on face y."""
        qkv = self.qkv(x).view(-1, self.heads // self.cube.axis("y").size, 3, self.head_dim)
        if self.recompute == "attention" and torch.is_grad_enabled():
            return self.out(checkpoint(self._mixed, qkv, sequences, use_reentrant=False))
        return self.out(self._mixed(qkv, sequences))

    def _mixed(self, qkv: Tensor, sequences: Sequences) -> Tensor:
        q, k, v = qkv.unbind(2)
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, sequences, backend=self.backend, dropout=dropout, causal=self.causal).flatten(1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}, dropout={self.dropout}, backend={self.backend}"

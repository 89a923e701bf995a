"""Self-attention over packed sequences.

M tokens of the cube, H hidden size, h heads, d = H/h head dimension
"""

from __future__ import annotations

from torch import Tensor, nn

from tensor3d.attention import Backend, attention
from tensor3d.cube import Cube
from tensor3d.faces import check_divides
from tensor3d.layers.dropout import check_dropout
from tensor3d.layers.linear import Linear3D
from tensor3d.sequences import Sequences


class Attention3D(nn.Module):
    """Multi-head self-attention, face z to face z: fused QKV (z to y), attention on face y, projection (y to z).

    On face y a rank holds whole packs and whole heads, so that attention itself sends nothing. Rows of the fused QKV
    weight are ordered (head, q/k/v, head dimension), so that a cut over y takes whole heads.

    Args:
        hidden: H, divides by heads, y and z.
        heads: h, divides by y.
        causal: a token sees itself and what came before it in its sequence.
        dropout: of the attention probabilities.

    Raises:
        ValueError: sizes that do not divide, named with the axis; a dropout as `Dropout3D` refuses it.
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
    ) -> None:
        super().__init__()
        check_divides("heads", heads, cube, "y")
        check_divides("hidden", hidden, cube, "y")
        check_divides("hidden", hidden, cube, "z")
        if hidden % heads:
            raise ValueError(f"hidden must divide by heads={heads}. Got {hidden}.")
        check_dropout(dropout, cube)
        self.heads, self.head_dim, self.cube = heads, hidden // heads, cube
        self.causal, self.dropout, self.backend = causal, dropout, backend
        self.qkv = Linear3D(hidden, 3 * hidden, cube, "z", bias, std=std)
        self.out = Linear3D(hidden, hidden, cube, "y", bias, std=std)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """(M/xy, H/z) on face z, to the same. `sequences` are those of this rank's rows on face y."""
        qkv = self.qkv(x).view(-1, self.heads // self.cube.axis("y").size, 3, self.head_dim)
        q, k, v = qkv.unbind(2)
        mixed = attention(
            q,
            k,
            v,
            sequences,
            backend=self.backend,
            dropout=self.dropout if self.training else 0.0,
            causal=self.causal,
        )
        return self.out(mixed.flatten(1))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}, dropout={self.dropout}, backend={self.backend}"

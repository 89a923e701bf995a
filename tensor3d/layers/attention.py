"""Self-attention over packed sequences.

M tokens of the cube, H hidden size, h heads, g heads of keys and values, d head dimension
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d.attention import Backend, attention, check_cover, check_queries, check_window
from tensor3d.attention.backends import check_gpus
from tensor3d.attention.relative import RelativeTerms
from tensor3d.batches.row_selection import RowSelection
from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.layers.dropout import check_dropout
from tensor3d.layers.head_norm import HeadNorm3D, are_as_one, normed_and_turned
from tensor3d.layers.linear import Linear3D
from tensor3d.layers.relative import RelativeRows, gather_table
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.ops.rotary import check_rotary, rotary, rotary_of_parts
from tensor3d.sharding.activation_layout import check_activation, check_divides, in_batch
from tensor3d.sharding.layout_checks import mark_alike
from tensor3d.sharding.matmul import matmul

Recompute = Literal["none", "layer", "attention"]
"""What of a transformer layer is computed again in backward."""


class Attention3D(nn.Module):
    """Multi-head self-attention, face z to face z: fused QKV (z to y), attention on face y, projection (y to z).

    On face y a rank holds whole packs and whole heads, so attention itself sends nothing.

    Rows of the fused QKV weight are ordered (head, q/k/v, head dimension), so that a cut over y takes whole heads.
    `to_fused_rows` and `from_fused_rows` convert from and to torch's order, (q/k/v, head, head dimension). With fewer
    heads of keys the order is (head of keys, its h/g heads of queries, k, v), each of d rows: a cut takes whole groups.

    Args:
        hidden: H, divides by y and z.
        heads: h, divides by y.
        head_dim: d. None: H/h, which must be whole.
        kv_heads: g, divides h, and divides by y: keys and values of fewer heads, each of which serves h/g heads of
            queries next to one another (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245, §2.2; of one
            head: multi-query). None: as many as heads.
        causal: a token sees itself and what came before it in its sequence.
        dropout: of the attention probabilities.
        rotary_base: turns queries and keys by their place in the sequence (ops/rotary.py), with this base; 10,000
            is usual. None: no positions here.
        rotary_factor: positions are divided by it (`rotary`); 1 unless told otherwise.
        window: a token sees only tokens less than this far away in its sequence.
        qk_norm: RMSNorms queries and keys of each head before they are turned (`HeadNorm3D`), and this is what is added
            to the means of their squares; 1e-6 is usual. None: no such norms.
        zero_centered_norms: their weights begin at 0, and 1 + weight multiplies.
        recompute: `"attention"` keeps q, k and v alone for backward, and computes again what lies between them and the
            projection. `"layer"` is for the layer around this one.
        reshard_after_forward: as in `Linear3D`.

    Raises:
        ValueError: sizes that do not divide, named with the axis; a dropout as `Dropout3D` refuses it; a window below
            1; rotary positions of an odd head dimension; an unknown `recompute`; a backend that the GPU of some rank is
            too old for.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        cube: Cube,
        causal: bool = False,
        *,
        dropout: float = 0.0,
        backend: Backend = "auto",
        bias: bool = True,
        std: float = 0.02,
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
        rotary_base: float | None = None,
        rotary_factor: float = 1.0,
        window: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: float | None = None,
        zero_centered_norms: bool = False,
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}. Got {recompute!r}.")
        check_divides("heads", heads, cube, "y")
        check_divides("hidden", hidden, cube, "y")
        check_divides("hidden", hidden, cube, "z")
        if head_dim is None:
            if hidden % heads:
                raise ValueError(f"hidden must divide by heads={heads}. Got {hidden}. Choose others, or give head_dim.")
            head_dim = hidden // heads
        elif head_dim < 1:
            raise ValueError(f"head_dim must be at least 1. Got {head_dim}.")
        kv_heads = heads if kv_heads is None else kv_heads
        check_kv_heads(kv_heads, heads)
        check_divides("kv_heads", kv_heads, cube, "y")
        check_dropout(dropout, cube)
        check_window(window)
        if backend != "auto":
            check_gpus(backend, cube.least_capability)
        if rotary_base is not None:
            check_rotary(head_dim, rotary_base, rotary_factor)
        elif rotary_factor != 1.0:
            raise ValueError(f"rotary_factor={rotary_factor} needs a rotary_base. Give it, or leave the factor out.")
        if qk_norm is None and zero_centered_norms:
            raise ValueError("zero_centered_norms=True is of qk_norm. Got no qk_norm. Give it, or leave the other out.")
        self.heads, self.kv_heads, self.head_dim, self.cube = heads, kv_heads, head_dim, cube
        self.causal, self.dropout, self.backend, self.recompute = causal, dropout, backend, recompute
        self.rotary_base, self.rotary_factor, self.window = rotary_base, rotary_factor, window
        reshard = reshard_after_forward
        rows = (heads + 2 * kv_heads) * head_dim
        self.qkv = Linear3D(hidden, rows, cube, "z", bias, std=std, reshard_after_forward=reshard)
        self.out = Linear3D(heads * head_dim, hidden, cube, "y", bias, std=std, reshard_after_forward=reshard)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            self.q_norm, self.k_norm = (
                HeadNorm3D(head_dim, cube, eps=qk_norm, zero_centered=zero_centered_norms) for _ in range(2)
            )

    @out_of_graphs
    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        queries: RowSelection | None = None,
        *,
        relative: RelativeTerms | RelativeRows | None = None,
    ) -> Tensor:
        """(M/xy, H/z) on face z, to the same. `sequences` are those of this rank's rows on face y.

        Args:
            queries: U/z of this rank's rows on face y. The result then has only these, (U/y, H/z).
            relative: what scores add for the distance of query and key. Either terms of this rank's heads, or a table
                of hidden states by distance, from which this layer's own QKV makes keys and queries. The table costs
                a second gather of the weight, and a gather of its keys and queries over x and z.
        """
        if x.dim() == 3:
            return in_batch(lambda rows: self.forward(rows, sequences, queries, relative=relative), x, "Attention3D")
        terms = self._terms(relative) if isinstance(relative, RelativeRows) else relative
        projected = self.qkv(x)
        parts = self.heads // self.kv_heads + 2
        qkv = projected.view(-1, self.kv_heads // self.cube.axis("y").size, parts, self.head_dim)
        if self.recompute == "attention" and torch.is_grad_enabled():
            return self.out(checkpoint(self._mixed, qkv, sequences, queries, terms, use_reentrant=False))
        mixed = self._mixed(qkv, sequences, queries, terms)
        mark_alike(mixed, projected)
        return self.out(mixed)

    def _terms(self, table: RelativeRows) -> RelativeTerms:
        """Keys and queries by distance, (n, h/y, d) each."""
        if self.q_norm is not None:
            raise ValueError("a table by distance needs an attention without qk_norm. Got one with it.")
        if self.kv_heads != self.heads:
            raise ValueError(
                f"a table by distance needs as many heads of keys as of queries. Got kv_heads={self.kv_heads} of "
                f"heads={self.heads}."
            )
        rows = table.dropped
        check_activation(rows, self.qkv.in_features, self.cube, "z", "Attention3D, of a table by distance,")
        # Few rows beside those of tokens: whatever the layer keeps of what it gathers, of these nothing.
        rows = gather_table(matmul(rows, self.qkv.weight, self.cube, "z", self.qkv.bias), self.cube)
        q, k, _ = rows.view(-1, self.heads // self.cube.axis("y").size, 3, self.head_dim).unbind(2)
        return RelativeTerms(
            buckets=table.buckets, keys=k if table.keys else None, queries=q if table.queries else None
        )

    def _mixed(
        self, qkv: Tensor, sequences: Sequences, queries: RowSelection | None, relative: RelativeTerms | None
    ) -> Tensor:
        if self.rotary_base is not None:
            check_cover(sequences, qkv.shape[0])  # before positions meet rows that are not theirs
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        as_one = norms is None or are_as_one(norms, self.head_dim)
        if self.rotary_base is not None and self.cube.speed.compile and as_one:
            waves = self.rotary_base, self.rotary_factor
            if norms is None:
                q, k, v = rotary_of_parts(qkv, sequences.positions, waves[0], self.cube.regions, waves[1])
            else:
                q, k, v = normed_and_turned(qkv, sequences.positions, norms, *waves)
        else:
            q, k, v = _parts(qkv)
            if norms is not None:
                q, k = norms[0](q), norms[1](k)
            if self.rotary_base is not None:
                q, k = (rotary(t, sequences.positions, self.rotary_base, self.rotary_factor) for t in (q, k))
        if queries is not None:
            check_queries(queries, q.shape[0])
            q = _asking(q, queries)
        mixed = attention(
            q,
            k,
            v,
            sequences,
            queries=queries,
            backend=self.backend,
            dropout=self.dropout if self.training else 0.0,
            causal=self.causal,
            window=self.window,
            relative=relative,
        )
        return mixed.flatten(1)

    def extra_repr(self) -> str:
        options = f"heads={self.heads}, causal={self.causal}, dropout={self.dropout}, backend={self.backend}"
        if self.kv_heads != self.heads:
            options += f", kv_heads={self.kv_heads}"
        if self.heads * self.head_dim != self.qkv.in_features:
            options += f", head_dim={self.head_dim}"
        if self.rotary_base is not None:
            options += f", rotary_base={self.rotary_base:g}"
        if self.rotary_factor != 1.0:
            options += f", rotary_factor={self.rotary_factor:g}"
        return options if self.window is None else f"{options}, window={self.window}"


def check_kv_heads(kv_heads: int, heads: int) -> None:
    """Raises ValueError unless so many heads of keys and values serve as many heads of queries each."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must be at least 1 and divide heads={heads}. Got {kv_heads}.")


def _parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, g, h/g + 2, d) to q (rows, h, d), k and v (rows, g, d)."""
    if qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    else:
        q, k, v = qkv.split([qkv.shape[2] - 2, 1, 1], 2)
        q, k, v = q.flatten(1, 2), k.squeeze(2), v.squeeze(2)
    return q, k, v


def _asking(q: Tensor, queries: RowSelection) -> Tensor:
    """The rows that ask, in their order; what an unused slot holds is looked at by nobody."""
    if q.shape[0] == 0:  # no slot is used, and there is no row 0 that could fill it
        return torch.cat([q, q.new_zeros(len(queries), *q.shape[1:])])
    return q.index_select(0, queries.rows.clamp_min(0))

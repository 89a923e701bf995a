"""Attention as others write it in a forward of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallelize.foreign import HEADS, HIDDEN, VOCAB

HEAD_DIM = HIDDEN // HEADS
OUTPUTS = 2 * HIDDEN
KV_HEADS, WIDE = 2, 6  # of grouped queries, whose heads have a size of their own


class NamedHeads(nn.Module):
    """Counts its heads by an attribute, and their columns by its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, HIDDEN
        self.q, self.v, self.proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.k = nn.Linear(HIDDEN, HIDDEN, bias=False)  # its gradient is 0, as it shifts all scores of a row alike

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        d = c // self.n_head
        q, k, v = (part(x).view(b, t, self.n_head, d).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.proj(mixed.transpose(1, 2).contiguous().view(b, t, c))
        return projected


class Fused(nn.Module):
    """One projection of queries, keys and values, which are split by their columns; no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, HIDDEN
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        later = torch.full((t, t), -torch.inf, dtype=x.dtype).triu(1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=later)
        projected: Tensor = self.drop(self.c_proj(mixed.transpose(1, 2).contiguous().view(b, t, c)))
        return projected


class NormsOfHeads(nn.Module):
    """A fused projection with a bias, unbound along a dim of its own, and norms of each head; both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM, eps=1e-6), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        projected: Tensor = self.proj(self.norm(mixed.transpose(1, 2).reshape(b, n, c)))
        return projected


class Grouped(nn.Module):
    """Fewer heads of keys and values, norms over all heads, rotary positions from outside, a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = HEADS, KV_HEADS, WIDE
        self.q, self.o = nn.Linear(HIDDEN, HEADS * WIDE, bias=False), nn.Linear(HEADS * WIDE, HIDDEN)
        self.k, self.v = nn.Linear(HIDDEN, KV_HEADS * WIDE), nn.Linear(HIDDEN, KV_HEADS * WIDE)
        self.q_norm, self.k_norm = nn.RMSNorm(HEADS * WIDE, eps=1e-6), nn.RMSNorm(KV_HEADS * WIDE, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = turned(self.q_norm(self.q(x)).view(b, t, self.heads, self.d).transpose(1, 2), cos, sin)
        k = turned(self.k_norm(self.k(x)).view(b, t, self.kv_heads, self.d).transpose(1, 2), cos, sin)
        k, v = (
            each[:, :, None].expand(b, self.kv_heads, self.heads // self.kv_heads, t, self.d).flatten(1, 2)
            for each in (k, self.v(x).view(b, t, self.kv_heads, self.d).transpose(1, 2))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        projected: Tensor = self.o(mixed.transpose(1, 2).reshape(b, t, self.heads * self.d))
        return projected


class FusedGroups(nn.Module):
    """Queries and fewer keys and values in one projection, cut by sizes that the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.q_size, self.kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.qkv, self.o = nn.Linear(HIDDEN, self.q_size + 2 * self.kv_size), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for part in self.qkv(x).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        projected: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return projected


class Gated(nn.Module):
    """No attention: gate and up in one linear, and a norm of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.norm, self.wo = (
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.LayerNorm(2 * HIDDEN),
            nn.Linear(2 * HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wi(x).chunk(2, dim=-1)
        projected: Tensor = self.wo(self.norm(F.silu(gate) * up))
        return projected


class GatedBySize(nn.Module):
    """The same without a norm, cut by a size that the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = 2 * HIDDEN
        self.wi, self.wo = nn.Linear(HIDDEN, 2 * self.inner, bias=False), nn.Linear(self.inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        both = self.wi(x)
        projected: Tensor = self.wo(F.gelu(both[..., : self.inner]) * both[..., self.inner :])
        return projected


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Projections(nn.Module):
    """What the heads give is projected by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        shape = (*hidden.shape[:-1], -1, HEAD_DIM)
        q, k, v = (part(hidden).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*hidden.shape[:-1], -1), None


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.dense = Projections(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.dense(self.own(x)[0])
        return projected


PROPOSED: dict[Callable[[], nn.Module], str] = {
    NamedHeads: 'own_attention(rows, head_dim=4, output="proj", shares=("n_head",))',
    Fused: 'own_attention(rows, head_dim=4, output="c_proj", fused={"c_attn": 3}, shares=("n_head", "n_embd"))',
    NormsOfHeads: 'own_attention(rows, head_dim=4, output="proj", fused={"qkv": 3}, shares=("num_heads",))',
    Grouped: 'own_attention(rows, head_dim=6, output="o", shares=("heads", "kv_heads"))',
    FusedGroups: 'own_attention(rows, head_dim=4, output="o", fused={"qkv": (2, 1, 1)}, shares=("q_size", "kv_size"))',
    Around: "own_attention(rows, head_dim=4)",
    Gated: 'own_mlp(output="wo", fused={"wi": 2})',
    GatedBySize: 'own_mlp(output="wo", fused={"wi": 2}, shares=("inner",))',
}
"""Each kind, and what is proposed for it."""


class Reader(nn.Module):
    """A language model with one layer of attention; positions are an argument."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCAB, HIDDEN), attention
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        h = self.embed(ids)
        more = ()
        if isinstance(self.attention, Grouped):
            angles = positions[:, None, :, None] * torch.tensor([1.0, 0.3, 0.1] * 2, dtype=h.dtype)
            more = angles.cos(), angles.sin()
        logits: Tensor = self.out(self.norm(h + self.attention(h, *more)))
        return logits

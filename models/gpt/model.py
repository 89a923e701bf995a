"""GPT on packed batches: pre-norm blocks of causal attention and SwiGLU (Touvron et al. 2023, arXiv 2302.13971, §2.2).

M tokens of the cube, H hidden size, V vocabulary
h is always on face z, (M/xy, H/z), unless a comment says otherwise
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models.gpt.causal_batch import lay
from tensor3d import (
    Attention3D,
    Block3D,
    Cube,
    CubeShape,
    Dropout3D,
    Embedding3D,
    GatedMLP3D,
    Projection3D,
    RMSNorm3D,
    Sequences,
    all_reduce_replicated,
    cross_entropy,
    local_rows,
)
from tensor3d.layers.attention import check_kv_heads

_INNER_STEP = 64  # the default inner size is rounded up to a multiple of this: even cuts, and tiles that are full


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """One decoder. Sizes must also divide by the cube's axes: `check` says so before any process is started.

    Raises:
        ValueError: a size below 1, heads that do not divide the hidden size or leave an odd head dimension, a number
            out of its range.
    """

    layers: int
    """Transformer blocks."""
    hidden: int
    """Columns of a hidden state."""
    heads: int
    """Attention heads of a block; divides hidden, and leaves an even head dimension (rotary positions turn pairs)."""
    kv_heads: int | None = None
    """Heads of keys and values, each of which serves as many heads of queries (grouped-query attention, Ainslie et al.
    2023); divides heads. Default: heads."""
    inner: int | None = None
    """Columns inside the gated MLP. Default: 8/3 * hidden, so that it has the weights of an ungated one of 4 * hidden
    (Shazeer 2020), rounded up to a multiple of 64."""
    vocab: int = 50257
    """Entries of the vocabulary; need not divide by anything."""
    positions: int = 1024
    """Tokens of the longest sequence."""
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it. None: all of them."""
    rotary_base: float = 10_000.0
    """Of the rotary positions."""
    tied: bool = True
    """Whether the projection to the vocabulary uses the embedding's weight, or has its own."""
    dropout: float = 0.0
    """Probability, of what each block adds."""
    eps: float = 1e-6
    """Added to RMSNorm's mean squares."""
    std: float = 0.02
    """Standard deviation of initial weights."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        for name in ("inner", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None. Got {value}.")
        if self.kv_heads is not None:
            check_kv_heads(self.kv_heads, self.heads)
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden must divide by heads={self.heads}, with an even head dimension. Got {self.hidden}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1. Got {self.dropout}.")
        for name in ("rotary_base", "eps", "std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite. Got {getattr(self, name)}.")

    @property
    def inner_size(self) -> int:
        return -(-8 * self.hidden // (3 * _INNER_STEP)) * _INNER_STEP if self.inner is None else self.inner

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError where the sizes do not divide on a cube: what the layers would say, before any process."""
        shape.check_block(heads=self.heads, kv_heads=self.kv_heads, hidden=self.hidden, inner=self.inner_size)


PRESETS: dict[str, GptConfig] = {
    "tiny": GptConfig(layers=2, hidden=128, heads=4, positions=256),
    "small": GptConfig(layers=12, hidden=768, heads=12),
}


class Gpt(nn.Module):
    """A causal language model. Every rank constructs it at the same time, after `cube.manual_seed`.

    Raises:
        ValueError: heads or an inner size that do not divide by y, or a hidden size that does not by y and z.
    """

    def __init__(self, config: GptConfig, cube: Cube) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        self.tokens = Embedding3D(config.vocab, config.hidden, cube, std=config.std)
        self.blocks = nn.ModuleList(_block(config, cube) for _ in range(config.layers))
        self.norm = RMSNorm3D(config.hidden, cube, eps=config.eps)
        tied = self.tokens.weight if config.tied else None
        self.head = Projection3D(config.hidden, config.vocab, cube, std=config.std, weight=tied)

    def hidden(self, ids: Tensor, sequences: Sequences) -> Tensor:
        """Tokens (M/x,) of the plane to hidden states (M/xy, H/z) on face z."""
        h = self.tokens(ids)
        for block in self.blocks:
            h = block(h, sequences)
        normed: Tensor = self.norm(h)
        return normed

    def forward(self, ids: Tensor, labels: Tensor, sequences: Sequences, targets: int) -> Tensor:
        """The mean loss of the step's next tokens, in nats, the same on every rank; of one micro-batch its part of it.

        Args:
            ids, labels: (M/x,), those of the plane; see `CausalBatch`.
            sequences: those of this rank's packs.
            targets: next tokens of the whole step, all planes and micro-batches; so the sum of the micro-batches'
                losses is the step's mean, whatever the accumulation and the cube.

        Raises:
            ValueError: no target, as of texts of one token each, whose mean would be no number.
        """
        if targets < 1:
            raise ValueError(f"targets must be at least 1, the next tokens of a step. Got {targets}.")
        logits = self.head(self.hidden(ids, sequences))  # (M/xz, V/y) on face y
        losses, _ = cross_entropy(logits, local_rows(labels, self.cube), self.config.vocab, self.cube)
        # Rows of face y lie over data, x and z, and are equal over y.
        return all_reduce_replicated(losses.sum() / targets, self.cube.over("data", "x", "z"))

    def example(self, tokens: int) -> dict[str, Any]:
        """Arguments of `forward` for `tokens` tokens of the whole cube: two texts in each rank's pack.

        Raises:
            ValueError: tokens of which a plane's share does not divide by y and z, or that leave no two texts.
        """
        shape = self.cube.shape
        packs, unit = shape.planes * shape.z, shape.planes * math.lcm(shape.y, shape.z)
        first, second = tokens // packs // 2, -(-tokens // packs // 2)
        if tokens % unit or first < 1:
            raise ValueError(f"on {shape} tokens must divide by {unit} and be at least {2 * packs}. Got {tokens}.")
        texts = [[0] * first, [0] * second]
        batch = lay([texts] * packs, first + second, self.cube)
        return {**vars(batch), "targets": tokens}


def _block(config: GptConfig, cube: Cube) -> Block3D:
    attention = Attention3D(
        config.hidden,
        config.heads,
        cube,
        causal=True,
        bias=False,
        std=config.std,
        rotary_base=config.rotary_base,
        window=config.window,
        kv_heads=config.kv_heads,
    )
    return Block3D(
        attention,
        RMSNorm3D(config.hidden, cube, eps=config.eps),
        GatedMLP3D(config.hidden, cube, config.inner_size, "silu", std=config.std),
        RMSNorm3D(config.hidden, cube, eps=config.eps),
        norm="pre",
        dropout=Dropout3D(config.dropout, cube),
    )

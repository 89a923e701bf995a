"""GPT on packed batches: pre-norm blocks of causal attention and SwiGLU (Touvron et al. 2023, arXiv 2302.13971, §2.2).

M tokens of the cube, H hidden size, V vocabulary
h is always on face z, (M/xy, H/z), unless a comment says otherwise
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from models.gpt.causal_batch import lay
from models.gpt.config import GptConfig
from tensor3d import (
    Attention3D,
    Block3D,
    Cube,
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
        """
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
    )
    return Block3D(
        attention,
        RMSNorm3D(config.hidden, cube, eps=config.eps),
        GatedMLP3D(config.hidden, cube, config.inner_size, "silu", std=config.std),
        RMSNorm3D(config.hidden, cube, eps=config.eps),
        norm="pre",
        dropout=Dropout3D(config.dropout, cube),
    )

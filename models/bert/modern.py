"""The modern encoder's layer: rotary positions, GeGLU, LayerNorm before each block, no bias, and local attention.

What ModernBERT (Warner et al. 2024, arXiv 2412.13663, §2.1) changed of BERT's layer, with BERT's two objectives kept.
As there, the first layer has no norm before its attention, for the embeddings end with one; and with a window, every
n-th layer sees whole sequences, beginning with the first. Its window of 128 tokens, 64 to each side, is `window=65`
here. Unlike there, one base of the rotary positions serves local and global layers.
"""

from __future__ import annotations

from torch import nn

from models.bert.config import BertConfig
from tensor3d import Attention3D, Block3D, Cube, Dropout3D, GatedMLP3D, LayerNorm3D
from tensor3d.attention import Backend
from tensor3d.layers.attention import Recompute

_ROTARY_BASE = 10_000.0


def modern_layer(
    config: BertConfig,
    cube: Cube,
    number: int,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    keep_gathered: bool = False,
) -> Block3D:
    """Layer `number` of the encoder, counted from 0, face z to face z.

    Args:
        backend, recompute, keep_gathered: as in `BertModel`.

    Raises:
        ValueError: sizes that do not divide, named with the axis.
    """
    attention = Attention3D(
        config.hidden,
        config.heads,
        cube,
        dropout=config.attention_dropout,
        backend=backend,
        bias=False,
        std=config.std,
        recompute=recompute,
        reshard_after_forward=not keep_gathered,
        rotary_base=_ROTARY_BASE if config.rotary_base is None else config.rotary_base,
        window=config.window_of(number),
    )
    mlp = GatedMLP3D(
        config.hidden, cube, config.inner_size, "gelu", std=config.std, reshard_after_forward=not keep_gathered
    )
    return Block3D(
        attention,
        nn.Identity() if number == 0 else LayerNorm3D(config.hidden, cube, eps=config.eps, bias=False),
        mlp,
        LayerNorm3D(config.hidden, cube, eps=config.eps, bias=False),
        norm="pre",
        dropout=Dropout3D(config.dropout, cube),
        recompute=recompute,
    )

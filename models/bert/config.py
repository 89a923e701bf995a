"""The sizes of a BERT, and the presets of Devlin et al. 2018 and Turc et al. 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tensor3d import CubeShape


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """One encoder. Sizes must also divide by the cube's axes; the layers check that.

    Raises:
        ValueError: a size below 1, heads that do not divide the hidden size, a probability outside of [0, 1).
    """

    layers: int
    """Transformer layers."""
    hidden: int
    """Columns of a hidden state."""
    heads: int
    """Attention heads of a layer; divides hidden."""
    inner: int | None = None
    """Columns inside the MLP. Default: 4 * hidden."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    positions: int = 512
    """Rows of the position table: the longest sequence."""
    types: int = 2
    """Token types: first and second sentence."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.1
    """Probability, of attention weights."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual, as in BERT, or before each block."""
    eps: float = 1e-12
    """Added to LayerNorm's variances."""
    std: float = 0.02
    """Standard deviation of initial weights."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "positions", "types"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.inner is not None and self.inner < 1:
            raise ValueError(f"inner must be at least 1. Got {self.inner}.")
        if self.hidden % self.heads:
            raise ValueError(f"hidden must divide by heads={self.heads}. Got {self.hidden}.")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1. Got {getattr(self, name)}.")
        if self.norm not in ("post", "pre"):
            raise ValueError(f'norm must be "post" or "pre". Got {self.norm!r}.')

    @property
    def inner_size(self) -> int:
        return 4 * self.hidden if self.inner is None else self.inner

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError where the sizes do not divide on a cube: what the layers would say, before any process."""
        for what, number, axis in (
            ("heads", self.heads, "y"),
            ("hidden", self.hidden, "y"),
            ("hidden", self.hidden, "z"),
            ("inner", self.inner_size, "y"),
        ):
            size = getattr(shape, axis)
            if number % size:
                raise ValueError(
                    f"{what} must divide by {axis}={size}. Got {number}. Choose another {what} or another cube."
                )


def _preset(layers: int, hidden: int) -> BertConfig:
    return BertConfig(layers=layers, hidden=hidden, heads=hidden // 64)


PRESETS: dict[str, BertConfig] = {
    "tiny": _preset(2, 128),
    "mini": _preset(4, 256),
    "small": _preset(4, 512),
    "base": _preset(12, 768),
    "large": _preset(24, 1024),
}

"""The sizes of a Vision Transformer, and the presets of Dosovitskiy et al. 2021 and Touvron et al. 2021."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """One encoder with a head for classes. Sizes must also divide by the cube's axes; the layers check that.

    Raises:
        ValueError: a size below 1, heads that do not divide the hidden size, a number out of its range.
    """

    layers: int
    """Transformer layers."""
    hidden: int
    """Columns of a hidden state."""
    heads: int
    """Attention heads of a layer; divides hidden."""
    inner: int | None = None
    """Columns inside the MLP. Default: 4 * hidden."""
    classes: int = 1000
    """Classes of images."""
    channels: int = 3
    """Of an image."""
    patch: int = 16
    """Pixels of a patch's side; `channels * patch * patch` must divide by y."""
    grid: int = 24
    """Patches along the longer side of the largest image: rows of each position table."""
    dropout: float = 0.0
    """Probability, of hidden states."""
    attention_dropout: float = 0.0
    """Probability, of attention weights."""
    eps: float = 1e-6
    """Added to LayerNorm's variances."""
    std: float = 0.02
    """Standard deviation of initial weights."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "classes", "channels", "patch", "grid"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.inner is not None and self.inner < 1:
            raise ValueError(f"inner must be at least 1. Got {self.inner}.")
        if self.hidden % self.heads:
            raise ValueError(f"hidden must divide by heads={self.heads}. Got {self.hidden}.")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1. Got {getattr(self, name)}.")
        for name in ("eps", "std"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite. Got {getattr(self, name)}.")

    @property
    def values(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch * self.patch


def _preset(layers: int, hidden: int) -> VitConfig:
    return VitConfig(layers=layers, hidden=hidden, heads=hidden // 64)


PRESETS: dict[str, VitConfig] = {
    "tiny": _preset(12, 192),
    "small": _preset(12, 384),
    "base": _preset(12, 768),
    "large": _preset(24, 1024),
}

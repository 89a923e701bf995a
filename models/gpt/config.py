"""The sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass

from tensor3d import CubeShape

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
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden must divide by heads={self.heads}, with an even head dimension. Got {self.hidden}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1. Got {self.dropout}.")
        for name in ("rotary_base", "eps", "std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0. Got {getattr(self, name)}.")

    @property
    def inner_size(self) -> int:
        return -(-8 * self.hidden // (3 * _INNER_STEP)) * _INNER_STEP if self.inner is None else self.inner

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError where the sizes do not divide on a cube: what the layers would say, before any process."""
        shape.check_block(heads=self.heads, hidden=self.hidden, inner=self.inner_size)


PRESETS: dict[str, GptConfig] = {
    "tiny": GptConfig(layers=2, hidden=128, heads=4, positions=256),
    "small": GptConfig(layers=12, hidden=768, heads=12),
}

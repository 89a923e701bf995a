"""Sizes of a BERT and of its batches, as options of measurements whose sequences are all full."""

from __future__ import annotations

from dataclasses import dataclass

from models.bert import BertConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Fields of a measurement."""

    hidden: int = 256
    """Columns of a hidden state."""
    layers: int = 4
    """Transformer layers."""
    heads: int = 8
    """Attention heads of a layer."""
    vocab: int = 8192
    """Entries of the vocabulary."""
    sequences: int = 8
    """Of the global batch. All are full: nobody gains from packing."""
    length: int = 128
    """Tokens of a sequence."""

    @property
    def config(self) -> BertConfig:
        """Without dropout, so that all that is compared computes the same."""
        return BertConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=self.vocab,
            positions=max(512, self.length),
            dropout=0.0,
            attention_dropout=0.0,
        )

    def check_least(self, **least: int) -> None:
        """Raises ValueError for an option below its least, which is 1 for `sequences` and `length`."""
        for name, bound in {"sequences": 1, "length": 1, **least}.items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name} must be at least {bound}. Got {getattr(self, name)}.")

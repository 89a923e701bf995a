"""`bench layer`: one transformer layer on several cubes, side by side in one run."""

from __future__ import annotations

from dataclasses import dataclass

from tensor3d.layers.attention import Recompute
from tools.bench.pass_command import PassCommand
from tools.bench.subjects import Layer


@dataclass(frozen=True, kw_only=True)
class LayerCommand(PassCommand):
    """Time one transformer layer on one cube or several, in turns, forward and backward; count what it sends, and weigh
    what it keeps."""

    hidden: int = 512
    heads: int = 8
    inner: int | None = None
    """Of the feed-forward block. Default: four times hidden."""
    sequences: int = 16
    """Of the whole job."""
    length: int = 128
    """Tokens of each sequence."""
    recompute: Recompute = "none"
    """What backward computes again instead of keeping it."""

    def subject(self) -> Layer:
        return Layer(
            hidden=self.hidden,
            heads=self.heads,
            inner=4 * self.hidden if self.inner is None else self.inner,
            sequences=self.sequences,
            length=self.length,
            recompute=self.recompute,
            keep_gathered=self.keep_gathered,
        )

"""AdamW on the cube."""

from __future__ import annotations

from tensor3d.optim.moments import Blocks, MomentOptimizer


class AdamW(MomentOptimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, Algorithm 2): torch's fused kernel on local blocks.

    Element by element it needs nothing of other ranks: nothing is sent. State a parameter: `step`, `exp_avg`,
    `exp_avg_sq`, named and stored as those of `torch.optim.AdamW`, whose checkpoints it reads.

    Args, Raises: see `MomentOptimizer`.
    """

    def _advance(self, work: list[Blocks]) -> None:
        for blocks in work:
            self._adam(blocks, blocks.weights, lr=blocks.group["lr"], weight_decay=blocks.group["weight_decay"])

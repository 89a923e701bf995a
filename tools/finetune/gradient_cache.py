"""Gradient caching (Gao et al. 2021, arXiv 2101.06983): a loss over all vectors of a step whose texts do not fit into
one micro-batch.

1. the vectors of all micro-batches, without a graph
2. the loss of them all, and its gradient with respect to each vector
3. each micro-batch once more, with a graph: its backward pass begins with that gradient

The gradients are those of one large micro-batch, for a second forward pass. Dropout draws the same both times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

P = TypeVar("P")
Vectors = Callable[[P], Tensor]
"""Of a micro-batch, (texts, D), the same on every rank; with a graph where one is kept."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedGradients(Generic[P]):
    """What stays of the first pass. Every rank makes one at the same time, with the same micro-batches."""

    loss: Tensor
    """Of the whole step, without a graph."""
    gradients: Sequence[Tensor]
    """Of the vectors of each micro-batch."""
    random: Sequence[tuple[Tensor, Tensor | None]]
    """State of the generators before each one."""
    device: torch.device

    @classmethod
    def of(
        cls, parts: Sequence[P], vectors: Vectors[P], loss: Callable[[Tensor], Tensor], device: torch.device
    ) -> CachedGradients[P]:
        """The first pass.

        Args:
            loss: of the vectors of all parts, one behind another.
        """
        random, found = [], []
        with torch.no_grad():
            for part in parts:
                random.append((torch.get_rng_state(), torch.cuda.get_rng_state(device) if _is_cuda(device) else None))
                found.append(vectors(part))
        together = torch.cat(found).requires_grad_()
        whole = loss(together)
        (gradient,) = torch.autograd.grad(whole, together)
        sizes = [len(each) for each in found]
        return cls(loss=whole.detach(), gradients=gradient.split(sizes), random=random, device=device)

    def surrogate(self, index: int, part: P, vectors: Vectors[P]) -> Tensor:
        """The second pass over a micro-batch: a number whose gradients are those of the loss. Parts come in order."""
        host, device = self.random[index]
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device, self.device)
        return (vectors(part) * self.gradients[index]).sum()


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"

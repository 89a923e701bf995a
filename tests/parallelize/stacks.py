"""Small modules made of a function, and what is read of a proposal for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.parallelize.auto.proposal import Proposal
from tests.parallelize.foreign import HIDDEN


class Stack(nn.Module):
    """Layers by name, and a forward given as a function of them and the input."""

    def __init__(self, forward: Any, **layers: Any) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def linear(inputs: int = HIDDEN, outputs: int = HIDDEN) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def hidden(batch: int = 2, sequence: int = 5) -> Tensor:
    return torch.randn(batch, sequence, HIDDEN)


def spelled(proposal: Proposal) -> dict[str, str]:
    assert [line.pattern for line in proposal.lines] == list(proposal.plan)
    return {line.pattern: line.kind for line in proposal.lines}


def open_at(proposal: Proposal, place: str) -> str:
    """The one open point at a place."""
    (found,) = [point for point in proposal.unresolved if point.startswith(f"{place} (")]
    return found

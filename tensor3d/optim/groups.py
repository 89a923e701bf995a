"""Which parameters decay."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimiser: tensors of two or more dims decay, those of one do not.

    By the dims of the logical tensor, not by names: of all that a transformer has, biases and the gains of LayerNorm
    are vectors, and weights, embeddings and tables are matrices. Names differ from model to model. A tied weight comes
    once; what takes no gradient does not come; of two groups that would be empty one is left out.

    Raises:
        ValueError: `weight_decay` is negative or not finite, or the model has nothing to train.
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0 and finite. Got {weight_decay}.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model takes a gradient. Set requires_grad of what is to be trained.")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

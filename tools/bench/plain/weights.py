"""Weights of `models.bert` in the plain model."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def copy_weights(plain: nn.Module, ours: nn.Module) -> None:
    """Gives the plain model the weights of ours, which is on one device. A tied weight comes once.

    Raises:
        ValueError: they do not have the same parameters.
    """
    theirs = dict(ours.named_parameters())
    own = dict(plain.named_parameters())
    if own.keys() != theirs.keys():
        raise ValueError(f"the models differ in {sorted(own.keys() ^ theirs.keys())}. Make them of the same config.")
    for name, parameter in own.items():
        parameter.copy_(theirs[name])

"""The functions between the two products of a feed-forward block."""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""`"gelu"`: exact (Hendrycks & Gimpel 2016, arXiv 1606.08415). `"gelu_tanh"`: its approximation by tanh."""


def check_activation_name(name: str) -> None:
    """Raises ValueError unless it is one."""
    if name not in get_args(Activation):
        raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}. Got {name!r}.")


def activated(x: Tensor, name: Activation) -> Tensor:
    """The function of that name, element by element: sends nothing; saves its input (relu: its result)."""
    if name == "relu":
        return F.relu(x)
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")

"""The functions between the two products of a feed-forward block."""

from __future__ import annotations

from typing import Literal, get_args

import torch
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


def biased(x: Tensor, bias: Tensor, name: Activation) -> Tensor:
    """The function of that name of x (rows, columns) + bias: a region (`tensor3d.ops.compiled_regions`)."""
    return activated(x + bias.to(x.dtype), name)


def biased_backward(dy: Tensor, saved: Tensor, bias: Tensor, name: Activation) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias: a region.

    Args:
        saved: x; of relu, its result.
    """
    if name == "relu":
        dx = torch.ops.aten.threshold_backward(dy, saved, 0)  # chosen, not multiplied: dy may be infinite
    elif name == "silu":
        dx = torch.ops.aten.silu_backward(dy, saved + bias.to(saved.dtype))
    else:
        approximate = "tanh" if name == "gelu_tanh" else "none"
        dx = torch.ops.aten.gelu_backward(dy, saved + bias.to(saved.dtype), approximate=approximate)
    return dx, dx.sum(0, dtype=bias.dtype)

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


def gated(fused: Tensor, name: Activation) -> Tensor:
    """function(gate) * up of `fused` (rows, 2 * columns), gate and up in turn: (rows, columns), a region."""
    gate, up = fused.unflatten(1, (-1, 2)).unbind(2)
    return activated(gate, name) * up


def gated_backward(dy: Tensor, fused: Tensor, name: Activation) -> Tensor:
    """The gradient of `fused`: a region."""
    gate, up = fused.unflatten(1, (-1, 2)).unbind(2)
    return torch.stack([_backward(dy * up, gate, name), dy * activated(gate, name)], 2).flatten(1)


def biased_backward(dy: Tensor, saved: Tensor, bias: Tensor, name: Activation) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias: a region.

    Args:
        saved: x; of relu, its result.
    """
    dx = _backward(dy, saved if name == "relu" else saved + bias.to(saved.dtype), name)
    return dx, dx.sum(0, dtype=bias.dtype)


def _backward(dy: Tensor, x: Tensor, name: Activation) -> Tensor:
    """The gradient of x, of which relu's result says as much."""
    if name == "relu":
        return torch.ops.aten.threshold_backward(dy, x, 0)  # chosen, not multiplied: dy may be infinite
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if name == "gelu_tanh" else "none")

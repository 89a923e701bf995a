"""Tensors that lie as a parameter does, and what torch's AdamW keeps of it, made by no operator of DTensor.

For the first of each shape DTensor makes a plan, and forgets it with the cube. From torch 2.15 on it goes through all
placements for that: half a second on a mesh of four axes, where tests are about something else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tensor3d import local


def filled_like(parameter: Tensor, value: float) -> Tensor:
    """`torch.full_like(parameter, value)`."""
    return _laid(torch.full_like(local(parameter), value, requires_grad=False), parameter)


def clone_of(parameter: Tensor) -> Tensor:
    """`parameter.detach().clone()`."""
    return _laid(local(parameter).detach().clone(), parameter)


class LocalSGD(torch.optim.Optimizer):
    """`torch.optim.SGD(parameters, lr)`."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local(parameter).sub_(local(parameter.grad), alpha=group["lr"])


def begin_adam(optimizer: torch.optim.Optimizer) -> None:
    """Gives torch's Adam or AdamW what its first step would: zeros for each parameter with a gradient and no state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
                step = torch.zeros((), dtype=torch.float64 if wide else torch.float32)
                moments = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
                optimizer.state[parameter] = {"step": step} | {key: filled_like(parameter, 0.0) for key in moments}


def _laid(block: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return block
    return DTensor.from_local(
        block,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

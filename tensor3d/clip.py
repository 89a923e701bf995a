"""The gradient norm of the logical model, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.collectives import all_reduce
from tensor3d.cube import Cube
from tensor3d.layout import is_counted_here, local


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, cube: Cube) -> Tensor:
    """Scales all gradients so that their norm, taken over the logical tensors, is at most `max_norm`.

    Every block counts once, however many ranks hold copies. One all-reduce of one number, no host synchronisation;
    `torch.nn.utils.clip_grad_norm_` gives the same number, but its first call on DTensors of a four-axis mesh takes
    more than a minute for 200 parameters.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        ValueError: `max_norm` is not above 0, gradients are still held back by `Cube.accumulating`, or a parameter is
            a plain tensor on a cube of several ranks.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf: measure only). Got {max_norm}.")
    if cube.ledger.holds_back:
        raise ValueError(
            "gradients are still held back by Cube.accumulating and would be missing. Run the last micro-batch's "
            "backward outside of it, or give the step up with cube.ledger.discard()."
        )
    held = [p for p in parameters if p.grad is not None]
    check_parameters(held, cube)
    gradients = [local(p.grad) for p in held if p.grad is not None]
    counted = [g for p, g in zip(held, gradients, strict=True) if is_counted_here(p, cube)]
    # Of all gradients, not of the counted ones: the ranks must agree.
    dtype = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    norm = _norm(counted, dtype, cube)
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def check_parameters(parameters: Iterable[nn.Parameter], cube: Cube) -> None:
    """Raises ValueError if one is a plain tensor on a cube with a mesh: nothing would sum its gradients over ranks."""
    for parameter in parameters:
        if cube.mesh is not None and not isinstance(parameter, DTensor):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is a plain tensor on {cube.shape}: its gradient would "
                "differ from rank to rank. Make it with tensor3d.constant, normal or distribute, and take it into "
                "your arithmetic with tensor3d.use, which states over which axes its gradient is summed."
            )


def _norm(gradients: list[Tensor], dtype: torch.dtype, cube: Cube) -> Tensor:
    square = torch.zeros(1, dtype=dtype, device=cube.device)  # a rank may stand for none of the blocks
    for norm in torch._foreach_norm(gradients, 2, dtype=dtype) if gradients else ():
        square += norm.square()
    return all_reduce(square, cube.over("data", "x", "y", "z")).wait()[0].sqrt()

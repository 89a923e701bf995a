"""The gradient norm of the logical model, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn

from tensor3d.distributed.collectives import all_reduce
from tensor3d.distributed.cube import Cube
from tensor3d.sharding.layout_checks import refuse_plain
from tensor3d.sharding.param_layout import local, owns_for_norm


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """What `clip_gradients` has found out. All on the device; nothing was waited for."""

    total: Tensor
    """Scalar: the norm of the logical model's gradients, before clipping and without the loss scale, the same on every
    rank. Not finite if any gradient on any rank is not, also in a copy over x, y or z that no norm counts; copies over
    data hold the same sums."""
    parts: Tensor
    """(parameters with a gradient,): norms of this rank's blocks, with the loss scale in them: where one is not finite,
    there it began."""

    @property
    def found_inf(self) -> Tensor:
        """Scalar fp32: 1 where the step must be skipped, else 0; the same on every rank."""
        return (~self.total.isfinite()).to(torch.float32)


def clip_grad_norm_(parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, cube: Cube) -> Tensor:
    """Scales all gradients so that their norm, taken over the logical tensors, is at most `max_norm`.

    Every block counts once, however many ranks hold copies. Costs one all-reduce of one number over x, y and z, and no
    host synchronisation. Copies over data hold the same gradients, so it leaves out `data`, unless each holds a share
    of them (`shard_over_data="gradients"`).
    `torch.nn.utils.clip_grad_norm_` gives the same number, but its first call on DTensors of a four-axis mesh takes
    more than a minute for 200 parameters.

    Returns:
        The norm before clipping, a scalar, the same on every rank; not finite if any gradient on any rank is not.

    Raises:
        ValueError: `max_norm` is not above 0, gradients are still held back by `Cube.no_sync`, or a parameter is
            a plain tensor on a cube of several ranks.
    """
    return clip_gradients(parameters, max_norm, cube).total


@torch.no_grad()  # else DTensor makes a node of a graph for each block
def clip_gradients(
    parameters: Iterable[nn.Parameter] | nn.Parameter,
    max_norm: float,
    cube: Cube,
    *,
    loss_scale: Tensor | None = None,
    along: Tensor | None = None,
) -> GradientNorm:
    """`clip_grad_norm_` for a training loop: divides by the loss scale, and sums a few more numbers over the ranks.

    Args:
        loss_scale: scalar by which the loss was multiplied; the gradients are divided by it in the same pass.
        along: (n,) numbers of this rank, summed over all ranks, in place, by the collective that is needed anyway.

    Raises:
        ValueError: as `clip_grad_norm_`.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf: measure only). Got {max_norm}.")
    cube.ledger.check_nothing_held()
    held = [p for p in _each(parameters) if p.grad is not None]
    check_parameters(held, cube)
    gradients = [local(p.grad) for p in held if p.grad is not None]
    dtype = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    parts = _norms(gradients, dtype, cube)
    everywhere = along is not None or cube.ledger.shards_gradients
    owned = [owns_for_norm(p.grad, cube, of_all=everywhere) for p in held if p.grad is not None]
    numbers = _square(parts, owned).reshape(1)
    if along is None:
        over = cube.over("data", "x", "y", "z") if everywhere else cube.over("x", "y", "z")
        numbers = all_reduce(numbers, over).wait()
    else:
        numbers = torch.cat([numbers, along.to(dtype)])
        numbers = all_reduce(numbers, cube.over("data", "x", "y", "z")).wait()
    if along is not None:
        along.copy_(numbers[1:])
    total = numbers[0].sqrt()
    total = total if loss_scale is None else total / loss_scale
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor if loss_scale is None else factor / loss_scale)
    return GradientNorm(total=total, parts=parts)


def check_parameters(parameters: Iterable[nn.Parameter] | nn.Parameter, cube: Cube) -> None:
    """Raises ValueError if one is a plain tensor on a cube of several ranks: nothing would sum its gradients."""
    for parameter in _each(parameters):
        refuse_plain(parameter, cube)


def _each(parameters: Iterable[nn.Parameter] | nn.Parameter) -> Iterable[nn.Parameter]:
    """One alone too, as torch takes it: to go through it would give its rows, which have no gradient."""
    return (cast(nn.Parameter, parameters),) if isinstance(parameters, Tensor) else parameters


def _norms(gradients: list[Tensor], dtype: torch.dtype, cube: Cube) -> Tensor:
    """(gradients,) of this rank."""
    if not gradients:
        return torch.zeros(0, dtype=dtype, device=cube.device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))


def _square(norms: Tensor, counted: list[bool]) -> Tensor:
    """Their square sum, over those that this rank stands for. A copy adds nothing, unless it is not finite: what went
    wrong in one copy alone must be known everywhere."""
    if all(counted):
        return norms.square().sum()
    if not any(counted):
        return (norms * 0.0).sum()
    square = norms.new_zeros(())
    mine = [norm for norm, counts in zip(norms.unbind(), counted, strict=True) if counts]
    copies = [norm for norm, counts in zip(norms.unbind(), counted, strict=True) if not counts]
    if mine:
        square = square + torch.stack(mine).square().sum()
    return square + (torch.stack(copies) * 0.0).sum() if copies else square

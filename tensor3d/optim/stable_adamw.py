"""StableAdamW on the cube: AdamW whose step of a tensor is shortened where its second moment lags behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.optim.adam import Group, ParamGroupShards
from tensor3d.optim.tensorwise import BIAS2, EPS, TensorwiseAdam, move_moments, sum_squares


class StableAdamW(TensorwiseAdam):
    """AdamW with the update clipping of AdaFactor (Wortsman et al. 2023, arXiv 2304.13013, Algorithm 2).

        m, v = moments of the gradient, as Adam's                  per element
        rms  = root of the mean of g^2 / max(v / bias2, eps^2)     per tensor
        w   -= lr / max(1, rms) * ((m / bias1) / (sqrt(v / bias2) + eps) + decay * w)

    A gradient that is suddenly large, as behind a spike of the loss, is not yet in `v`: rms is then above 1, and the
    step as much shorter. Means are those of logical tensors: one all-reduce of a number a tensor in a step. ModernBERT
    trains with it instead of clipping by the norm.

    Beside the state, which is AdamW's, a step needs room for two more copies of this rank's parameters; where the cube
    compiles regions (`ExecutionPolicy.compile`), of vectors alone.

    Args, Raises: see `ShardedAdamBase`.
    """

    def _scales(self, group: Group) -> bool:
        return True

    def _summands(self, blocks: ParamGroupShards, updates: list[Tensor]) -> list[list[Tensor]]:
        return [_against_second_moment(blocks)]

    def _measured(self, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return run(surprise, *inputs)

    def _factors(self, sums: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """1 / max(1, rms) of each logical tensor."""
        means = torch._foreach_div(list(sums[0].unbind()), [float(p.numel()) for p in parameters])
        torch._foreach_sqrt_(means)
        torch._foreach_clamp_min_(means, 1.0)
        torch._foreach_reciprocal_(means)
        return torch.stack(means)


def _against_second_moment(blocks: ParamGroupShards) -> list[Tensor]:
    """g / max(sqrt(v / bias2), eps) of each block. Of a skipped step not finite, and not used."""
    wide = torch.promote_types(blocks.weights[0].dtype, torch.float32)
    steps = torch.zeros(len(blocks.steps), dtype=torch.float64, device=blocks.steps[0].device)
    steps.copy_(torch.stack(blocks.steps))  # in fp32 a beta near 1 is 1, and would leave 0 to divide by
    corrections = torch.zeros_like(steps, dtype=wide)
    corrections.copy_(1 - blocks.group["betas"][1] ** steps)
    against = list(torch._foreach_div(blocks.exp_avg_sq, list(corrections.unbind())))
    torch._foreach_sqrt_(against)
    torch._foreach_clamp_min_(against, blocks.group["eps"])
    torch._foreach_reciprocal_(against)
    torch._foreach_mul_(against, blocks.gradients)
    return against


def surprise(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """A region: moves the moments of a block, and gives the sum of g^2 / max(v / bias2, eps^2), (1,)."""
    g, _, v = move_moments(g, m, v, numbers)
    return sum_squares(g / (v / numbers[BIAS2]).sqrt().clamp_min(numbers[EPS])).view(1)

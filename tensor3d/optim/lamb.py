"""LAMB on the cube: the layer-wise ratio of norms is that of the logical tensors, whatever shape the cube has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.ops.as_type import as_type
from tensor3d.optim.adam import Group, Groups, ParamGroupShards
from tensor3d.optim.tensorwise import TensorwiseAdam, direction, move_moments, sum_squares


class Lamb(TensorwiseAdam):
    """LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), as NVIDIA's BERT is trained with it.

        m, v = moments of the gradient, as Adam's                  per element
        u    = (m / bias1) / (sqrt(v / bias2) + eps) + decay * w   per element
        w   -= lr * |w| / |u| * u                                  1 for the ratio where either norm is 0

    Norms are those of logical tensors, in which every block counts once: one all-reduce of 2 numbers a tensor in a
    step. Gradients arrive already clipped by the norm of the whole model (`clip_gradients`), which NVIDIA's variant
    adds to the paper. Where a group has no weight decay (biases, LayerNorm) the ratio is 1, as in NVIDIA's, and the
    step is Adam's. The ratio has no bound.

    Beside the state, which is AdamW's, a step needs room for `u`: once more this rank's adapted parameters. Not where
    the cube compiles regions (`ExecutionPolicy.compile`), but for the few blocks of one row or none.

    Args:
        adapt_all: also scale by the ratio where nothing decays ("NVLAMB" proper, and the paper).
        groups, lr, betas, eps, weight_decay, shard_over_data: see `ShardedAdamBase`.
    """

    def __init__(
        self,
        groups: Groups,
        cube: Cube,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt_all: bool = False,
        shard_over_data: ShardOverData = False,
    ) -> None:
        self.adapt_all = adapt_all
        super().__init__(
            groups, cube, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, shard_over_data=shard_over_data
        )

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"adapt_all": self.adapt_all}

    def _scales(self, group: Group) -> bool:
        return bool(group["weight_decay"] > 0 or self.adapt_all)

    def _summands(self, blocks: ParamGroupShards, updates: list[Tensor]) -> list[list[Tensor]]:
        return [blocks.weights, updates]

    def _measured(self, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return run(norms, *inputs)

    def _factors(self, sums: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """|w| / |u| of each logical tensor."""
        of_weights, of_updates = sums.sqrt().unbind()
        return torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)


def norms(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """A region: moves the moments of a block, and gives |w|^2 and |u|^2 of it, (2,)."""
    _, m, v = move_moments(g, m, v, numbers)
    w = as_type(w, numbers.dtype)
    return torch.stack([sum_squares(w), sum_squares(direction(w, m, v, numbers))])

"""LAMB on the cube: the layer-wise ratio of norms is that of the logical tensors, whatever shape the cube has. And what
it shares with other optimisers that scale Adam's step tensor by tensor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from tensor3d.distributed.collectives import all_reduce
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.optim.adam import Group, Groups, ParamGroupShards, ShardedAdamBase
from tensor3d.sharding.param_layout import owns_for_norm
from tensor3d.torch_private import fused_sgd_


class TensorwiseAdam(ShardedAdamBase):
    """Adam whose step of a logical tensor, decay included, is multiplied by a number of this tensor's."""

    @abstractmethod
    def _scales(self, group: Group) -> bool:
        """Whether the steps of a group are multiplied; of others they are AdamW's."""

    @abstractmethod
    def _ratios(self, scaled: Sequence[ParamGroupShards], updates: Sequence[list[Tensor]]) -> list[Tensor]:
        """By what each logical tensor's step is multiplied: scalars, the same on every rank."""

    def _advance(self, work: list[ParamGroupShards]) -> None:
        scaled: list[ParamGroupShards] = []
        for blocks in work:
            if self._scales(blocks.group):
                scaled.append(blocks)
            else:
                self._adam(blocks, blocks.weights, lr=blocks.group["lr"], weight_decay=blocks.group["weight_decay"])
        updates = [self._updates(blocks) for blocks in scaled]
        ratios = self._ratios(scaled, updates)
        for blocks, directions in zip(scaled, updates, strict=True):
            mine, ratios = ratios[: len(directions)], ratios[len(directions) :]
            torch._foreach_mul_(directions, mine)
            self._descend(blocks, directions)

    def _updates(self, blocks: ParamGroupShards) -> list[Tensor]:
        """u of each block. Of a skipped step decay * w alone: finite, and not used."""
        updates = list(torch._foreach_mul(blocks.weights, blocks.group["weight_decay"]))
        # Adam's step at a rate of -1 adds the first term of u.
        self._adam(blocks, updates, lr=-1.0, weight_decay=0.0)
        return updates

    def _squares(self, lie: Sequence[Tensor], blocks: list[Tensor]) -> Tensor:
        """Square sums of the blocks that this rank stands for; 0 for the others. `lie`: see `ParamGroupShards`."""
        # All ranks have the same parameters, if not the same blocks: they agree on the type.
        dtype = reduce(torch.promote_types, (block.dtype for block in blocks), torch.float32)
        norms = torch._foreach_norm(blocks, 2, dtype=dtype)
        # No mask made on the host: sending it to a GPU would wait for the GPU.
        nothing = torch.zeros((), dtype=dtype, device=self.cube.device)
        counted = (owns_for_norm(each, self.cube) for each in lie)
        return torch.stack([n if counts else nothing for n, counts in zip(norms, counted, strict=True)]).square()

    def _descend(self, blocks: ParamGroupShards, directions: list[Tensor]) -> None:
        """w -= lr * direction, or nothing in a skipped step: torch's kernel knows `found_inf`."""
        fused_sgd_(
            blocks.weights,
            directions,
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=blocks.group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=self.found_inf,
        )


class Lamb(TensorwiseAdam):
    """LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), as NVIDIA's BERT is trained with it.

        m, v = moments of the gradient, as Adam's                  per element
        u    = (m / bias1) / (sqrt(v / bias2) + eps) + decay * w   per element
        w   -= lr * |w| / |u| * u                                  1 for the ratio where either norm is 0

    Norms are those of logical tensors, in which every block counts once: one all-reduce of 2 numbers a tensor in a
    step. Gradients arrive already clipped by the norm of the whole model (`clip_gradients`), which NVIDIA's variant
    adds to the paper. Where a group has no weight decay (biases, LayerNorm) the ratio is 1, as in NVIDIA's, and the
    step is Adam's. The ratio has no bound.

    Beside the state, which is AdamW's, a step needs room for `u`: once more this rank's adapted parameters.

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

    def _ratios(self, adapted: Sequence[ParamGroupShards], updates: Sequence[list[Tensor]]) -> list[Tensor]:
        """|w| / |u| of each logical tensor, scalars, the same on every rank."""
        lie = [each for blocks in adapted for each in blocks.lie]
        if not lie:
            return []
        weights = [weight for blocks in adapted for weight in blocks.weights]
        squares = self._squares(lie * 2, [*weights, *(u for directions in updates for u in directions)])
        norms = all_reduce(squares, self.cube.over("data", "x", "y", "z")).wait().sqrt()
        of_weights, of_updates = norms.chunk(2)
        ratios = torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)
        return list(ratios.unbind())

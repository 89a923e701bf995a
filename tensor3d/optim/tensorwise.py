"""Adam whose step of a logical tensor is multiplied by a number of that tensor's: what LAMB and StableAdamW share.

The number hangs on sums over the whole tensor, so a step goes twice over the blocks, and what the first way has summed
is summed over the ranks between. Torch has a kernel for Adam, but none for these sums: 16 passes over memory of LAMB
and 26 of StableAdamW, and directions that are kept from the one way to the other. Where a cube compiles regions, each
way is one region for a block, and the second makes the direction anew of the moments: 10 passes, and nothing is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.distributed.collectives import all_reduce
from tensor3d.ops.as_type import as_type
from tensor3d.ops.compiled_regions import CompiledRegions, as_written
from tensor3d.optim.adam import Group, ParamGroupShards, ShardedAdamBase
from tensor3d.sharding.param_layout import owns_for_norm
from tensor3d.torch_private import fused_sgd_


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What is left to do for some blocks."""

    parameters: Sequence[nn.Parameter]
    """n of them."""
    sums: Tensor
    """(k, n): of each of this rank's blocks."""
    descend: Callable[[Tensor], None]
    """By what to multiply each step, (n,): changes the weights."""


class TensorwiseAdam(ShardedAdamBase):
    """Adam whose step of a logical tensor, decay included, is multiplied by a number of this tensor's."""

    @abstractmethod
    def _scales(self, group: Group) -> bool:
        """Whether the steps of a group are multiplied; of others they are AdamW's."""

    @abstractmethod
    def _summands(self, blocks: ParamGroupShards, updates: list[Tensor]) -> list[list[Tensor]]:
        """k times: of each block, that whose squares are to be summed."""

    @abstractmethod
    def _measured(self, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """The first way of one block, by a region: moves its moments, and gives the same k sums of squares, (k,)."""

    @abstractmethod
    def _factors(self, sums: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Sums of T logical tensors, (k, T) -> by what each one's step is multiplied, (T,). The same on every rank."""

    def _advance(self, work: list[ParamGroupShards]) -> None:
        scaled: list[ParamGroupShards] = []
        for blocks in work:
            if self._scales(blocks.group):
                scaled.append(blocks)
            else:
                self._adam(blocks, blocks.weights, lr=blocks.group["lr"], weight_decay=blocks.group["weight_decay"])
        if not scaled:
            return
        steps = [step for blocks in scaled for step in self._begun(blocks)]
        own = {id(p): column for step in steps for p, column in _each(step.parameters, step.sums.unbind(1))}
        # The order of the groups, which is every rank's: which blocks are compiled is this rank's alone.
        parameters = [parameter for blocks in scaled for parameter in blocks.parameters]
        sums = self._counted(scaled, own)
        factors = self._factors(all_reduce(sums, self.cube.over("data", "x", "y", "z")).wait(), parameters)
        factor = {id(p): each for p, each in _each(parameters, factors.unbind())}
        for step in steps:
            step.descend(torch.stack([factor[id(p)] for p in step.parameters]))

    def _begun(self, blocks: ParamGroupShards) -> list[_Step]:
        compiled, regions = self.cube.speed.compile, self.cube.regions
        inside = [number for number in range(len(blocks.weights)) if compiled and _fits(blocks, number, regions)]
        outside = sorted(set(range(len(blocks.weights))) - set(inside))
        found = []
        if inside:
            found.append(self._by_regions(blocks.some(inside), regions))
        if outside:
            rest = blocks.some(outside)
            found.append(self._by_regions(rest, as_written) if _lacks_a_kernel(rest.weights[0]) else self._fused(rest))
        return found

    def _counted(self, scaled: Sequence[ParamGroupShards], sums: dict[int, Tensor]) -> Tensor:
        """Sums of the blocks that this rank stands for, (k, T); 0 for the others."""
        # All ranks have the same parameters, if not the same blocks: they agree on the type.
        types = (weight.dtype for blocks in scaled for weight in blocks.weights)
        dtype = reduce(torch.promote_types, types, torch.float32)
        # No mask made on the host: sending it to a GPU would wait for the GPU.
        nothing = torch.zeros(next(iter(sums.values())).shape, dtype=dtype, device=self.cube.device)
        both = [(p, lie) for blocks in scaled for p, lie in zip(blocks.parameters, blocks.lie, strict=True)]
        return torch.stack([sums[id(p)] if owns_for_norm(lie, self.cube) else nothing for p, lie in both], dim=1)

    def _fused(self, blocks: ParamGroupShards) -> _Step:
        """By torch's kernels, in one launch each for all blocks."""
        # u of each block. Of a skipped step decay * w alone: finite, and not used.
        updates = list(torch._foreach_mul(blocks.weights, blocks.group["weight_decay"]))
        # Adam's step at a rate of -1 adds the first term of u.
        self._adam(blocks, updates, lr=-1.0, weight_decay=0.0)
        summands = self._summands(blocks, updates)
        dtype = torch.promote_types(blocks.weights[0].dtype, torch.float32)
        norms = torch._foreach_norm([each for some in summands for each in some], 2, dtype=dtype)

        def descend(factors: Tensor) -> None:
            torch._foreach_mul_(updates, list(factors.unbind()))
            fused_sgd_(  # w -= lr * u, or nothing in a skipped step: it knows `found_inf`
                blocks.weights,
                updates,
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

        sums = torch.stack(norms).square().view(len(summands), -1)
        return _Step(parameters=blocks.parameters, sums=sums, descend=descend)

    def _by_regions(self, blocks: ParamGroupShards, run: Callable[..., Any]) -> _Step:
        """By two regions for each block."""
        self._count(blocks)
        numbers = self._numbers(blocks)
        rows = numbers.unbind()
        tensors = zip(blocks.weights, blocks.gradients, blocks.exp_avg, blocks.exp_avg_sq, rows, strict=True)
        sums = [self._measured(run, *each) for each in tensors]

        def descend(factors: Tensor) -> None:
            numbers[:, _FACTOR].copy_(factors * blocks.group["lr"])
            for each in zip(blocks.weights, blocks.exp_avg, blocks.exp_avg_sq, rows, strict=True):
                run(second_way, *each)

        return _Step(parameters=blocks.parameters, sums=torch.stack(sums, dim=1), descend=descend)

    def _numbers(self, blocks: ParamGroupShards) -> Tensor:
        """What regions are given of each block, (n, 8): the numbers that are named below, the step's factor as yet 0.
        Schedules may change any of them from step to step: as part of compiled code each would be compiled anew. On no
        GPU a row begins off 16 bytes."""
        weight, group = blocks.weights[0], blocks.group
        wide = torch.promote_types(weight.dtype, torch.float32)
        numbers = torch.zeros(len(blocks.weights), _NUMBERS, dtype=wide, device=weight.device)
        steps = torch.zeros(len(blocks.weights), dtype=torch.float64, device=weight.device)
        steps.copy_(torch.stack(blocks.steps))
        beta1, beta2 = group["betas"]
        numbers[:, _BIAS1].copy_(1 - beta1**steps)
        numbers[:, BIAS2].copy_(1 - beta2**steps)
        if self.found_inf is not None:
            numbers[:, _SKIPPED].copy_(self.found_inf.view(()))
        told = {_NEW1: 1 - beta1, _NEW2: 1 - beta2, EPS: group["eps"], _DECAY: group["weight_decay"]}
        for place, value in told.items():
            numbers[:, place].fill_(value)
        return numbers


_NUMBERS = 8  # a multiple of 16 bytes
_BIAS1, BIAS2, _FACTOR, _SKIPPED, _NEW1, _NEW2, EPS, _DECAY = range(_NUMBERS)
"""Of a block: 1 - beta ** steps of both betas; by what its step is multiplied; 1 where this step is skipped, as
`found_inf`; the share of the gradient in either moment; eps; weight decay."""


def _fits(blocks: ParamGroupShards, number: int, regions: CompiledRegions) -> bool:
    """Whether a block is one for regions: rows and columns, of its own memory, which they write to."""
    written = (blocks.weights[number], blocks.exp_avg[number], blocks.exp_avg_sq[number])
    shape = written[0].shape
    return len(shape) > 1 and shape[-2] > 1 and all(map(regions.can_write_to, written))


def _lacks_a_kernel(weight: Tensor) -> bool:
    """Before 2.15 torch's fused SGD leaves most of what is 16 bits wide and on a CPU as it was, without a word."""
    return weight.element_size() < 4 and weight.device.type == "cpu"


def _each(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> zip[tuple[nn.Parameter, Tensor]]:
    return zip(parameters, values, strict=True)


# --- Regions: a block's weights, gradients and moments, and its row of `_numbers` -------------------------------------


def move_moments(g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the moments with this gradient, or those of before in a skipped step, and gives all in the wide type."""
    wide, skipped = numbers.dtype, numbers[_SKIPPED] == 1
    g, old_m, old_v = (as_type(each, wide) for each in (g, m, v))
    m.copy_(torch.where(skipped, old_m, torch.lerp(old_m, g, numbers[_NEW1])))
    v.copy_(torch.where(skipped, old_v, torch.lerp(old_v, g * g, numbers[_NEW2])))
    return g, as_type(m, wide), as_type(v, wide)


def direction(w: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """u, of all in the wide type. Of a step that was skipped before the first one it is 0/0, and not used."""
    return (m / numbers[_BIAS1]) / ((v / numbers[BIAS2]).sqrt() + numbers[EPS]) + numbers[_DECAY] * w


def second_way(w: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> None:
    """w -= factor * u, or nothing in a skipped step."""
    wide = numbers.dtype
    before = as_type(w, wide)
    update = direction(before, as_type(m, wide), as_type(v, wide), numbers)
    w.copy_(torch.where(numbers[_SKIPPED] == 1, before, before - numbers[_FACTOR] * update))


def sum_squares(x: Tensor) -> Tensor:
    """() of a block: row by row, so that it is summed by the kernel that makes x."""
    return (x * x).sum(-1).sum()

"""How the sum of a gradient reaches `.grad`: hooks are called with it, and it is set or added.

Hooks on parameters (`register_hook`, `register_post_accumulate_grad_hook`) are called when the sums are there, as those
of FSDP2 are. Of what lies in shares over `data` they see this rank's share (distributed/data_shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.distributed.collectives import Axis
from tensor3d.distributed.data_shares import cut_grad, share, share_placements
from tensor3d.distributed.grad_buckets import GradBuckets
from tensor3d.distributed.seeds import Number
from tensor3d.ops.as_type import as_type
from tensor3d.torch_private import as_dtensor, local_tensor


@dataclass(kw_only=True, slots=True)
class PendingGrad:
    """One parameter's gradient on this rank: the sum of its uses so far."""

    parameter: nn.Parameter
    gradient: Tensor
    over: Axis
    owned: bool  # whether `gradient` is a tensor of the ledger's own, so that it may be added to in place
    in_shares: bool = False  # whether `gradient` is this rank's share over data alone

    def add(self, gradient: Tensor) -> None:
        self.gradient = self.gradient.add_(gradient) if self.owned else self.gradient + gradient
        self.owned = True

    def put_into(self, buckets: GradBuckets, number: Number) -> None:
        """From here on it is what is summed there."""
        self.gradient, self.owned = buckets.put(number, self.gradient, owned=self.owned), True
        self.in_shares = buckets.plan.slots[number].rows is not None

    def take_back(self, buckets: GradBuckets, number: Number) -> None:
        """Out of buckets of which nothing has left."""
        if self.in_shares:
            self.gradient, self.owned, self.in_shares = buckets.take_back(number), False, False


def block_of(tensor: Tensor) -> Tensor:
    # DTensor arithmetic on a four-axis mesh takes seconds the first time.
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


class HeldHooks:
    """The hooks of a parameter (`register_hook`, `register_post_accumulate_grad_hook`) while a backward pass runs, in
    which autograd would call them before the gradient is there: until `put_back`, others stand in their places.

    A hook that is removed meanwhile stays removed."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.passes: set[int] = set()
        self.by_autograd: Tensor | None = None
        """The part of the gradient that did not come through the reducer: of arithmetic on the parameter itself."""
        self._taken = [
            (places, dict(places), stand_in)
            for places, stand_in in (
                (parameter._backward_hooks, self._note),
                (parameter._post_accumulate_grad_hooks, _nothing),
            )
            if places
        ]
        for places, _, stand_in in self._taken:
            places.update(dict.fromkeys(places, stand_in))

    def put_back(self) -> None:
        for places, hooks, _ in self._taken:
            places.update({key: hooks[key] for key in places if key in hooks})

    def _note(self, gradient: Tensor | None) -> None:
        self.by_autograd = gradient


def _nothing(parameter: Tensor) -> None:
    pass


def arrive(entry: PendingGrad, held: HeldHooks | None) -> None:
    """A gradient is there: its hooks see it, and it is added to `.grad`."""
    parameter = entry.parameter
    hooks = list((parameter._backward_hooks or {}).values())
    if hooks:
        other = held.by_autograd if held is not None else None
        beside = None if other is None else block_of(other)
        if beside is not None and entry.in_shares:
            beside = share(beside, entry.over)
        gradient = _as_grad(entry, entry.gradient if beside is None else entry.gradient + beside)
        lies = gradient.placements if isinstance(gradient, DTensor) else None
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if isinstance(gradient, DTensor) and lies is not None:
            gradient = gradient.redistribute(placements=lies)
        entry.gradient = block_of(gradient) if beside is None else block_of(gradient) - beside
        entry.owned = False
    add_to_grads([entry])
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def _as_grad(entry: PendingGrad, block: Tensor) -> Tensor:
    """As the parameter lies, or as its shares over data do."""
    parameter = entry.parameter
    if not isinstance(parameter, DTensor):
        return block
    return as_dtensor(block, parameter, share_placements(parameter) if entry.in_shares else None)


def is_watched(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def add_to_grads(entries: Sequence[PendingGrad]) -> None:
    """What has come, to what is there: sums in one operator for all, where a device would be told each."""
    sums, more = [], []
    for entry in entries:
        if entry.in_shares:  # of whole ones, by autograd or from before
            cut_grad(entry.parameter, entry.over)
        if (there := entry.parameter.grad) is None:
            _put_grad(entry)
        else:
            sums.append(block_of(there))
            more.append(entry.gradient)
    if sums:
        torch._foreach_add_(sums, more)


def _put_grad(entry: PendingGrad) -> None:
    """Where there is none yet."""
    gradient = as_type(entry.gradient, entry.parameter.dtype)
    if not entry.owned:
        # Autograd may still own this storage; and fused optimisers read `.grad` in the parameter's own order.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    entry.parameter.grad = _as_grad(entry, gradient)

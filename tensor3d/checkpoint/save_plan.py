"""Which rank writes which block. PyTorch's planner decides it: a block that several ranks hold is written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from tensor3d.checkpoint.format import TensorBlock, arrange, header_of, index_of
from tensor3d.distributed.object_collectives import ObjectGroup
from tensor3d.sharding.param_layout import local

Signature = tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class LocalSavePlan:
    """What this rank writes. Good for every state with the same signature."""

    signature: Signature
    blocks: Sequence[TensorBlock]
    header: bytes
    index: bytes
    """The content of tensors.json, ready to be written; of rank 0."""

    @property
    def bytes(self) -> int:
        """Of this rank's tensors."""
        return self.blocks[-1].stop if self.blocks else 0


def signature_of(state: Mapping[str, Tensor]) -> Signature:
    """By this a plan is known again: names, types, logical and local sizes."""
    return tuple(
        (name, tensor.dtype, tuple(tensor.shape), tuple(local(tensor).shape)) for name, tensor in state.items()
    )


def make_plan(state: Mapping[str, Tensor], crew: ObjectGroup) -> LocalSavePlan:
    """Plans with all ranks. Looks at no number of the state, only at its sizes and placements.

    Raises:
        ValueError: what the ranks hold cannot be put together, or a type that no file can hold; on every rank.
    """
    own = create_default_local_save_plan(dict(state), is_coordinator=crew.rank == 0)
    gathered = crew.gather(own)
    answers: list[Any] = [None] * crew.size
    index = b""
    if crew.rank == 0:
        try:
            answers, index = _divide(gathered)
        except ValueError as problem:
            answers = [problem] * crew.size
    mine = crew.scatter(answers)
    if isinstance(mine, ValueError):
        raise mine
    return LocalSavePlan(signature=signature_of(state), blocks=mine, header=header_of(mine), index=index)


def _divide(plans: list[SavePlan]) -> tuple[list[list[TensorBlock]], bytes]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    divided, _ = planner.create_global_plan(plans)  # also checks that the blocks make up the tensors
    return [arrange(plan.items) for plan in divided], index_of([plan.items for plan in divided])


class HostBuffer:
    """Memory of the host for what this rank writes, used again for every checkpoint: the data of its file as it is."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Pinned, so that a GPU copies into it at full speed.
        self.data = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = device

    def fill(self, plan: LocalSavePlan, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's blocks; when it returns, the tensors may change."""
        for block in plan.blocks:
            block.view(self.data).copy_(local(state[block.name]), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

"""What a BERT keeps for backward, and what the closed forms are asked of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.bert.cost_model.memory import MicroBatchShape
from tensor3d import Cube, CubeShape, local
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.data import PackedBatch
from tests.saved_tensors import check_nothing_is_hidden


def wire_of(cube: Cube, dtype: torch.dtype | None) -> CommModel:
    shape = cube.shape
    size = CubeShape(x=shape.x, y=shape.y, z=shape.z, data=shape.data)
    return CommModel(shape=size, rank=cube.rank, compute=4 if dtype is None else dtype.itemsize)


def load_of(batch: PackedBatch) -> MicroBatchShape:
    slots = [tensor.shape[0] for tensor in (batch.ids, batch.masked, batch.first)]
    return MicroBatchShape(rows=slots[0], masked=slots[1], first=slots[2], lengths=batch.sequences.lengths)


def kept_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of all storages that autograd keeps for the backward of `run()`, without those of parameters."""
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        kept[own.untyped_storage().data_ptr()] = own
        if isinstance(tensor, DTensor) and tensor.is_leaf:
            return tensor  # a parameter, whose `detach` DTensor would make a plan for
        return tensor.detach()  # itself, where it is a result, would tie the graph to itself for good

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    check_nothing_is_hidden(result)
    weights = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)

"""What a BERT keeps for backward, and what the closed forms are asked of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.bert.cost_model.memory import MicroBatchShape
from tensor3d import Cube, CubeShape
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.data import PackedBatch
from tests.saved_tensors import saved_bytes


def wire_of(cube: Cube, dtype: torch.dtype | None) -> CommModel:
    shape = cube.shape
    size = CubeShape(x=shape.x, y=shape.y, z=shape.z, data=shape.data)
    return CommModel(shape=size, rank=cube.rank, compute=4 if dtype is None else dtype.itemsize)


def load_of(batch: PackedBatch) -> MicroBatchShape:
    slots = [tensor.shape[0] for tensor in (batch.ids, batch.masked, batch.first)]
    return MicroBatchShape(rows=slots[0], masked=slots[1], first=slots[2], lengths=batch.sequences.lengths)


def kept_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of all storages that autograd keeps for the backward of `run()`, without those of parameters."""
    return saved_bytes(run, model.parameters())

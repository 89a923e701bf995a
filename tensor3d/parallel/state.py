"""The way back: full tensors of a model on the cube, under the original's names and in its order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.collectives import all_gather
from tensor3d.cube import Cube
from tensor3d.layout import chunk_bounds, local
from tensor3d.parallel.torch_attention import TorchAttention3D
from tensor3d.shape import MESH_AXES, AxisName


def full_state_dict(model: nn.Module, cube: Cube) -> dict[str, Any]:
    """What `original.load_state_dict` takes: full tensors, on the CPU, the same on every rank.

    Every rank must call it. Each tensor is gathered once, one after another; rows that a kind keeps in another order
    (`kinds.attention`) are put back into the original's. For training checkpoints use `tensor3d.checkpoint`, which
    makes nothing whole.

    Args:
        model: what `parallelize` made; other models on the cube work as well.
    """
    orders = _orders(model)
    whole: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # what a module stores besides
            state[name] = value
            continue
        if id(value) not in whole:
            whole[id(value)] = _in_order(full_tensor(value.detach(), cube), orders.get(name)).cpu()
        state[name] = whole[id(value)]
    return state


def _orders(model: nn.Module) -> dict[str, Tensor]:
    """For parameters whose rows are permuted: which row of the original each row is."""
    return {
        f"{prefix}.{name}" if prefix else name: order
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, TorchAttention3D)
        for name, order in module.original_rows.items()
    }


def _in_order(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else torch.empty_like(tensor).index_copy_(0, order.to(tensor.device), tensor)


def full_tensor(tensor: Tensor, cube: Cube) -> Tensor:
    """The logical tensor of a parameter or gradient, as a new one on every rank. Not differentiable.

    Every rank must call it. DTensor's own `full_tensor` gives the same, but takes seconds for the first of a shape on a
    mesh of four axes.
    """
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    cuts = _cuts(tensor, cube)
    block = local(tensor)
    for axis, dim, size in reversed(cuts):
        members = cube.axis(axis)
        rows = block.movedim(dim, 0)
        missing = -(-size // members.size) - rows.shape[0]  # the last chunks may be shorter, or empty
        padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
        block = all_gather(padded, members).wait()[:size].movedim(0, dim)
    return block.clone(memory_format=torch.contiguous_format)


def _cuts(tensor: DTensor, cube: Cube) -> list[tuple[AxisName, int, int]]:
    """Which axis cuts which dim, from the outermost, and the size of that dim before the cut: nested chunks."""
    sizes = list(tensor.shape)
    cuts: list[tuple[AxisName, int, int]] = []
    for axis, placement in zip(MESH_AXES, tensor.placements, strict=True):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]
            members = cube.axis(axis)
            cuts.append((axis, dim, sizes[dim]))
            first, last = chunk_bounds(sizes[dim], members.size, members.index)
            sizes[dim] = last - first
    return cuts

"""Full tensors of a model on the cube, under the original's names and in its order: out of it, and back in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.distributed.collectives import all_gather
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import MESH_AXES, AxisName, chunk_bounds
from tensor3d.distributed.object_collectives import first_names
from tensor3d.sharding.param_layout import cut_rows, detached, local, local_slices


def full_state_dict(model: nn.Module, cube: Cube) -> dict[str, Any]:
    """What `original.load_state_dict` takes: full tensors, on the CPU, the same on every rank.

    Every rank must call it. Each tensor is gathered once, one after another; rows that a kind keeps in another order
    (`rules.attention`; `rules.replace`, by `workshop.parameter(source, layout, order)`) are put back into the
    original's. For training checkpoints use `tensor3d.checkpoint`, which makes nothing whole.

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
            whole[id(value)] = _in_order(full_tensor(detached(value), cube), orders.get(name)).cpu()
        state[name] = whole[id(value)]
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], cube: Cube) -> None:
    """Loads what `full_state_dict` gives, or the original's own `state_dict()`: each rank copies its blocks.

    Values go straight into parameters and buffers, and take their types; hooks of `load_state_dict` do not run. Nothing
    is sent: every rank passes the same state.

    Args:
        model: what `parallelize` made; other models on the cube work as well.
        state: full tensors by name, on any device.

    Raises:
        ValueError: names that are missing or unexpected, other shapes, or two values for tied weights. On every rank
            alike, and nothing is changed.
    """
    targets = model.state_dict(keep_vars=True)
    _check_names(targets, state)
    sources: dict[int, tuple[str, Any]] = {}
    for name, target in targets.items():
        if isinstance(target, Tensor):
            _check_value(name, state[name], target)
            first, value = sources.setdefault(id(target), (name, state[name]))
            again = state[name].detach().to(value.device, value.dtype)
            if value is not state[name] and not torch.equal(value.detach(), again):
                raise ValueError(
                    f"{first!r} and {name!r} are one weight of the model (tied), and the state has other values for "
                    "the second than for the first. Pass equal ones, or untie them before parallelize."
                )
    orders = _orders(model)
    for name, target in targets.items():
        if isinstance(target, Tensor):
            here = local(target).detach()
            here.copy_(cut_rows(state[name].detach(), local_slices(target, cube), orders.get(name)))
            torch.autograd.graph.increment_version(target)  # a DTensor's block has a counter of its own
    for prefix, module in model.named_modules():
        extra = f"{prefix}._extra_state" if prefix else "_extra_state"
        if extra in targets and not isinstance(targets[extra], Tensor):
            module.set_extra_state(state[extra])


def _check_names(targets: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing, unexpected = targets.keys() - state.keys(), state.keys() - targets.keys()
    if missing or unexpected:
        lost, other = (first_names([repr(name) for name in sorted(names)], 5) for names in (missing, unexpected))
        raise ValueError(
            "the state must have the model's names (model.state_dict()). "
            f"Missing: {lost or 'none'}. Unexpected: {other or 'none'}."
        )


def _check_value(name: str, value: Any, target: Tensor) -> None:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        raise ValueError(
            f"{name!r} must be a full, plain tensor of shape {tuple(target.shape)}. Got a {type(value).__name__}. What "
            "a model on a cube gives by state_dict() goes back by load_state_dict."
        )
    if value.shape != target.shape:
        raise ValueError(
            f"{name!r} must have shape {tuple(target.shape)}. Got {tuple(value.shape)}. The state is that of a model "
            "of other sizes, or holds one rank's blocks."
        )


def guard_loads(model: nn.Module) -> nn.Module:
    """`model`, whose `load_state_dict` takes its own state and refuses the original's, which would be mixed up."""
    for module in model.modules():
        if _original_rows(module):
            module._version = _OWN_ORDER
        module.register_load_state_dict_pre_hook(_check_load)
    return model


# Stands in the metadata of state dicts, where torch's own modules write 1.
_OWN_ORDER = 3


def _check_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue  # what lies on a cube comes from such a model
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"load_state_dict was given a plain tensor for {prefix + name!r}, which lies on a cube. Load full "
                "tensors with tensor3d.parallelize.load_full_state_dict(model, state, cube)."
            )
        if name in _original_rows(module) and metadata.get("version") != _OWN_ORDER:
            raise ValueError(
                f"the rows of {prefix + name!r} are in another order here than in the original, as (head, q/k/v, d) is "
                "for (q/k/v, head, d), and this state does not say which order it has. Load the original's, or what "
                "full_state_dict gave, with tensor3d.load_full_state_dict(model, state, cube); of the model's own "
                "state_dict() keep the metadata (copy.deepcopy instead of a new dict)."
            )


def _orders(model: nn.Module) -> dict[str, Tensor]:
    """For parameters whose rows are permuted: which row of the original each row is."""
    return {
        f"{prefix}.{name}" if prefix else name: order
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, order in _original_rows(module).items()
    }


def _original_rows(module: nn.Module) -> Mapping[str, Tensor]:
    """Of a module's parameters whose rows are permuted, by name: which row of the original each row is."""
    found: Mapping[str, Tensor] = getattr(module, "original_rows", {})
    return found


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

"""What is the same on all ranks: seeds, numbers by which ranks speak of parameters, and copies."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.distributed.cube_shape import MESH_AXES, AxisName, CubeShape
from tensor3d.live_objects import objects_of

# --- Which parameter is which -----------------------------------------------------------------------------------------

Number = tuple[int, ...]
"""Of a parameter on its cube: how many were made before; of a copy, that of the original and how many copies before."""
_KEPT_AS = "_tensor3d_number"


class _Mark:
    """A parameter's number, kept on it. A deep copy of the parameter gets one of its own, alike on all ranks."""

    def __init__(self, number: Number, owner: ParamNumbers | None = None) -> None:
        self.number, self._copies = number, 0
        self.owner = owner
        """Whose number it is: each cube counts for itself. None: of a file, or found by name, and not used yet."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        self._copies += 1
        return _Mark((*self.number, self._copies), self.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.number,)  # in a file there is no class of ours


def number_of(parameter: Tensor) -> Number | None:
    """The number that is kept on it. None: it has got none yet."""
    mark = _mark_of(parameter)
    return None if mark is None else mark.number


def _mark_of(parameter: Tensor) -> _Mark | None:
    mark = vars(parameter).get(_KEPT_AS)
    if isinstance(mark, tuple):  # as it comes out of a file
        mark = vars(parameter)[_KEPT_AS] = _Mark(mark)
    return mark if isinstance(mark, _Mark) else None


class ParamNumbers:
    """Numbers the parameters of one cube, so that ranks can speak of the same one: names are the model's alone, and
    positions in a pass differ where ranks use different parameters.

    Ranks make the parameters of a model in the same order, as initialisation needs it anyway.
    """

    def __init__(self) -> None:
        self._made = 0

    def add(self, parameter: Tensor) -> None:
        """Numbers a parameter that has just been made."""
        self.keep(parameter, (self._made,))
        self._made += 1

    def of(self, parameters: Sequence[Tensor]) -> list[Number]:
        """Their numbers. One that was made past the cube, or whose content was exchanged (`.double()` and the like take
        along what was kept on it), gets one by its name among the modules of the process: never by its address, which
        a dead parameter may have had before."""
        _number_by_name([each for each in parameters if number_of(each) is None])
        marks = [mark for each in parameters if (mark := _mark_of(each)) is not None]
        for mark in marks:
            mark.owner = mark.owner or self
        return [mark.number for mark in marks]

    def find(self, numbers: Iterable[Number]) -> dict[Number, nn.Parameter]:
        """The parameters of these numbers that there are in this process: of this cube, or else the only one that no
        cube has used. Looks at every object: not for each step."""
        wanted = set(numbers)
        if not wanted:
            return {}
        found = self._find(wanted)
        if len(found) < len(wanted) and gc.get_freeze_count():  # `gc.freeze` hides what was there before
            gc.unfreeze()
            found = self._find(wanted)
        return found

    def _find(self, wanted: set[Number]) -> dict[Number, nn.Parameter]:
        parameters = [each for each in objects_of(DTensor, subclasses=True) if vars(each).get("_is_param", False)]
        _number_by_name([each for each in parameters if number_of(each) is None])
        own: dict[Number, nn.Parameter] = {}
        unused: dict[Number, list[nn.Parameter]] = {}
        for each in parameters:
            mark = _mark_of(each)
            if mark is None or mark.number not in wanted:
                continue
            if mark.owner is self:
                own[mark.number] = each
            elif mark.owner is None:
                unused.setdefault(mark.number, []).append(each)
        return {number: found[0] for number, found in unused.items() if len(found) == 1} | own

    def keep(self, parameter: Tensor, number: Number) -> None:
        """Gives a parameter of this cube that number."""
        vars(parameter)[_KEPT_AS] = _Mark(number, self)


def _number_by_name(parameters: Sequence[Tensor]) -> None:
    for parameter, name in zip(parameters, names_of(parameters) if parameters else (), strict=True):
        vars(parameter)[_KEPT_AS] = _Mark((-1, *name.encode()))


# --- Whether copies are copies ----------------------------------------------------------------------------------------


def check_copies(tensors: Iterable[tuple[str, Tensor]], shape: CubeShape, told: Callable[[Any], list[Any]]) -> None:
    """Raises ValueError, on every rank, where ranks that hold copies of a tensor do not hold the same bits.

    Args:
        tensors: with their names, in the same order on all ranks.
        told: what each rank passes to it, by rank.
    """
    copied = [(name, each) for name, each in tensors if isinstance(each, DTensor) and _copied(each, shape)]
    names, digests = [name for name, _ in copied], [(_copied(each, shape), _digest(each)) for _, each in copied]
    together: dict[tuple[AxisName, ...], int] = {}
    for axes, digest in digests:
        together[axes] = zlib.crc32(digest.to_bytes(4, "little"), together.get(axes, 0))
    if not together or not _apart(list(together.items()), shape, told):
        return
    apart = _apart(digests, shape, told)
    (first, one, other), *others = [(names[index], *ranks) for index, ranks in apart.items()]
    more = f" (and of {', '.join(name for name, *_ in others[:5])}{', ...' * (len(others) > 5)})" if others else ""
    raise ValueError(
        f"copies of {first} on ranks {one} and {other} differ{more}. Ranks have filled or changed them each for "
        "itself, as torch's random functions do. Initialise with tensor3d.init_parameter, take random numbers from "
        "tensor3d.logical_block, and change a parameter alike on all ranks."
    )


def _copied(tensor: DTensor, shape: CubeShape) -> tuple[AxisName, ...]:
    """The axes over which ranks hold copies of it."""
    placed = zip(MESH_AXES, tensor.placements, strict=True)
    return tuple(axis for axis, placement in placed if placement.is_replicate() and shape.size(axis) > 1)


def _digest(tensor: DTensor) -> int:
    block = tensor.to_local().detach().contiguous().cpu()
    return zlib.crc32(block.reshape(-1).view(torch.uint8).numpy().data) if block.numel() else 0


def _apart(
    digests: Sequence[tuple[tuple[AxisName, ...], int]], shape: CubeShape, told: Callable[[Any], list[Any]]
) -> dict[int, tuple[int, int]]:
    """Of what is copied over the named axes, what differs, by index, and the first two ranks between which it does."""
    by_rank = told([digest for _, digest in digests])
    found: dict[int, tuple[int, int]] = {}
    for index, (axes, _) in enumerate(digests):
        for group in shape.groups(axes):
            other = next((rank for rank in group if by_rank[rank][index] != by_rank[group[0]][index]), None)
            if other is not None:
                found.setdefault(index, (group[0], other))
    return found


# --- Names ------------------------------------------------------------------------------------------------------------


def names_of(parameters: Iterable[Tensor]) -> list[str]:
    """For messages: the name of each in the outermost module of this process that has it, else its shape."""
    modules: list[nn.Module] = objects_of(nn.Module, subclasses=True)
    inner = {id(child) for module in modules for child in module._modules.values()}
    names: dict[int, str] = {}
    for module in sorted(modules, key=lambda module: id(module) in inner):  # outermost ones first
        for name, parameter in module._parameters.items() if id(module) in inner else module.named_parameters():
            names.setdefault(id(parameter), name)
    return [names.get(id(each), f"a parameter of shape {tuple(each.shape)}") for each in parameters]

"""What every rank derives alike without a message: seeds from one another, and which parameter is which."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def mix(*numbers: int) -> int:
    """A seed below 2**63 that depends on every one of `numbers` (whole numbers of at least 0) and on their order."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


# --- Which parameter is which -----------------------------------------------------------------------------------------

Number = tuple[int, ...]
"""Of a parameter on its cube: how many were made before; of a copy, that of the original and how many copies before."""
_KEPT_AS = "_tensor3d_number"


class _Mark:
    """A parameter's number, kept on it. A deep copy of the parameter gets one of its own, alike on all ranks."""

    def __init__(self, number: Number) -> None:
        self.number, self._copies = number, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        self._copies += 1
        return _Mark((*self.number, self._copies))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.number,)  # in a file there is no class of ours


class ParamNumbers:
    """Numbers the parameters of one cube, so that ranks can speak of the same one: names are the model's alone, and
    positions in a pass differ where ranks use different parameters.

    Ranks make the parameters of a model in the same order, as initialisation needs it anyway.
    """

    def __init__(self) -> None:
        self._made = 0
        # `.double()` and the like put other content into the same object, and what was kept on it is gone.
        self._by_id: dict[int, Number] = {}

    def add(self, parameter: Tensor) -> None:
        """Numbers a parameter that has just been made."""
        self._keep(parameter, (self._made,))
        self._made += 1

    def of(self, parameter: Tensor) -> Number:
        """Its number. One that was made past the cube gets one by its place among the modules of the process."""
        number = self._known(parameter)
        if number is None:
            (number,) = self._by_name([parameter])
        return number

    def find(self, numbers: Iterable[Number]) -> dict[Number, nn.Parameter]:
        """The parameters of these numbers that there are in this process. Looks at every object: not for each step."""
        wanted = set(numbers)
        if not wanted:
            return {}
        there = [each for each in _objects(DTensor) if vars(each).get("_is_param", False)]
        known = [(self._known(each), each) for each in there]
        unknown = [each for number, each in known if number is None]
        known += zip(self._by_name(unknown), unknown, strict=True)
        return {number: each for number, each in known if number in wanted}

    def _known(self, parameter: Tensor) -> Number | None:
        mark = vars(parameter).get(_KEPT_AS)
        number = mark.number if isinstance(mark, _Mark) else mark or self._by_id.get(id(parameter))
        if number is not None and not isinstance(mark, _Mark):
            self._keep(parameter, number)
        elif number is not None:
            self._by_id[id(parameter)] = number
        return number

    def _by_name(self, parameters: Sequence[Tensor]) -> list[Number]:
        numbers = [(-1, *name.encode()) for name in names_of(parameters)] if parameters else []
        for parameter, number in zip(parameters, numbers, strict=True):
            self._keep(parameter, number)
        return numbers

    def _keep(self, parameter: Tensor, number: Number) -> None:
        vars(parameter)[_KEPT_AS] = _Mark(number)
        self._by_id[id(parameter)] = number


def names_of(parameters: Iterable[Tensor]) -> list[str]:
    """For messages: the name of each in the outermost module of this process that has it, else its shape."""
    modules: list[nn.Module] = list(_objects(nn.Module))
    inner = {id(child) for module in modules for child in module._modules.values()}
    names: dict[int, str] = {}
    for module in sorted(modules, key=lambda module: id(module) in inner):  # outermost ones first
        for name, parameter in module._parameters.items() if id(module) in inner else module.named_parameters():
            names.setdefault(id(parameter), name)
    return [names.get(id(each), f"a parameter of shape {tuple(each.shape)}") for each in parameters]


def _objects(kind: type) -> Iterator[Any]:
    # By type(): to ask a foreign object for its `__class__` may run anything.
    return (each for each in gc.get_objects() if issubclass(type(each), kind))

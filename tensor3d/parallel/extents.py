"""Sizes read off an activation: ints that tell when they are computed with.

A rank's block has fewer rows and columns. So `x.view(*x.shape[:-1], 4, -1)` is as right on it as on the whole, and
`x * x.shape[-1] ** -0.5` is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_SIZES = ("shape", "size", "numel", "nelement")
_TWO_SIDED = ("add", "sub", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift")
_COMPUTES = (*_TWO_SIDED, *(f"r{each}" for each in _TWO_SIDED), *("neg", "abs", "float", "int", "round"))
_COMPARES = ("lt", "le", "gt", "ge")

Told = Callable[[str, "Extent"], None]


class Extent(int):
    """A size of an activation. It behaves as the int that it is, and calls `told` when it is computed with.

    Whether sizes are equal says nothing: on a cube the check fails aloud, or holds as before. A product of two is the
    number of rows of a flattened tensor, and an extent again. Not told: a float on the left (1.0 / x.shape[-1]), which
    takes any int by itself; numpy; `x.shape.numel()`.

    Attributes:
        of_columns: a number of columns, of which some tensors have all.
        since: the linears that the activation comes from.
        told: as long as its object lives, so that sizes that a model keeps are plain numbers after the run.
    """

    of_columns: bool
    since: frozenset[str]
    told: weakref.WeakMethod[Told]

    @classmethod
    def of(cls, value: int, of_columns: bool, since: frozenset[str], told: weakref.WeakMethod[Told]) -> Extent:
        extent = cls(value)
        extent.of_columns, extent.since, extent.told = of_columns, since, told
        return extent

    def tell(self, operation: str) -> None:
        told = self.told()
        if told is not None:
            told(operation, self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int.__int__(self),)  # copies are plain

    def __mul__(self, other: int) -> int:
        if isinstance(other, Extent):
            return Extent.of(int.__mul__(self, other), False, self.since | other.since, self.told)
        self.tell("mul")
        return int.__mul__(self, other)

    def __rmul__(self, other: int) -> int:
        self.tell("mul")
        return int.__rmul__(self, other)


def _telling(operation: str) -> Callable[..., Any]:
    plain = getattr(int, f"__{operation}__")

    def computed(self: Extent, *others: Any) -> Any:
        self.tell(operation)
        return plain(self, *others)

    return computed


for _operation in (*_COMPUTES, *_COMPARES):
    setattr(Extent, f"__{_operation}__", _telling(_operation))


def measured(name: str, x: Tensor, dim: Any, result: Any, since: frozenset[str], told: weakref.WeakMethod[Told]) -> Any:
    """What the function `name` read off the activation `x`: its sizes as extents, all else as it is.

    Args:
        dim: that it was asked for, of one size.
        since, told: see Extent.
    """
    if name == "len":  # Python makes a plain int of it
        Extent.of(result, False, since, told).tell(name)
    if name not in _SIZES:
        return result
    last = x.dim() - 1
    if isinstance(result, torch.Size):
        return torch.Size(Extent.of(size, place == last, since, told) for place, size in enumerate(result))
    return Extent.of(result, name == "size" and dim in (-1, last), since, told)


def extents_in(values: Any) -> Iterator[Extent]:
    """The extents in arguments."""
    if isinstance(values, Extent):
        yield values
    elif isinstance(values, Mapping):
        yield from extents_in(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from extents_in(value)

"""The workshop: cuts the original's weights for the cube, each once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.cube import Cube
from tensor3d.layout import Layout, as_parameter


@dataclass(frozen=True, kw_only=True)
class _Made:
    source: Tensor  # kept alive: its `id` stands for it, and another's could be the same once it is gone
    parameter: nn.Parameter
    layout: Layout
    permute_rows: Tensor | None
    place: str


class Workshop:
    """What a kind builds with: the cube, and parameters cut from the original's.

    Args:
        cube: where the model is to live.
        copy: makes a copy of a container of the original, whose children are built as the plan says and which has no
            parameters of its own yet.
    """

    def __init__(self, cube: Cube, copy: Callable[[nn.Module, str], nn.Module]) -> None:
        self.cube, self.copy = cube, copy
        self._made: dict[Hashable, _Made] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._values: dict[int, tuple[object, object]] = {}
        self._place = ""

    @property
    def place(self) -> str:
        """The name of the module that is being made."""
        return self._place

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Inside, parameters are made for the module named `place`."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def parameter(self, source: Tensor, layout: Layout, permute_rows: Tensor | None = None) -> nn.Parameter:
        """This rank's block of the original's parameter, as a parameter of its type, frozen if that is frozen.

        The same source gives the same parameter, so that tied weights stay tied; so does the same view of it, as its
        transpose. No more than the block is made.

        Args:
            source: the full tensor.
            layout: how it is to lie on the cube.
            permute_rows: (rows,) row `i` of the parameter is row `permute_rows[i]` of `source`.

        Raises:
            ValueError: a source that is needed elsewhere with another layout, is no floating-point tensor, or lies on a
                cube already.
        """
        made = self._made.get(_key(source))
        if made is None:
            made = _Made(
                source=source,
                parameter=self._cut(source, layout, permute_rows),
                layout=layout,
                permute_rows=permute_rows,
                place=self._place,
            )
            self._made[_key(source)] = made
        elif made.layout != layout or not _same(made.permute_rows, permute_rows):
            raise ValueError(
                f"a parameter of shape {tuple(source.shape)} is shared by {made.place!r} and {self._place!r}, and "
                f"their kinds need it in different layouts: {made.layout} and {layout}. Give both kinds that agree (an "
                "embedding tied with a projection: kinds.embedding() and kinds.projection()), or untie them by giving "
                "one a copy of the weight before parallelize."
            )
        return made.parameter

    def made_from(self, source: Tensor) -> nn.Parameter | None:
        """The parameter that was made from `source`, if one was."""
        made = self._made.get(_key(source))
        return None if made is None else made.parameter

    def buffer(self, source: Tensor) -> Tensor:
        """A copy of one of the original's buffers on the cube's device; the same source gives the same copy."""
        if id(source) not in self._buffers:
            self._buffers[id(source)] = source, source.detach().to(self.cube.device, copy=True)
        return self._buffers[id(source)][1]

    def value_of(self, source: object) -> object | None:
        """The copy of a list or dict among the original's attributes, if one was made."""
        return self._values.get(id(source), (source, None))[1]

    def keep_value(self, source: object, copy: object) -> None:
        """From now on `copy` is what `value_of(source)` gives: what two modules share, their copies share."""
        self._values[id(source)] = source, copy

    def _cut(self, source: Tensor, layout: Layout, permute_rows: Tensor | None) -> nn.Parameter:
        if not source.is_floating_point():
            raise ValueError(
                f"{self._place!r} has a parameter of type {source.dtype}, which cannot be trained on a cube. Make it a "
                "buffer, or give it a floating-point type."
            )
        if isinstance(source, DTensor):
            raise ValueError(
                f"{self._place!r} has a parameter of shape {tuple(source.shape)} that is on a cube already. Weights "
                "are cut from full ones, of a single-device model."
            )
        self.cube.over(*layout.sum_over)  # its process groups must exist before a backward pass needs them
        slices = layout.slices(source.shape, self.cube)
        block = source.detach()[slices] if permute_rows is None else _permuted(source.detach(), slices, permute_rows)
        block = block.to(self.cube.device, copy=True, memory_format=torch.contiguous_format)
        parameter = as_parameter(block, source.shape, layout, self.cube)
        parameter.requires_grad_(source.requires_grad)
        return parameter


def _key(source: Tensor) -> Hashable:
    """The same for one tensor and for equal views of one: views are made anew at each use."""
    base = source if source._base is None else source._base
    return id(base), source.storage_offset(), source.shape, source.stride()


def _permuted(source: Tensor, slices: tuple[slice, ...], permute_rows: Tensor) -> Tensor:
    all_rows = (slice(None), *slices[1:])
    return source[all_rows].index_select(0, permute_rows[slices[0]].to(source.device))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))

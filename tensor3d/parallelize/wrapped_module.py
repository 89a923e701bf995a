"""Modules of others that keep their own code: their parameters lie on the cube, and the code is given blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.distributed.cube import Cube
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.sharding.activation_layout import Face, local_block
from tensor3d.sharding.param_layout import Layout, local_param
from tensor3d.torch_private import backward_pass


@dataclass(frozen=True, kw_only=True)
class _OnCube:
    """What a module of others is told of the cube. `code` is the class that it was of."""

    code: type[nn.Module]
    layouts: Mapping[str, Layout]
    cube: Cube
    enters: Face | None = None


def on_cube(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    cube: Cube,
    enters: Face | None = None,
    over: type[LocalModule3D] | None = None,
) -> nn.Module:
    """`module` itself, now a `LocalModule3D` too: its code runs with this rank's block of each parameter.

    All it has stays where it was: attributes, buffers, hooks, modules, and its parameters, which read as such wherever
    its forward does not run.

    Args:
        module: its parameters are already on the cube.
        layouts: of the parameters by name, of modules inside as well; those not named are used by modules inside, which
            know their own.
        enters: face onto which the result is cut, which all ranks of a plane have computed alike.
        over: what runs the code. Default: `LocalModule3D` itself.
    """
    for name, each in module.named_modules():
        inside = {own: layouts[f"{name}.{own}"] for own in each._parameters if name and f"{name}.{own}" in layouts}
        if inside:
            _told(each, ReplicatedModule3D, _OnCube(code=type(each), layouts=inside, cube=cube))
    facts = _OnCube(code=type(module), layouts=dict(layouts), cube=cube, enters=enters)
    return _told(module, LocalModule3D if over is None else over, facts)


def _told(module: nn.Module, over: type[nn.Module], facts: _OnCube) -> nn.Module:
    vars(module)["_on_cube"] = facts
    if issubclass(over, LocalModule3D) and "forward" in vars(module):
        # Put on the object itself, it would run before the class's.
        vars(module)["_own_forward"] = vars(module).pop("forward")
    module.__class__ = _made(over, facts.code)  # type: ignore[arg-type]  # classes can be hashed
    return module


@cache
def _made(over: type[nn.Module], code: type[nn.Module]) -> type[nn.Module]:
    """The class of `code` with `over` before it, under the same name."""
    named = {"__module__": code.__module__, "__qualname__": code.__qualname__, "__doc__": code.__doc__}
    return new_class(code.__name__, (over, code), exec_body=lambda namespace: namespace.update(named))


def _restored(over: type[nn.Module], code: type[nn.Module]) -> nn.Module:
    """An empty one, which is then given its attributes."""
    made: nn.Module = object.__new__(_made(over, code))  # type: ignore[arg-type]
    return made


class ReplicatedModule3D(nn.Module):
    """Gives code that a backward pass runs again the block of each parameter; its gradient goes to the ledger.

    A checkpoint that lies inside the code runs again what it was given, a method or a closure, and no forward of the
    module around it.
    """

    _on_cube: _OnCube

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, nn.Parameter) or not torch.is_grad_enabled():
            return value
        facts = self._on_cube
        if name not in facts.layouts or backward_pass() == -1:
            return value
        return local_param(value, facts.layouts[name], facts.cube)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The made class has no place of its own to be found at.
        over = type(self).__bases__[0]
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple), "a module is not stored by its name"
        return (_restored, (over, self._on_cube.code), *reduced[2:])


class LocalModule3D(ReplicatedModule3D):
    """Runs a module's own code with this rank's block of each parameter; gradients go to the ledger."""

    @out_of_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward gives for this rank's blocks."""
        with self._blocks():
            result = vars(self).get("_own_forward", super().forward)(*args, **kwargs)
        return result if self._on_cube.enters is None else self._cut(result, self._on_cube.enters)

    @contextmanager
    def _blocks(self) -> Iterator[None]:
        """Inside, the parameters in the layouts are blocks. One use of each, however many of its names are read."""
        facts = self._on_cube
        blocks: dict[int, Tensor] = {}
        swapped: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        try:
            for name, layout in facts.layouts.items():
                inside, _, own = name.rpartition(".")
                held = self.get_submodule(inside)._parameters
                parameter = held[own]
                if isinstance(parameter, nn.Parameter):  # or it is a block already: code that calls itself
                    if id(parameter) not in blocks:
                        blocks[id(parameter)] = local_param(parameter, layout, facts.cube)
                    swapped.append((held, own, parameter))
                    held[own] = blocks[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for held, own, parameter in swapped:
                held[own] = parameter

    def _cut(self, result: Any, face: Face) -> Tensor:
        if not isinstance(result, Tensor) or result.dim() < 2:
            found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{self._get_name()} enters face {face}: its result must be a tensor (..., columns) of the rows of a "
                f"plane. Got {found}."
            )
        block = local_block(result.flatten(0, -2), self._on_cube.cube, face)
        return block if result.dim() == 2 else block.unsqueeze(0)

    def _get_name(self) -> str:
        return f"Wrapped3D[{super()._get_name()}]"

    def extra_repr(self) -> str:
        facts = self._on_cube
        said = [part for part in (super().extra_repr(), *map(self._line, facts.layouts)) if part]
        return ", ".join(said if facts.enters is None else [*said, f"enters face {facts.enters}"])

    def _line(self, name: str) -> str:
        layout = self._on_cube.layouts[name]
        cut = "".join(f", cut over {axis}" for axis, _ in layout.cut) or ", whole"
        return (
            f"{name}: {tuple(self.get_parameter(name).shape)}{cut}, summed over {'+'.join(layout.sum_over) or 'none'}"
        )

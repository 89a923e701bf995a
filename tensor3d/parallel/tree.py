"""Copies of modules that share nothing with the original that either may change."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from tensor3d.parallel.workshop import Workshop

# Ends of the names of the dicts in which a module keeps its hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def shell(module: nn.Module, workshop: Workshop) -> nn.Module:
    """A copy of one module, with its attributes, hooks and mode, own buffers, and no parameters or modules yet."""
    made = object.__new__(type(module))
    vars(made).update(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, dict | set) and name.startswith("_"):
            vars(made)[name] = value.copy()
        elif isinstance(value, MethodType) and value.__self__ is module:
            vars(made)[name] = MethodType(value.__func__, made)  # or the copy would run the original's code
    vars(made).update(_parameters={}, _modules={})
    vars(made)["_buffers"] = {
        name: None if buffer is None else workshop.buffer(buffer) for name, buffer in module._buffers.items()
    }
    return made


def copied(
    module: nn.Module, workshop: Workshop, parameter: Callable[[nn.Parameter], nn.Parameter | None]
) -> nn.Module:
    """A copy of a module and all inside, with `parameter(each)` for each parameter. Shared modules stay shared."""
    made = {id(each): shell(each, workshop) for each in module.modules()}
    for each in module.modules():
        copy = made[id(each)]
        copy._parameters = {name: None if p is None else parameter(p) for name, p in each._parameters.items()}
        copy._modules = {name: None if child is None else made[id(child)] for name, child in each._modules.items()}
    return made[id(module)]


def bare(module: nn.Module) -> nn.Module:
    """`module` without its hooks, for a module inside another one that has taken them over."""
    for name, value in vars(module).items():
        if name.endswith(_HOOKS) and isinstance(value, dict):
            value.clear()
    return module


def take_hooks(source: nn.Module, target: nn.Module) -> nn.Module:
    """`target` with the hooks of `source` besides its own."""
    for name, value in vars(source).items():
        if name.endswith(_HOOKS) and isinstance(value, dict):
            vars(target).setdefault(name, {}).update(value)
    if source._is_full_backward_hook is not None:
        target._is_full_backward_hook = source._is_full_backward_hook
    return target


def hidden_modules(module: nn.Module) -> list[str]:
    """Names of attributes that hold modules with parameters where `named_modules` does not see them."""
    return [name for name, value in vars(module).items() if name not in ("_modules",) and _holds_parameters(value)]


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_parameters(each) for each in value)
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None

"""Copies of modules that share nothing with the original that either may change."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from tensor3d.parallel.workshop import Workshop

# Ends of the names of the dicts in which a module keeps its hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_REGISTERED = ("_parameters", "_buffers", "_modules")
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, set, deque)
_COPIED = (*_DICTS, *_LISTS, tuple, partial, MethodType)


def shell(module: nn.Module, workshop: Workshop) -> nn.Module:
    """A copy of one module, with its attributes, hooks and mode, own buffers, and no parameters or modules yet."""
    made = object.__new__(type(module))
    vars(made)["_buffers"] = {
        name: None if buffer is None else workshop.buffer(buffer) for name, buffer in module._buffers.items()
    }
    vars(made).update(_parameters={}, _modules={})
    for name, value in vars(module).items():
        if name not in _REGISTERED:
            vars(made)[name] = _copied_value(value, module, made, workshop)
    return made


def _copied_value(value: Any, module: nn.Module, made: nn.Module, workshop: Workshop) -> Any:
    """An attribute of `module` for its copy `made`: the module itself and its methods are the copy's."""

    def again(inner: Any) -> Any:
        return _copied_value(inner, module, made, workshop)

    if value is module:
        return made
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, made)  # or the copy would run the original's code
    if type(value) is partial:
        same = partial(again(value.func), *map(again, value.args), **{k: again(v) for k, v in value.keywords.items()})
        vars(same).update({name: again(each) for name, each in vars(value).items()})
        return same
    if isinstance(value, Tensor) and not value.is_meta:
        return workshop.buffer(value)
    if type(value) is tuple:
        return tuple(map(again, value))
    if type(value) not in (*_DICTS, *_LISTS):
        return value
    known = workshop.value_of(value)
    if known is not None:
        return known
    copy = value.copy()
    workshop.keep_value(value, copy)  # before what it holds is copied: that may be itself
    copy.clear()
    if type(value) in _DICTS:
        copy.update({key: again(each) for key, each in value.items()})
    else:
        for each in value:
            copy.add(again(each)) if isinstance(value, set) else copy.append(again(each))
    return copy


def copied(
    module: nn.Module, workshop: Workshop, parameter: Callable[[nn.Parameter], nn.Parameter | None]
) -> nn.Module:
    """A copy of a module and all inside, with `parameter(each)` for each parameter. Shared modules stay shared.

    Raises:
        ValueError: something inside uses modules or parameters that are not registered.
    """
    tree = {id(each) for each in module.modules()}
    for name, each in module.named_modules():
        for problem in hidden_parts(f"{workshop.place}.{name}".strip("."), each, tree):
            raise ValueError(problem)
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


def hidden_parts(name: str, module: nn.Module, tree: Collection[int]) -> list[str]:
    """What a copy of `module` would go on using of the original's, a sentence for each such attribute.

    Modules and parameters that no name of `named_modules` or `named_parameters` leads to: in lists, in partial
    functions, behind methods of other modules, in the closures of functions. Hooks and objects of other types are not
    looked into.

    Args:
        name: of the module, for the sentences.
        tree: the `id`s of all modules of the model.
    """
    return [
        f"{name!r} keeps {sort} in the attribute {attribute!r}, where named_{sort}() does not see them, and a copy "
        "would use the original's. Make it an nn.ModuleList or nn.ParameterList, look them up in forward, or put "
        "kinds.replace(build) here."
        for attribute, value in vars(module).items()
        if attribute not in _REGISTERED and not attribute.endswith(_HOOKS)
        for sort in islice(_hidden(value, module, tree, set()), 1)
    ]


def _hidden(value: Any, owner: nn.Module | None, tree: Collection[int], seen: set[int]) -> Iterator[str]:
    """Sorts of what is found. References to `owner` are none, as they become its copy's."""
    if value is owner or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        if id(value) in tree or next(value.parameters(), None) is not None:
            yield "modules"
    elif isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
            yield "parameters"
    else:
        inside = owner if type(value) in _COPIED else None  # elsewhere they cannot be replaced
        for each in _parts(value):
            yield from _hidden(each, inside, tree, seen)


def _parts(value: Any) -> list[Any]:
    """What a plain value refers to."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [*(value.__defaults__ or ()), *_closed_over(value)]
    return []


def _closed_over(function: FunctionType) -> list[Any]:
    """The variables of the functions around it that it uses; not those that have no value yet."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values

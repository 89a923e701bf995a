"""Copies of modules that share nothing with the original that either may change."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.distributed.cube import Cube
from tensor3d.sharding.param_layout import Layout, as_parameter, cut_rows

# --- The workshop: cuts the original's weights for the cube, each once ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Made:
    source: Tensor  # kept alive: its `id` stands for it, and another's could be the same once it is gone
    parameter: nn.Parameter
    layout: Layout
    permute_rows: Tensor | None
    place: str


class ModuleBuilder:
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
                "embedding tied with a projection: rules.embedding() and rules.projection()), or untie them by giving "
                "one a copy of the weight before parallelize."
            )
        return made.parameter

    def made_from(self, source: Tensor) -> nn.Parameter | None:
        """The parameter that was made from `source`, if one was."""
        made = self._made.get(_key(source))
        return None if made is None else made.parameter

    def order_of(self, parameter: nn.Parameter) -> Tensor | None:
        """`permute_rows` of a parameter that was made here, if it was made with one."""
        return next((made.permute_rows for made in self._made.values() if made.parameter is parameter), None)

    def take_hooks_of(self, name: str, source: nn.Parameter) -> None:
        """Registers the hooks of the original's parameter with the one that was made from it. They get the gradient
        that is summed over the cube, in the shape of the whole.

        Raises:
            ValueError: there are some, and no parameter for them, or its rows lie in another order.
        """
        hooks = list((source._backward_hooks or {}).values())
        after = list((getattr(source, "_post_accumulate_grad_hooks", None) or {}).values())
        if not hooks and not after:
            return
        made = self._made.get(_key(source))
        if made is None or made.permute_rows is not None:
            why = "is not made from the original's" if made is None else "has its rows in another order"
            raise ValueError(
                f"the parameter {name!r} has a hook, and the one on the cube {why}. Take the hook off "
                "(handle.remove()) and register one with the parameter that parallelize gives."
            )
        trained = made.parameter.requires_grad
        made.parameter.requires_grad_()  # torch takes no hook of one that is frozen, and keeps those that are there
        for hook in hooks:
            made.parameter.register_hook(hook)
        for hook in after:
            made.parameter.register_post_accumulate_grad_hook(hook)
        made.parameter.requires_grad_(trained)

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
        block = cut_rows(source.detach(), layout.slices(source.shape, self.cube), permute_rows)
        block = block.to(self.cube.device, copy=True, memory_format=torch.contiguous_format)
        parameter = as_parameter(block, source.shape, layout, self.cube)
        parameter.requires_grad_(source.requires_grad)
        return parameter


def _key(source: Tensor) -> Hashable:
    """The same for one tensor and for equal views of one: views are made anew at each use."""
    base = source if source._base is None else source._base
    return id(base), source.storage_offset(), source.shape, source.stride()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


# --- Copies of modules that share nothing with the original that either may change ------------------------------------

# Ends of the names of the dicts in which a module keeps its hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_REGISTERED = ("_parameters", "_buffers", "_modules")
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, set, deque)
_COPIED = (*_DICTS, *_LISTS, tuple, partial, MethodType)


def clone_module_shell(module: nn.Module, workshop: ModuleBuilder) -> nn.Module:
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


def _copied_value(value: Any, module: nn.Module, made: nn.Module, workshop: ModuleBuilder) -> Any:
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
    module: nn.Module, workshop: ModuleBuilder, parameter: Callable[[nn.Parameter], nn.Parameter | None]
) -> nn.Module:
    """A copy of a module and all inside, with `parameter(each)` for each parameter. Shared modules stay shared.

    Raises:
        ValueError: something inside uses modules or parameters that are not registered.
    """
    tree = {id(each) for each in module.modules()}
    for name, each in module.named_modules():
        for problem in untracked_modules(f"{workshop.place}.{name}".strip("."), each, tree):
            raise ValueError(problem)
    made = {id(each): clone_module_shell(each, workshop) for each in module.modules()}
    for each in module.modules():
        copy = made[id(each)]
        copy._parameters = {name: None if p is None else parameter(p) for name, p in each._parameters.items()}
        copy._modules = {name: None if child is None else made[id(child)] for name, child in each._modules.items()}
    return made[id(module)]


def strip_params(module: nn.Module) -> nn.Module:
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


def hooks_on_activations(module: nn.Module) -> list[str]:
    """What the hooks of a module that see its inputs, outputs or their gradients are called."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    found = [hook for kind in kinds for hook in (vars(module).get(kind) or {}).values()]
    return [getattr(hook, "__name__", type(hook).__name__) for hook in found]


def untracked_modules(name: str, module: nn.Module, tree: Collection[int]) -> list[str]:
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
        "rules.replace(build) here."
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

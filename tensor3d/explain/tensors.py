"""The tensors in what a model is given and gives back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def cut_off(value: Any) -> Any:
    """The same without the graph behind it: a backward pass ends at these tensors. Parameters stay themselves.

    What holds tensors with a graph is copied and stays of its type, and what is one object in several places stays one
    (attention asks whether its query *is* its key). All else stays itself.

    Raises:
        ValueError: something that holds such tensors cannot be copied.
    """
    return _cut(value, {})


def _cut(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    if not any(tensor.requires_grad and not isinstance(tensor, nn.Parameter) for tensor in tensors_in(value)):
        return value
    if id(value) not in done:
        new = _cut_copy(value, done)
        done[id(value)] = value, new  # with the value itself, so that its id is not used again
    return done[id(value)][1]


def _cut_copy(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_()
    if isinstance(value, tuple):
        items = [_cut(item, done) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    try:
        copied = copy.copy(value)
        done[id(value)] = value, copied  # an attribute may lead back to it
        _cut_contents(value, copied, done)
    except (TypeError, AttributeError):
        copied = value
    if any(tensor.grad_fn is not None for tensor in tensors_in(copied)):
        raise ValueError(
            f"inputs of explain are cut off from the graph behind them, and a {type(value).__name__} among them cannot "
            "be copied for it. Put detached tensors into it, or pass the tensors themselves."
        )
    return copied


def _cut_contents(value: Any, copied: Any, done: dict[int, tuple[Any, Any]]) -> None:
    """Attributes too: those of a mapping may be where its items are. A dataclass may have slots for its own."""
    for name, item in list(getattr(value, "__dict__", {}).items()):
        vars(copied)[name] = _cut(item, done)
    for each in fields(value) if is_dataclass(value) else ():
        object.__setattr__(copied, each.name, _cut(getattr(value, each.name), done))
    if isinstance(value, (dict, list)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            copied[key] = _cut(item, done)


def scalar_of(output: Any, what: str) -> Tensor:
    """What a backward pass begins with: the output's `.loss`, else the sum of all that has a gradient in it.

    Args:
        what: the name of `output`, for the error.

    Raises:
        ValueError: nothing in it has a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    parts = [loss] if isinstance(loss, Tensor) else [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts or not parts[0].requires_grad:
        raise ValueError(
            f"nothing in {what} needs a gradient, so there is no backward pass to look at. Got {type(output)}. "
            "Pass inputs, or a loss of the output, that do."
        )
    return torch.stack([part.sum() for part in parts]).sum() if len(parts) > 1 else parts[0].sum()

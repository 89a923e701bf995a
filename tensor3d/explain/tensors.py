"""The tensors in what a model is given and gives back."""

from __future__ import annotations

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
    """The same without the graph behind it: a backward pass ends at these tensors. Parameters stay themselves."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: cut_off(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(cut_off(item) for item in value)
    return value


def scalar_of(output: Any) -> Tensor:
    """What a backward pass begins with: the output's `.loss`, else the sum of all that has a gradient in it.

    Raises:
        ValueError: nothing in it has a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    parts = [loss] if isinstance(loss, Tensor) else [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts or not parts[0].requires_grad:
        raise ValueError(
            f"nothing in the output needs a gradient, so there is no backward pass to look at. Got {type(output)}. "
            "Pass inputs, or a loss of the output, that do."
        )
    return torch.stack([part.sum() for part in parts]).sum() if len(parts) > 1 else parts[0].sum()

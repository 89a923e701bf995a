"""The run of a module on an example: its tensors, and that nothing is left of it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Attributes, plain lists and tables in them, what is registered, buffers and random generators come back."""
    parts = list(module.modules())
    attributes = [(part, dict(vars(part))) for part in parts]
    held = [value for part in parts for value in vars(part).values() if type(value) in _CONTAINERS]
    contents = [(each, copy.copy(each)) for each in held]
    values = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({parameter.device.index or 0 for parameter in module.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for part, before in attributes:
            vars(part).clear()
            vars(part).update(before)
        for each, content in contents:
            _refill(each, content)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)


def _refill(container: Any, content: Any) -> None:
    """In place, as others may hold the container too."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def tensors_in(values: Any, label: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in arguments or results, each with where it stands."""
    if isinstance(values, Tensor):
        yield label, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from tensors_in(value, f"{label}.{key}" if label else str(key))
    elif isinstance(values, (tuple, list)):
        for place, value in enumerate(values):
            yield from tensors_in(value, f"{label}[{place}]" if label else f"[{place}]")


def hides_what_comes_later(mask: Tensor) -> bool:
    """Whether a mask (..., S, S), True or -inf where it hides, hides what comes later and does nothing else.

    One without memory tells nothing.
    """
    if mask.is_meta or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == float("-inf")
    later = torch.ones_like(hidden, dtype=torch.bool).triu(1)
    adds = mask.dtype != torch.bool and bool(((mask != 0) & ~hidden).any())
    return bool((hidden == later).all()) and not adds

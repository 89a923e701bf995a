"""The run of a module on an example: its tensors, and that nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Training flags, buffers (in place and by name) and random generators come back as they were."""
    training = {part: part.training for part in module.modules()}
    buffers = {part: dict(part._buffers) for part in module.modules()}
    values = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({parameter.device.index or 0 for parameter in module.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for part, flag in training.items():
            part.training = flag
            part._buffers.update(buffers[part])
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)


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
    """Whether a mask (..., S, S), True or -inf where it hides, hides what comes later and nothing else."""
    hidden = mask if mask.dtype == torch.bool else mask == float("-inf")
    later = torch.ones_like(hidden, dtype=torch.bool).triu(1)
    return mask.shape[-1] == mask.shape[-2] and bool((hidden == later).all())

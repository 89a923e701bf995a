"""In which type something is computed: at no cost where it is so already."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes a tenth of that operator's time where it is of this type already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


_NOTHING: AbstractContextManager[None] = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Inside, products are in the type of what is multiplied. Torch's own context is entered only where there is an
    autocast to switch off: it takes as long as several operators."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING

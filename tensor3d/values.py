"""Which tensors the host may look into."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def are_at_hand(tensor: Tensor) -> bool:
    """Whether the host can read its values now. On a device it would have to wait, and a fake tensor has none."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)

"""A GPU that need not be there, for a dry step: a device that is no CPU, and attention that keeps what GPUs keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensor3d.ops import fp8
from tensor3d.torch_private import add_own_device, fake_process_groups, own_device_backend, own_device_name

fake_process_groups()  # the backend "fake"

_FREE, _NAME = "privateuseone", "dry_gpu"
"""torch's device type for whoever adds one, and what it is called here. "cuda" itself will not do: in a build without
CUDA autograd refuses it, even for fake tensors."""


def stand_in_device() -> torch.device:
    """A device on which fake tensors can lie anywhere; all code takes it for an accelerator without streams.

    Raises:
        ValueError: the process has a device of this type already, of another library.
    """
    taken = own_device_name()
    if taken == _FREE:  # once a process
        add_own_device(_NAME, _Module())
        dist.Backend.backend_capability["fake"].append(_NAME)
    elif taken != _NAME:
        raise ValueError(
            f"memory on a GPU is counted with torch's device type {_FREE}, and this process uses it for {taken}. Count "
            "in a process without that device's library."
        )
    return torch.device(_NAME, 0)


class _Module(own_device_backend()):  # type: ignore[misc]
    """What torch asks of `torch.dry_gpu`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Inside, what goes to the stand-in arrives, products in FP8 are the kernel's, and
    `F.scaled_dot_product_attention` keeps and makes what the fused kernels of a GPU do, whose probabilities are never
    in memory: q, k, v, the mask, the result, and a number for each row and head."""

    def fused(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        result: Tensor = _Fused.apply(q, k, v, attn_mask)
        return result

    # Set, and no mode: what backward computes again runs in a thread of autograd's, which modes of functions do not
    # reach.
    with (
        _Arriving(),
        patch.object(F, "scaled_dot_product_attention", fused),
        patch.object(fp8, "has_kernel", lambda device: device.type == _NAME),
        patch.object(fp8, "scaled_mm", _scaled_mm),
    ):
        yield


def _scaled_mm(a: Tensor, b: Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> Tensor:
    """(M, N) of (M, K) and (K, N); nothing is computed."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


class _Arriving(TorchFunctionMode):
    """A real tensor, made on the host, of which torch would compute the copy, goes to the stand-in as a fake one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], torch.device) and args[1].type == _NAME:
            return args[0] if args[0].device == args[1] else torch.empty_like(args[0], device=args[1])
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    """(members, heads, rows, head dimension) each; nothing is computed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        result, sums = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        # Kernels add a mask to the scores, in their type.
        ctx.save_for_backward(q, k, v, result, sums, None if mask is None else mask.to(q.dtype))
        return result

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

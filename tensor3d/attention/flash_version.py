"""Which FlashAttention answers where PyTorch's operators are called: its own, or a newer one that is installed.

PyTorch brings FlashAttention-2 (Dao 2023, arXiv 2307.08691). FlashAttention-3, for Hopper (Shah et al. 2024,
arXiv 2407.08608), and FlashAttention-4, for Hopper and Blackwell, are packages of their own, of which
`torch.nn.attention.activate_flash_attention_impl` puts one in its place, for a whole process. The backend "varlen"
calls the operator, and so takes what is there.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

from tensor3d.torch_private import flash_attention

FlashVersion = Literal["FA3", "FA4"]
_PACKAGES: dict[FlashVersion, str] = {
    "FA3": "flash_attn_interface, built from the folder `hopper` of FlashAttention's sources",
    "FA4": "flash_attn.cute: `pip install --pre flash-attn-4`",
}


def flash_version() -> str | None:
    """What has taken the place of PyTorch's own FlashAttention in this process: "FA3", "FA4", or what else has been
    activated. None: nothing."""
    return current_flash_attention_impl()


def use_flash_attention(version: FlashVersion, device: torch.device) -> None:
    """Has another FlashAttention in the place of PyTorch's own, in this process, once it has computed two sequences
    forward and backward. Its first pass of other sizes may have to compile.

    Args:
        version: FA3 or FA4. Neither drops probabilities.
        device: the GPU that will attend.

    Raises:
        ValueError: an unknown version, a device that is no GPU, a package that is not there or does not fit this
            PyTorch or this GPU, or wrong results. PyTorch's own is in place again then.
    """
    if version not in _PACKAGES:
        raise ValueError(f"flash_attention must be one of {', '.join(get_args(FlashVersion))}. Got {version!r}.")
    if device.type != "cuda":
        raise ValueError(f"flash_attention = {version!r} is for GPUs of NVIDIA. Got {device.type}. Leave it out.")
    try:
        activate_flash_attention_impl(version)
        _try(device)
    except Exception as problem:  # of a package that is none of ours: whatever it raises
        if flash_version() is not None:
            restore_flash_attention_impl()
        missing = isinstance(problem, ImportError)
        what = f"the package {_PACKAGES[version]}" if missing else f"a package that fits torch {torch.__version__}"
        raise ValueError(
            f"flash_attention = {version!r} needs {what}. Got {type(problem).__name__}: {problem}. Leave it out to use "
            "PyTorch's own."
        ) from problem


def _try(device: torch.device) -> None:
    """Raises RuntimeError where the operator gives other numbers than the formula, forward or backward."""
    lengths, heads, width = (24, 40), 2, 64
    random = torch.Generator().manual_seed(0)
    qkv = [torch.randn(sum(lengths), heads, width, generator=random).to(device, torch.bfloat16) for _ in range(3)]
    direction = torch.randn(sum(lengths), heads, width, generator=random).to(device, torch.bfloat16)
    ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        narrow = [t.detach().requires_grad_() for t in qkv]
        wide = [t.detach().float().requires_grad_() for t in qkv]
        options = {"window_size_left": -1, "window_size_right": -1}
        result = flash_attention(*narrow, ends, ends, max(lengths), max(lengths), 0.0, False, False, **options)[0]
        wanted = torch.cat([_attend(*parts) for parts in zip(*(t.split(lengths) for t in wide), strict=True)])
        found = [result, *torch.autograd.grad(result, narrow, direction)]
        right = [wanted, *torch.autograd.grad(wanted, wide, direction.float())]
    for name, a, b in zip(("the result", "dq", "dk", "dv"), found, right, strict=True):
        error = float((a.detach().float() - b.detach()).norm() / b.detach().norm())
        if not error < 0.05:  # bf16 gives some 0.005; what is not a number is no less
            raise RuntimeError(f"{name} of two sequences is {error:.3g} of its size away from softmax(q k^T) v")


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)

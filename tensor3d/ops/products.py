"""The product of two matrices, by the faster of the libraries that PyTorch brings for this processor.

PyTorch gives fp32 products on x86 to MKL, which leaves AVX-512 unused on processors that are not Intel's. oneDNN, which
PyTorch takes for bf16, uses it: 2.3 times the FLOP/s on an EPYC (docs/performance.md).
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from tensor3d.ops.as_type import as_type
from tensor3d.torch_private import is_in_torch_dispatch_mode, is_there, onednn_linear

_LEAST_SIDE = 64
_LEAST = 2**22
_LEAST_TRANSPOSED = 2**16
"""Below these oneDNN's set-up costs more than it saves: rows, columns and inner size; their product; rows times columns
where the left matrix is a transposed one, whose elements oneDNN puts in order first."""

_NARROW = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b + bias`, as it is done inside of autograd functions: without a graph.

    Args:
        a: (M, K), transposed or not, as `b` (K, N).
        bias: (N,).

    Returns:
        (M, N) in the type of the inputs. Which library computes it depends on the processor, the type and the shapes
        alone.
    """
    if _suits_onednn(a, b) and onednn_is_faster():
        return by_onednn(a, b, bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def added_product(addend: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`addend + a @ b`, to an addend of its shape and type, or none. A device adds where it multiplies: one operator,
    and in 16 bits the sum alone is rounded, not the product before it."""
    if addend is None:
        return product(a, b)
    if a.device.type == "cpu":
        return product(a, b).add_(addend)
    return torch.addmm(addend, a, b)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`product(a, b)` in another type. For fp32 of 16-bit matrices NVIDIA's kernels write the sums as they have them:
    nothing is rounded to 16 bits, and nothing converted."""
    if dtype == torch.float32 and a.dtype in _NARROW and _writes_sums(a.device):
        return torch.mm(a, b, out_dtype=dtype)
    return as_type(product(a, b), dtype)


def _writes_sums(device: torch.device) -> bool:
    """The device "meta" stands for a GPU."""
    return (device.type == "cuda" and torch.version.hip is None) or device.type == "meta"


def by_onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by oneDNN, on CPUs, in fp32."""
    result: Tensor = onednn_linear(a, b.t(), bias, "none", [], "")
    return result


def onednn_is_faster() -> bool:
    """Whether large fp32 products are oneDNN's here: it is on, and the processor has AVX-512 and is not Intel's.

    `torch.backends.mkldnn.enabled = False` and the variable ATEN_CPU_CAPABILITY=avx2 leave all of them to MKL.
    """
    return bool(torch.backends.mkldnn.enabled) and _mkl_is_slow()


@cache
def _mkl_is_slow() -> bool:
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _vendor() not in ("GenuineIntel", "")
        and is_there(onednn_linear)
    )


def _vendor() -> str:
    """As the processor names it ("AuthenticAMD"); empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().rpartition(" ")[2].strip(",")  # Windows: "Intel64 Family 6 ..., GenuineIntel"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _suits_onednn(a: Tensor, b: Tensor) -> bool:
    if a.dtype != torch.float32 or not a.is_cpu or b.dtype != torch.float32:
        return False
    rows, inner, columns = *a.shape, b.shape[1]
    if min(rows, inner, columns) < _LEAST_SIDE or rows * inner * columns < _LEAST:
        return False
    if a.stride(1) != 1 and rows * columns < _LEAST_TRANSPOSED:
        return False
    # Who counts operators or traces them is to see a plain product.
    return type(a) in _PLAIN and type(b) in _PLAIN and not is_in_torch_dispatch_mode()

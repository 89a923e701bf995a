"""What devices can do at most: the denominator of MFU.

Dense products of matrices with sums in fp32, in 10^12 FLOP/s, from the vendors' data sheets and architecture white
papers. Where a sheet gives figures "with sparsity" only, the dense ones are half of them. "fp32" is what torch's
products of fp32 matrices can use without TF32: the vector units of NVIDIA's GPUs, the matrix units of AMD's.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import torch

Compute = Literal["bf16", "fp16", "tf32", "fp32"]

# What torch.cuda.get_device_name says, as a pattern: bf16, fp16, tf32, fp32; None: the device has no such unit. The
# first that matches counts, so that a variant stands before the family.
_DEVICES: tuple[tuple[str, tuple[float | None, float | None, float | None, float | None]], ...] = (
    (r"V100S.*", (None, 130.0, None, 16.4)),
    (r"V100.*PCIE", (None, 112.0, None, 14.0)),
    (r"V100", (None, 125.0, None, 15.7)),  # SXM2, SXM3
    (r"T4", (None, 65.0, None, 8.1)),
    (r"A100|A800", (312.0, 312.0, 156.0, 19.5)),
    (r"A30", (165.0, 165.0, 82.0, 10.3)),
    (r"A40", (149.7, 149.7, 74.8, 37.4)),
    (r"A10G", (70.0, 70.0, 35.0, 35.0)),
    (r"A10", (125.0, 125.0, 62.5, 31.2)),
    (r"RTX A6000", (154.8, 154.8, 77.4, 38.7)),
    (r"H100 NVL|H200 NVL", (835.5, 835.5, 417.5, 60.0)),
    (r"H100 PCIe|H800 PCIe", (756.0, 756.0, 378.0, 51.0)),
    (r"H20", (148.0, 148.0, 74.0, 44.0)),
    (r"H100|H800|H200|GH200", (989.4, 989.4, 494.7, 66.9)),  # SXM
    (r"GB200", (2500.0, 2500.0, 1250.0, 80.0)),
    (r"B200", (2250.0, 2250.0, 1125.0, 75.0)),  # HGX
    (r"L40S", (362.0, 362.0, 183.0, 91.6)),
    (r"L40", (181.0, 181.0, 90.5, 90.5)),
    (r"L4", (121.0, 121.0, 60.0, 30.3)),
    (r"RTX 6000 Ada Generation", (364.2, 364.2, 182.1, 91.1)),
    (r"GeForce RTX 3090", (71.0, 71.0, 35.6, 35.6)),
    (r"GeForce RTX 4090", (165.2, 165.2, 82.6, 82.6)),
    (r"GeForce RTX 5090", (209.5, 209.5, 104.8, 104.8)),
    # torch sees each of the two halves of an MI250X or MI250 as a device.
    (r"MI250X", (191.5, 191.5, None, 47.9)),
    (r"MI250", (181.0, 181.0, None, 45.3)),
    (r"MI210", (181.0, 181.0, None, 45.3)),
    (r"MI100", (92.3, 184.6, None, 46.1)),
    (r"MI300X|MI325X", (1307.4, 1307.4, 653.7, 163.4)),
)
# Other chips under a known name, or a part of one.
_OTHER = re.compile(r"\bMIG\b|\bLaptop\b|\bMax-Q\b|\b(4090|5090) D\b|\b(3090|4090) Ti\b|\bA40M?-\d|\bvGPU\b|\bGRID\b")


def peak(device: torch.device, compute: Compute) -> float | None:
    """FLOP/s of a device at most, or None: of a CPU, and of a device that is not known. A recipe can then give it."""
    return peak_of(torch.cuda.get_device_name(device), compute) if device.type == "cuda" else None


def peak_of(name: str, compute: Compute) -> float | None:
    """The same, of a device of this name ("NVIDIA H100 80GB HBM3").

    Raises:
        ValueError: `compute` is not one of the types.
    """
    types = get_args(Compute)
    if compute not in types:
        raise ValueError(f"a compute type is one of {', '.join(types)}. Got {compute!r}.")
    if _OTHER.search(name):
        return None
    for pattern, figures in _DEVICES:
        # Whole words: "A10" is not in "A100", nor "L4" in "L40S".
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", name):
            tera = figures[types.index(compute)]
            return None if tera is None else tera * 1e12
    return None

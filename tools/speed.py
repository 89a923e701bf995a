"""How fast a device can be expected to train, before it has trained anything."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from tools.building import TYPES
from tools.peaks import peak
from tools.recipe import PrecisionRecipe, RunRecipe

SHARE_OF_PEAK = 0.4
"""Of a GPU's peak. NVIDIA's BERT-large reaches 0.44 at length 128 on A100s (4,591 sequences/s on eight of them), larger
models more; a model split over slow wires reaches less."""
SHARE_OF_MEASURED = 0.5
"""Of a measured product's speed on a CPU: the quickstart reaches it on one process."""
_SIDE = 1024  # rows and columns of the measured product
_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is assumed of the machine."""

    flops: float
    """FLOP/s expected of all ranks together."""
    words: str
    """Where that comes from."""


def expected_speed(run: RunRecipe, precision: PrecisionRecipe, ranks: int) -> Speed:
    """From the recipe's peak, else from the GPU's known one, else from a product measured on this machine.

    The measured one is that of the whole machine, which its ranks share: it holds for a run on this machine alone.
    """
    compute = precision.compute
    if run.peak_tflops:
        source, top = "run.peak_tflops", run.peak_tflops * 1e12
    else:
        found = _known_peak(precision)
        source, top = f"this machine's {found[0]}" if found else "", found[1] if found else 0.0
    if top:
        words = f"{SHARE_OF_PEAK:.0%} of {top / 1e12:,.1f} TFLOP/s in {compute} ({source}) on each of {ranks} ranks"
        return Speed(flops=SHARE_OF_PEAK * top * ranks, words=f"assumed: {words}")
    measured = measured_flops(TYPES[compute])
    words = f"{SHARE_OF_MEASURED:.0%} of {measured / 1e9:,.0f} GFLOP/s, measured for a product in {compute}"
    return Speed(flops=SHARE_OF_MEASURED * measured, words=f"assumed: {words} on this machine, for all ranks together")


def measured_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a square product on this machine's CPU, the fastest of some: the machine may have other work."""
    side = _SIDE // 4 if dtype == torch.float16 else _SIDE  # fp16 is very slow on CPUs
    a = torch.randn(side, side).to(dtype)
    a @ a  # the first one sets up threads
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while (begin := time.perf_counter()) < end:
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best


def _known_peak(precision: PrecisionRecipe) -> tuple[str, float] | None:
    if not torch.cuda.is_available():
        return None
    tensor_cores = precision.compute == "fp32" and precision.tf32
    found = peak(torch.device("cuda"), "tf32" if tensor_cores else precision.compute)
    return None if found is None else (torch.cuda.get_device_name(), found)

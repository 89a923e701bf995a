"""`python -m tools.bench.gpu_facts`: versions of everything, the GPU and its state, and the rates by which all else is
measured. Each stands alone, so that what fails or hangs takes nothing along."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch

from tools.common.cli import run_main
from tools.common.machine import Machine, commit
from tools.doctor.collective_timing import product_rate
from tools.doctor.facts import versions

_PACKAGES = ("triton", "transformers", "safetensors", "tyro", "scipy", "sentencepiece", "pytest")
_ASKED = (
    "driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,"
    "utilization.gpu,memory.used,ecc.mode.current,mig.mode.current"
)
"""Of nvidia-smi, which changes nothing."""
_PATIENCE = 20.0  # seconds for nvidia-smi
_PRODUCTS = (("bf16", 4096), ("bf16", 8192), ("fp32", 8192))
_SECONDS = 2.0  # of products of each


def main() -> int:
    """Exit status: as of `run_main`; 1 where something could not be found out."""
    return run_main("tools.bench.gpu_facts", tell)


def tell() -> int:
    failed = False
    for name, find in _facts().items():
        try:
            print(f"{name}: {find()}", flush=True)
        except Exception as error:
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return int(failed)


def _facts() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {
        "date": lambda: datetime.now().astimezone().isoformat(" ", "seconds"),
        "commit": lambda: commit(Path(__file__).resolve().parents[2]) or "none can be told",
        "machine": lambda: str(Machine.here()),
        "versions": lambda: ", ".join(f"{name} {value}" for name, value in versions().items()),
        "packages": lambda: ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    }
    if torch.cuda.is_available():
        found |= {
            "CUDA": lambda: f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
            "GPU": _gpu,
            "before": _state,
            "copies": lambda: f"{copy_rate() / 1e12:.2f} TB/s, bytes read and written",
            **{f"products, {kind}, {n:,}": lambda kind=kind, n=n: _products(kind, n) for kind, n in _PRODUCTS},  # type: ignore[misc]
            "after": _state,
        }
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _gpu() -> str:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return (
        f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} "
        f"multiprocessors, {free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    )


def _asking() -> subprocess.Popen[str] | None:
    """nvidia-smi, under way; None: there is none."""
    asked = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv"]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(asked, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    except OSError:
        return None


def _told(asking: subprocess.Popen[str] | None) -> str:
    """Of the first GPU, or what is the matter: a field that a driver does not know, say."""
    if asking is None:
        return "no nvidia-smi is here"
    try:
        said = asking.communicate(timeout=_PATIENCE)[0].splitlines()
    except subprocess.TimeoutExpired:
        asking.kill()
        return "nvidia-smi does not answer"
    if asking.returncode or len(said) < 2:
        return " / ".join(said)
    cells = (line.split(",") for line in said[:2])
    return ", ".join(f"{name.strip()} {value.strip()}" for name, value in zip(*cells, strict=False))


def _state() -> str:
    return _told(_asking())


def _products(kind: str, n: int) -> str:
    """The rate, and the GPU's clocks and power while it is at work."""
    asking = _asking()  # takes about as long as the products begin
    rate = product_rate(torch.device("cuda", 0), kind, n, _SECONDS)
    return f"{rate.flops / 1e12:,.0f} TFLOP/s; meanwhile {_told(asking)}"


def copy_rate() -> float:
    """Bytes a second that a large copy on the GPU reads and writes."""
    size, rounds = 2**32, 20
    source = torch.rand(size // 4, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 2 * size * rounds / (start.elapsed_time(end) / 1e3)


if __name__ == "__main__":
    sys.exit(main())

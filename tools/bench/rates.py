"""What a rank can compute while all ranks of its computer do the same: products, memory-bound operators, small ones."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHAIN = 50  # small operators, one after another


@dataclass(frozen=True, kw_only=True)
class ProductRate:
    """Three products as a layer does them, A Wᵀ, dC W and dCᵀ A, of matrices with n rows and columns."""

    n: int
    type: str
    flops: float
    """FLOP/s"""


@dataclass(frozen=True, kw_only=True)
class MemoryRate:
    """A sum of two tensors, into memory that is asked for anew as any operator does: three times its bytes move."""

    size: int
    """Bytes of the result."""
    bandwidth: float
    """Bytes/s"""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one rank, or of all of them on average."""

    products: tuple[ProductRate, ...]
    sums: tuple[MemoryRate, ...]
    launch: float
    """Seconds of an operator with hardly anything to do, forward or backward."""
    memory: int
    """Bytes of the computer, on a GPU those of the GPU; 0 where the system does not tell."""
    gpu: bool


def measure_rates(
    device: torch.device,
    types: Sequence[str],
    seconds: float,
    sizes: Sequence[int] = (),
    *,
    together: Callable[[], None],
) -> Rates:
    """Of this rank, while the others measure too.

    Args:
        types: of products: "fp32", "bf16" or "fp16".
        seconds: that each figure takes.
        sizes: rows and columns of the products. Default: some that suit the device.
        together: waits until all ranks have come there. From then on all of them are at work for that long.
    """
    gpu = device.type == "cuda"
    sizes = sizes or ((1024, 2048, 4096, 8192) if gpu else (128, 256, 512, 1024))
    products = [product_rate(device, name, n, seconds, together=together) for name in types for n in sizes]
    sums = []
    for size in (2**28, 2**30) if gpu else (2**20, 2**22, 2**24):
        run = _sum(size, device)
        sums.append(MemoryRate(size=size, bandwidth=3 * size / _each(run, seconds, device, together)))
    launch = _each(_chain(device), seconds, device, together) / (2 * _CHAIN)
    memory = torch.cuda.mem_get_info(device)[1] if gpu else 0
    return Rates(products=tuple(products), sums=tuple(sums), launch=launch, memory=memory, gpu=gpu)


def product_rate(
    device: torch.device, name: str, n: int, seconds: float, *, together: Callable[[], None] = lambda: None
) -> ProductRate:
    """Of products of the type `name` with n rows and columns; `seconds` and `together` as above."""
    run = _products(n, _TYPES[name], device)
    return ProductRate(n=n, type=name, flops=6 * n**3 / _each(run, seconds, device, together))


def combined(rounds: Sequence[Sequence[Rates]]) -> Rates:
    """Of each figure the median over the rounds, each round being the mean over its ranks."""

    def median(find: Callable[[Rates], float]) -> float:
        return statistics.median(statistics.fmean(find(rank) for rank in ranks) for ranks in rounds)

    first = rounds[0][0]
    return dataclasses.replace(
        first,
        products=tuple(
            dataclasses.replace(each, flops=median(lambda rates: rates.products[i].flops))  # noqa: B023
            for i, each in enumerate(first.products)
        ),
        sums=tuple(
            dataclasses.replace(each, bandwidth=median(lambda rates: rates.sums[i].bandwidth))  # noqa: B023
            for i, each in enumerate(first.sums)
        ),
        launch=median(lambda rates: rates.launch),
    )


def _each(run: Callable[[], None], seconds: float, device: torch.device, together: Callable[[], None]) -> float:
    """Seconds of one run, of as many as end within that time: all ranks are at work from the first to the last.

    By processor slices of some milliseconds, in which one rank works and another does not, single runs would tell
    nothing; the mean over many does.
    """
    gpu = device.type == "cuda"
    run()
    together()
    before, count = time.perf_counter(), 0
    while True:
        run()
        count += 1
        if gpu:
            torch.cuda.synchronize(device)
        passed = time.perf_counter() - before
        if passed >= seconds:
            return passed / count


def _products(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    a, w, dc = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))

    def run() -> None:
        a @ w.t()
        dc @ w
        dc.t() @ a

    return run


def _sum(size: int, device: torch.device) -> Callable[[], None]:
    first, second = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)

    def run() -> None:
        first + second

    return run


def _chain(device: torch.device) -> Callable[[], None]:
    start = torch.ones(8, device=device, requires_grad=True)

    def run() -> None:
        result = start
        for _ in range(_CHAIN):
            result = result * 1.001
        result.backward(torch.ones_like(result))
        start.grad = None

    return run

"""What one rank does for `bench collectives`: every collective of a cube at every size, checked and timed."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from tensor3d import Cube, CubeShape
from tensor3d.distributed.collectives import Axis, CommHandle, all_gather, all_reduce, all_to_all, reduce_scatter
from tensor3d.distributed.comm_stats import Kind, summed_elements
from tensor3d.distributed.cube_shape import AXES, AxisName
from tensor3d.ops.products import product

# ----------------------------------------------------------------------------------------------------------------------
# What a rank can compute while all ranks of its computer do the same: products, memory-bound operators, small ones.

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
        run = _summing(size, device)
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
        product(a, w.t())
        product(dc, w)
        product(dc.t(), a)

    return run


def _summing(size: int, device: torch.device) -> Callable[[], None]:
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


# --- What one rank does for `bench collectives` -----------------------------------------------------------------------

_ELEMENT = 4  # bytes: everything travels in fp32


@dataclass(frozen=True, kw_only=True)
class Series:
    """One kind of collective along some axes, in all groups at once as in a step."""

    axes: tuple[AxisName, ...]
    kind: Kind
    members: int
    stride: int
    """Ranks from the first member of a group to the second."""

    @property
    def name(self) -> str:
        return "+".join(self.axes)

    @property
    def received(self) -> int:
        """Bytes for each element of a shard or block, where they are many."""
        return (2 if self.kind == "all-reduce" else 1) * (self.members - 1) * _ELEMENT


@dataclass(frozen=True, kw_only=True)
class Point:
    """A series at one size."""

    series: Series
    elements: int
    """Of a shard, or of the block that goes from one member to another."""

    @property
    def size(self) -> int:
        """Bytes that a rank receives (see `tensor3d.distributed.comm_stats`)."""
        if self.series.kind == "all-reduce":  # few numbers go another way
            return summed_elements(self.series.members, self.series.members * self.elements) * _ELEMENT
        return self.series.received * self.elements


def series_of(shape: CubeShape) -> list[Series]:
    """What the layers and the ledger use: gathers, scatters and sums along each axis, sums over those axes together
    that hold copies of a gradient, sums over all ranks, and the exchange in a plane."""
    sums: list[tuple[AxisName, ...]] = [("data", "x", "y"), ("data", "x", "z"), AXES]
    found: dict[tuple[tuple[AxisName, ...], Kind], None] = {}  # each once
    for axis in AXES:
        for kind in ("all-gather", "reduce-scatter", "all-reduce"):
            found[_several(shape, (axis,)), kind] = None
    for axes in sums:
        found[_several(shape, axes), "all-reduce"] = None
    found[_several(shape, ("y", "z")), "all-to-all"] = None
    series = []
    for axes, kind in found:
        ranks = shape.members(axes, 0)
        if len(ranks) > 1:
            series.append(Series(axes=axes, kind=kind, members=len(ranks), stride=ranks[1] - ranks[0]))
    return series


def _several(shape: CubeShape, axes: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
    return tuple(axis for axis in axes if shape.size(axis) > 1)


def points_of(shape: CubeShape, sizes: Sequence[int], wanted: Sequence[Series] | None = None) -> list[Point]:
    """Every series at every size, as near to so many bytes as even shards come, and each only once.

    Args:
        sizes: bytes that a rank receives.
        wanted: series to take. Default: `series_of` the shape.
    """
    points: dict[Point, None] = {}
    for series in series_of(shape) if wanted is None else wanted:
        for size in sizes:
            points[Point(series=series, elements=max(1, round(size / series.received)))] = None
    return list(points)


class CollectingTrial:
    """All points of a cube on one rank, halted between calls."""

    def __init__(self, cube: Cube, sizes: Sequence[int], wanted: Sequence[Series] | None = None) -> None:
        self._cube = cube
        self.points = points_of(cube.shape, sizes, wanted)
        for point in self.points:
            cube.over(*point.series.axes)  # every rank makes the process groups here

    def check(self) -> list[str]:
        """What is wrong with results or counts, in words: nothing. On whole numbers, so that sums are exact."""
        found = []
        for point in self.points:
            axis, series = self._axis(point), point.series
            mine = _numbers(self._cube.rank, self._given(point), self._cube.device)
            with self._cube.traffic.counting() as traffic:
                result = _issue(point, mine, axis).wait()
            wanted = _wanted(point, axis, self._given(point), self._cube.device)
            where = f"rank {self._cube.rank}, {series.kind} of {point.elements} elements over {series.name}"
            if not torch.equal(result, wanted):
                found.append(f"{where}: the result is wrong")
            if traffic.total_bytes != point.size:
                found.append(f"{where}: {traffic.total_bytes} bytes were counted, and {point.size} travel")
        return found

    def turn(self, counts: Sequence[int]) -> list[float]:
        """Seconds of each point: the mean of so many calls, one right after another, after one that is not timed.

        All ranks begin a point together; what one loses by waiting for another is a part of the time, as in a step.
        """
        return [self._seconds(point, count) for point, count in zip(self.points, counts, strict=True)]

    def rates(self, types: Sequence[str], seconds: float, sizes: Sequence[int]) -> Rates:
        """What this rank computes while all others do the same (see `measure_rates`)."""
        return measure_rates(self._cube.device, types, seconds, sizes, together=self._meet)

    def get_points(self) -> list[Point]:
        return self.points

    def get_host(self) -> str:
        """Name of the computer."""
        return platform.node()

    def close(self) -> None:
        pass

    def _seconds(self, point: Point, count: int) -> float:
        axis = self._axis(point)
        mine = torch.empty(self._given(point), device=self._cube.device).zero_()  # pages of its own
        _issue(point, mine, axis).wait()
        self._meet()
        before = time.perf_counter()
        for _ in range(count):
            _issue(point, mine, axis).wait()
        self._synchronize()
        return (time.perf_counter() - before) / count

    def _meet(self) -> None:
        self._synchronize()
        dist.barrier()

    def _synchronize(self) -> None:
        if self._cube.device.type == "cuda":
            torch.cuda.synchronize(self._cube.device)

    def _axis(self, point: Point) -> Axis:
        return self._cube.over(*point.series.axes)

    def _given(self, point: Point) -> int:
        """Elements that go in."""
        return point.elements * (1 if point.series.kind == "all-gather" else point.series.members)


def _issue(point: Point, tensor: Tensor, axis: Axis) -> CommHandle:
    match point.series.kind:
        case "all-gather":
            return all_gather(tensor, axis)
        case "reduce-scatter":
            return reduce_scatter(tensor, axis)
        case "all-reduce":
            return all_reduce(tensor, axis)
        case "all-to-all":
            even = [point.elements] * axis.size
            return all_to_all(tensor, even, even, axis)


def _numbers(rank: int, length: int, device: torch.device) -> Tensor:
    """Whole numbers that tell ranks and places apart, so small that fp32 holds their sum over thousands of ranks."""
    return (torch.arange(length, device=device) % 251 + rank * 31 % 1021).float()


def _wanted(point: Point, axis: Axis, given: int, device: torch.device) -> Tensor:
    """The result, from what all members give."""
    parts = (_numbers(rank, given, device) for rank in axis.ranks)
    own = slice(axis.index * point.elements, (axis.index + 1) * point.elements)
    match point.series.kind:
        case "all-gather":
            return torch.cat(list(parts))
        case "reduce-scatter":
            return _sum(part[own] for part in parts)
        case "all-reduce":
            return _sum(parts)
        case "all-to-all":
            return torch.cat([part[own] for part in parts])


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """One part after another: of many ranks all together would not fit in memory."""
    return reduce(torch.add, parts)

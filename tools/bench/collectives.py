"""`bench collectives`: what the wire and a rank of this machine can do, as `tools.plan` wants to know it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from tensor3d import CubeShape
from tensor3d.cost_model.hardware import Cluster, Link, LinkFit
from tensor3d.distributed.comm_stats import Kind
from tools.bench.harness.benchmark import Benchmark, Count, Report, cubes_of, listed
from tools.bench.harness.figures import Column, as_json, means, table
from tools.bench.harness.processes import CubeHandle, check_world, interleave, is_shown, start
from tools.common.machine import Machine, format_table
from tools.doctor.collective_timing import CollectingTrial, Rates, Series, combined

# --- A straight line through measured times ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """seconds = latency + bytes * seconds_per_byte"""

    latency: float
    seconds_per_byte: float
    error: float
    """Root of the mean square of the relative differences from what was measured."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second. None: bytes cost nothing."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else None


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the least squares of relative differences: a microsecond in ten weighs as much as a second in ten
    million. Neither latency nor time for a byte falls below 0.

    Args:
        sizes: bytes, at least one.
        seconds: above 0, of each.
    """
    # Slow to import, and needed here alone.
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    times = np.asarray(seconds, dtype=float)
    scale = max(*sizes, 1)  # so that both columns are of like size
    columns = np.stack([1 / times, np.asarray(sizes, dtype=float) / scale / times], axis=1)
    (latency, per_scale), distance = nnls(columns, np.ones(len(times)))
    return Line(
        latency=float(latency),
        seconds_per_byte=float(per_scale) / scale,
        error=float(distance) / math.sqrt(len(times)),
    )


# --- From measured times to what `tools.plan` knows of a cluster ------------------------------------------------------

# What a link must have, above 0, where a fit finds no cost at all.
_LEAST_LATENCY, _LEAST_PER_BYTE = 1e-9, 1e-13


@dataclass(frozen=True, kw_only=True)
class PointFigures:
    """A collective at one size."""

    size: int
    """Bytes that a rank receives."""
    calls: int
    """In each round."""
    seconds: float
    """Of one call: the median over the rounds."""
    by_round: tuple[float, ...]
    """Mean over the calls and the ranks."""


@dataclass(frozen=True, kw_only=True)
class SeriesFigures:
    """One kind of collective along some axes of a cube, at all sizes."""

    shape: CubeShape
    series: Series
    points: tuple[PointFigures, ...]
    line: Line

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("cube", of="shape"),
        Column("axis", of="series.name"),
        Column("members", of="series.members"),
        Column("stride", of="series.stride"),
        Column("kind", of="series.kind"),
        Column("latency us", ".0f", 1e6, of="line.latency"),
        Column("GB/s", ".3f", 1e-9, of="line.bandwidth"),
        Column("fit error", ".0%", of="line.error"),
    )


def series_figures(shape: CubeShape, series: Series, points: Sequence[PointFigures]) -> SeriesFigures:
    return SeriesFigures(shape=shape, series=series, points=tuple(points), line=_line(points))


def make_cluster(
    name: str, hosts: Sequence[str], memory: float, found: Sequence[SeriesFigures], rates: Rates
) -> Cluster:
    """A cluster of equal nodes, as it was seen by one process for each of its ranks.

    A peak is the fastest of the measured products, the efficiency the median of all of them to theirs.

    Args:
        hosts: name of each rank's computer.
        memory: bytes of a rank.

    Raises:
        ValueError: computers with different numbers of ranks, or ranks that do not follow one another on them.
    """
    nodes = len(set(hosts))
    per_node = len(hosts) // nodes
    if list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(per_node)]:
        raise ValueError(
            f"every computer must have the same number of ranks, one after another. Got {', '.join(hosts)}. Start as "
            "many on each."
        )
    flops: dict[str, float] = {}
    for product in rates.products:
        flops[product.type] = max(product.flops, flops.get(product.type, 0.0))
    inside = _link(found, lambda here, members: here == members, per_node)
    across = _link(found, lambda here, members: here < members, per_node)
    either = inside or across
    assert either is not None, "a cube of two ranks has a group"
    return Cluster(
        name=name,
        nodes=nodes,
        per_node=per_node,
        flops=flops,
        memory=memory,
        memory_bandwidth=statistics.median(each.bandwidth for each in rates.sums),
        inside=inside or either,
        across=across or either,
        efficiency=statistics.median(product.flops / flops[product.type] for product in rates.products),
        launch=rates.launch,
        overlaps=rates.gpu,  # gloo sends with the cores that compute
        fits=tuple(pooled(found)),
    )


def pooled(found: Sequence[SeriesFigures]) -> list[LinkFit]:
    """One fit for each kind, number of members and stride, through the times of all groups that have them."""
    points: dict[tuple[int, int, Kind], list[PointFigures]] = {}
    for each in found:
        points.setdefault((each.series.members, each.series.stride, each.series.kind), []).extend(each.points)
    fits = []
    for (members, stride, kind), mine in sorted(points.items()):
        line = _line(mine)
        fits.append(
            LinkFit(
                kind=kind,
                members=members,
                stride=stride,
                latency=line.latency,
                seconds_per_byte=line.seconds_per_byte,
            )
        )
    return fits


def _link(found: Sequence[SeriesFigures], wanted: Callable[[int, int], bool], per_node: int) -> Link | None:
    """What the all-gathers of the smallest groups say, of those of which so many members are on the first node."""
    fitting = []
    for each in found:
        members = each.series.members
        here = sum(rank < per_node for rank in each.shape.members(each.series.axes, 0))
        if each.series.kind == "all-gather" and wanted(here, members):
            fitting.append((members, each.series.stride, here, each.line))
    if not fitting:
        return None
    members, _, here, line = min(fitting, key=lambda group: group[:2])
    # A ring enters a node once, so that rings of several members on a node use less of its wires.
    share = 1 if here == members else here
    return Link(
        latency=max(line.latency / (members - 1), _LEAST_LATENCY),
        bandwidth=1 / max(line.seconds_per_byte, _LEAST_PER_BYTE) / share,
    )


def _line(points: Sequence[PointFigures]) -> Line:
    return fit_line([point.size for point in points], [point.seconds for point in points])


# --- `bench collectives` ----------------------------------------------------------------------------------------------

_TYPES = ("fp32", "bf16", "fp16")
_SIZES = "64,1024,16384,131072,1048576,4194304"
_MOST_CALLS = 200


@dataclass(frozen=True, kw_only=True)
class CollectivesCommand(Benchmark[list[CubeShape]]):
    """Time the collectives of one cube or several at growing sizes, and what a rank computes when all are at work; fit
    latency and bandwidth, and write a file that tools.plan reads with --cluster."""

    cubes: str = "2x2x2"
    """As XxYxZ,XxYxZ,..., all with the same number of ranks."""
    data_parallel: int = 1
    """Copies of each cube."""
    sizes: str = _SIZES
    """Bytes that a rank receives, at least two."""
    types: str = "fp32"
    """Some of fp32, bf16 and fp16: types of the products that are timed. Collectives carry fp32."""
    products: str = ""
    """Rows and columns of the products, as 128,512,... Default: some that suit the device."""
    milliseconds: float = 60.0
    """That one collective takes at one size in a round, and two calls at least. A figure of computing takes five times
    as long."""
    rounds: Count = 5
    """Turns of each cube, one after another; medians are taken over them."""

    def plan(self) -> list[CubeShape]:
        """The cubes."""
        if not (math.isfinite(self.milliseconds) and self.milliseconds > 0):
            raise ValueError(f"--milliseconds must be a number above 0. Got {self.milliseconds}.")
        shapes = cubes_of(self.cubes, self.data_parallel)
        ranks = sorted({shape.ranks for shape in shapes})
        if len(ranks) > 1:
            raise ValueError(
                f"how fast a machine is depends on how many ranks work on it, so all cubes must have the same number. "
                f"Got {', '.join(map(str, ranks))}. Measure each in a run of its own."
            )
        if ranks == [1]:
            raise ValueError(f"a collective needs at least 2 ranks. Got --cubes {self.cubes}.")
        if len(set(_numbers(self.sizes))) < 2:
            raise ValueError(
                f"--sizes must be at least two different numbers of bytes with commas: a line needs two. "
                f"Got {self.sizes!r}."
            )
        if self.products and not _numbers(self.products):
            raise ValueError(f"--products must be whole numbers of at least 1 with commas. Got {self.products!r}.")
        listed("--types", self.types, _TYPES)
        check_world(shapes)
        return shapes

    def measure(self, plan: list[CubeShape]) -> Report:
        with ExitStack() as stack:
            parts = start(plan, partial(CollectingTrial, sizes=_numbers(self.sizes)), stack)
            shown = is_shown()
            if wrong := [fault for part in parts for rank in part.call(CollectingTrial.check) for fault in rank]:
                return Report(content=None, faults=wrong, shown=shown)
            found, rates = self.take_turns(parts, shown=shown)
            hosts = parts[0].call(CollectingTrial.get_host)
        cluster = self.cluster(Machine.here(), hosts, found, rates)
        content = {
            "rounds": self.rounds,
            "cluster": cluster.to_json(),
            "rates": dataclasses.asdict(rates),
            "collectives": as_json(found),
        }
        return Report(lines=lines_of(found, rates, cluster), content=content, shown=shown)

    def take_turns(
        self, parts: Sequence[CubeHandle[CollectingTrial]], *, shown: bool
    ) -> tuple[list[SeriesFigures], Rates]:
        """All turns of all cubes; computing has its turns among them."""
        types, products = listed("--types", self.types, _TYPES), _numbers(self.products)
        counts = [self._counts(part) for part in parts]
        rates: list[list[Rates]] = []

        def turn(i: int, _: int) -> list[float]:
            if i == len(parts):
                rates.append(parts[0].call(CollectingTrial.rates, types, 5 * self.milliseconds / 1e3, products))
                return []
            return means(parts[i].call(CollectingTrial.turn, counts[i]))

        turns = interleave([*(str(part.shape) for part in parts), "computing"], self.rounds, turn, shown=shown)
        found = [
            figures
            for part, calls, mine in zip(parts, counts, turns[:-1], strict=True)
            for figures in figures_of(part, calls, mine)
        ]
        return found, combined(rates)

    def _counts(self, part: CubeHandle[CollectingTrial]) -> list[int]:
        """Calls of each point in a turn, from how long one took."""
        points = part.call(CollectingTrial.get_points)[0]
        seconds = means(part.call(CollectingTrial.turn, [1] * len(points)))
        return [min(_MOST_CALLS, max(2, round(self.milliseconds / 1e3 / each))) for each in seconds]

    def cluster(self, machine: Machine, hosts: Sequence[str], found: Sequence[SeriesFigures], rates: Rates) -> Cluster:
        per_node = len(hosts) // len(set(hosts))
        device = machine.gpus[0] if rates.gpu else f"{machine.cores} cores of {machine.cpu}"
        # A computer that does not tell has a GiB a rank.
        memory = rates.memory or (machine.memory_bytes or per_node * 2**30) / per_node
        return make_cluster(f"{per_node} ranks on {device}", hosts, memory, found, rates)


def _numbers(text: str) -> list[int]:
    """Whole numbers above 0 with commas between them; none where anything else is among them."""
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(part.isdecimal() and int(part) > 0 for part in parts) else []


def figures_of(
    part: CubeHandle[CollectingTrial], calls: Sequence[int], rounds: Sequence[Sequence[float]]
) -> list[SeriesFigures]:
    """The series of one cube.

    Args:
        calls: of each point in a round.
        rounds: seconds of a call of each point, by round.
    """
    points = part.call(CollectingTrial.get_points)[0]
    series = dict.fromkeys(point.series for point in points)
    times = list(zip(*rounds, strict=True))
    return [
        series_figures(
            part.shape,
            each,
            [
                PointFigures(size=point.size, calls=count, seconds=statistics.median(seconds), by_round=seconds)
                for point, count, seconds in zip(points, calls, times, strict=True)
                if point.series == each
            ],
        )
        for each in series
    ]


def lines_of(found: Sequence[SeriesFigures], rates: Rates, cluster: Cluster) -> list[str]:
    """The tables on the screen."""
    rows = [[f"products of {each.n}³, {each.type}", f"{each.flops / 1e9:.1f} GFLOP/s"] for each in rates.products]
    rows += [[f"sums of {each.size / 2**20:.0f} MiB", f"{each.bandwidth / 1e9:.2f} GB/s"] for each in rates.sums]
    rows.append(["a small operator", f"{rates.launch * 1e6:.1f} us"])
    return [
        *table(found),
        *format_table(["of each rank, when all are at work", ""], rows),
        f"{cluster.nodes} x {cluster.per_node} ranks, {len(cluster.fits)} fits",
    ]

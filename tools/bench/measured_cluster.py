"""From measured times to what `tools.plan` knows of a cluster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensor3d import CubeShape
from tensor3d.planning.cluster import Cluster, Fit, Link
from tensor3d.traffic import Kind
from tools.bench.collecting import Series
from tools.bench.fitting import Line, fit_line
from tools.bench.rates import Rates

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


def pooled(found: Sequence[SeriesFigures]) -> list[Fit]:
    """One fit for each kind, number of members and stride, through the times of all groups that have them."""
    points: dict[tuple[int, int, Kind], list[PointFigures]] = {}
    for each in found:
        points.setdefault((each.series.members, each.series.stride, each.series.kind), []).extend(each.points)
    fits = []
    for (members, stride, kind), mine in sorted(points.items()):
        line = _line(mine)
        fits.append(
            Fit(
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

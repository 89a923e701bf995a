"""The collectives along each axis of a cube: whether they are right, how fast they are, and where they are slow.

What is measured is what `bench collectives` measures, of fewer kinds and sizes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.distributed.comm_stats import Kind
from tensor3d.distributed.cube_shape import AXES, AxisName
from tools.doctor.collective_timing import CollectingTrial, Series, points_of
from tools.doctor.rules import numbers

# --- How fast a rank is: a fixed product, while all other ranks compute the same --------------------------------------

_TURNS = 4


def product_seconds(device: torch.device, seconds: float, together: Callable[[], None]) -> float:
    """Seconds of one product of square matrices: the best of some turns, of which each is a median. A rank that once
    waits for a core is not slow; one that always does is.

    Args:
        seconds: of all turns together.
        together: waits until all ranks have come there.
    """
    cuda = device.type == "cuda"
    n = 4096 if cuda else 384
    a, b = (torch.ones(n, n, device=device) for _ in range(2))

    def once() -> float:
        before = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - before

    def turn() -> float:
        together()
        until, taken = time.perf_counter() + seconds / _TURNS, list[float]()
        while not taken or time.perf_counter() < until:
            taken.append(once())
        return statistics.median(taken)

    once()  # which also makes what the library needs
    return min(turn() for _ in range(_TURNS))


# --- The collectives along each axis of a cube ------------------------------------------------------------------------

HEADER = ("axis", "members", "crosses nodes", "kind", "latency us", "MB/s", "slowest ranks")
_SLOWER = 2.0
"""Times by which an axis must be slower than another one to be pointed out."""


@dataclass(frozen=True, kw_only=True)
class TimingBudget:
    """How much is measured."""

    sizes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    """Bytes that a rank receives, ascending."""
    rounds: int = 7
    """Medians are taken over them."""
    calls: int = 5
    """In a round, one right after another."""
    product_seconds: float = 0.5
    """That every rank computes."""
    trips: int = 9
    """Round trips to each node for its clock."""
    seconds: float = 60.0
    """For all rounds, about: on slow wires there are fewer calls."""

    @classmethod
    def quick(cls) -> TimingBudget:
        return cls(sizes=(1 << 10, 1 << 18), rounds=3, calls=3, product_seconds=0.1, trips=3, seconds=6.0)

    def within(self, once: float) -> TimingBudget:
        """As much of it as there is time for.

        Args:
            once: seconds of one call of everything.
        """
        calls = min(self.calls, max(1, int(self.seconds / (self.rounds * once))))
        rounds = min(self.rounds, max(1, int(self.seconds / (calls * once))))
        return dataclasses.replace(self, calls=calls, rounds=rounds)


def series_for(shape: CubeShape) -> list[Series]:
    """Gathers and scatters along each axis, and over all of them together."""
    axes: list[tuple[AxisName, ...]] = [(axis,) for axis in AXES if shape.size(axis) > 1]
    if len(axes) > 1:
        axes.append(tuple(axis for axis in AXES if shape.size(axis) > 1))
    kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter")
    found = []
    for along in axes:
        ranks = shape.members(along, 0)
        found += [Series(axes=along, kind=kind, members=len(ranks), stride=ranks[1] - ranks[0]) for kind in kinds]
    return found


class CollectiveChecks(CollectingTrial):
    """The collectives of one rank."""

    def __init__(self, cube: Cube, effort: TimingBudget) -> None:
        super().__init__(cube, effort.sizes, series_for(cube.shape))
        self._effort = effort

    def measure(self, note: Callable[[str], None]) -> list[float]:
        """Seconds of a call of each point: medians over the rounds.

        Args:
            note: called with what this rank begins to do.
        """
        note("timing collectives")
        effort = self._effort.within(self._slowest(sum(self.turn([1] * len(self.points)))))
        rounds = []
        for number in range(effort.rounds):
            note(f"timing collectives, round {number + 1}")
            rounds.append(self.turn([effort.calls] * len(self.points)))
        return [statistics.median(seconds) for seconds in zip(*rounds, strict=True)]

    def _slowest(self, seconds: float) -> float:
        """Of all ranks, which then measure alike."""
        slowest = torch.tensor(seconds, device=self._cube.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


@dataclass(frozen=True, kw_only=True)
class WireFigures:
    """One kind of collective along one axis, in the slowest of its groups: the others wait for it."""

    axis: str
    kind: Kind
    members: int
    crosses: bool
    """Whether any of its groups has ranks on several nodes."""
    groups: int
    latency: float
    """Seconds of a call at the smallest size."""
    bandwidth: float
    """Bytes received by a rank in a second, at the largest size."""
    slowest: tuple[int, ...]
    """Ranks of that group."""
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    """At each size, of that group."""

    def row(self) -> list[str]:
        """What the table shows, under `HEADER`."""
        return [
            self.axis,
            str(self.members),
            "yes" if self.crosses else "no",
            self.kind,
            f"{self.latency * 1e6:,.0f}",
            f"{self.bandwidth / 1e6:,.1f}",
            numbers(self.slowest) if self.groups > 1 else "one group",
        ]


def figures(
    shape: CubeShape, per_node: int, sizes: Sequence[int], seconds: Sequence[Sequence[float]]
) -> list[WireFigures]:
    """Of every axis and kind.

    Args:
        shape: of the cube, with its wire.
        sizes: of `TimingBudget`.
        seconds: by rank and point.
    """
    found, series = [], series_for(shape)
    points = points_of(shape, sizes, series)
    for each in series:
        own = [i for i, point in enumerate(points) if point.series == each]
        # The members of a group end together; what differs among them is where they were in the queue for a core.
        by_group = {
            ranks: [statistics.median(seconds[rank][i] for rank in ranks) for i in own]
            for ranks in shape.groups(each.axes)
        }
        slowest = max(by_group, key=lambda ranks: by_group[ranks][-1])
        bytes_of = [points[i].size for i in own]
        times = by_group[slowest]
        found.append(
            WireFigures(
                axis=each.name,
                kind=each.kind,
                members=each.members,
                crosses=any(len({rank // per_node for rank in ranks}) > 1 for ranks in by_group),
                groups=len(by_group),
                latency=times[0],
                bandwidth=bytes_of[-1] / times[-1],
                slowest=slowest,
                sizes=tuple(bytes_of),
                seconds=tuple(times),
            )
        )
    return found


def slowest_axis(shape: CubeShape, per_node: int, found: Sequence[WireFigures]) -> str:
    """A sentence on the slowest axis, and what to do where something can be done; empty where none stands out."""
    gathers = [each for each in found if each.kind == "all-gather" and each.axis in AXES]
    if len(gathers) < 2:
        return ""
    slow, fast = min(gathers, key=lambda each: each.bandwidth), max(gathers, key=lambda each: each.bandwidth)
    ratio = fast.bandwidth / slow.bandwidth
    if ratio < _SLOWER:
        return ""
    told = f"axis {slow.axis} is {ratio:.0f} x slower than {fast.axis}"
    if not slow.crosses or fast.crosses:
        return f"{told}."
    placed = shape.placed(per_node)
    axis = next(axis for axis in AXES if axis == slow.axis)
    moved = placed.wire != shape.wire and placed.neighbours(per_node)[axis] == placed.size(axis)
    return f"{told}; it crosses nodes" + (f": place it inside (--wire {','.join(placed.wire)})." if moved else ".")


def as_json(found: Sequence[WireFigures]) -> list[dict[str, object]]:
    return [dataclasses.asdict(each) for each in found]

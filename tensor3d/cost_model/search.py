"""Every box of a cluster's ranks, every placement of its axes on nodes, and what is best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.step_cost import Memory, PlannedModel, Recompute, StepCost, StepOptions
from tensor3d.cost_model.step_time import Overlap, StepTime, step_time
from tensor3d.distributed.cube_shape import AXES, AxisName, CubeShape

_DEAREST_LAST: tuple[tuple[Recompute, bool], ...] = (
    ("none", True),
    ("none", False),
    ("attention", False),
    ("layer", False),
)
"""What is recomputed and whether gathers are kept, the fastest first: each takes less memory than the one before."""


@dataclass(frozen=True, kw_only=True)
class BoxPlan:
    """A box with the best of its placements and choices."""

    cost: StepCost
    """Its shape's `wire` is the placement."""
    time: StepTime

    @property
    def shape(self) -> CubeShape:
        return self.cost.wire.shape

    @property
    def choice(self) -> StepOptions:
        return self.cost.choice

    @property
    def tokens_per_second(self) -> float:
        return self.cost.tokens / self.time.total


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A box that cannot be, and why."""

    shape: CubeShape
    reason: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was found, the fastest plan first."""

    plans: tuple[BoxPlan, ...]
    refused: tuple[Refused, ...]


def boxes(ranks: int) -> Iterator[CubeShape]:
    """All (data, x, y, z) with that product."""
    for data in _divisors(ranks):
        for x in _divisors(ranks // data):
            for y in _divisors(ranks // (data * x)):
                yield CubeShape(data=data, x=x, y=y, z=ranks // (data * x * y))


def placements(shape: CubeShape, cluster: Cluster) -> list[CubeShape]:
    """The box with its axes dealt to ranks in every way that makes a difference, the usual one first.

    Two ways are the same if each axis has as many neighbours on a node in both.
    """
    used: list[AxisName] = [axis for axis in AXES if shape.size(axis) > 1]
    unused: list[AxisName] = [axis for axis in AXES if shape.size(axis) == 1]
    found: dict[tuple[int, ...], CubeShape] = {}
    for order in permutations(used):
        placed = replace(shape, wire=(*unused, *order))
        found.setdefault(tuple(cluster.neighbours(placed).values()), placed)
    usual = [axis for axis in AXES if axis in used]
    return sorted(found.values(), key=lambda each: list(each.wire[len(unused) :]) != usual)


def search(
    model: PlannedModel,
    cluster: Cluster,
    kind: str,
    *,
    overlap: Overlap = "products",
    memory_share: float = 0.9,
    shapes: Sequence[CubeShape] | None = None,
    choices: Sequence[tuple[Recompute, bool]] = _DEAREST_LAST,
) -> Search:
    """The best plan of every box that holds the model.

    Of the micro-batches that fit, the largest is taken: weights travel once for each of them. What is recomputed and
    whether gathers are kept are tried from the fastest on; those that fit are compared, but nothing is recomputed where
    memory suffices without.

    Args:
        kind: type of the products: "fp32", "bf16" or "fp16".
        memory_share: of the cluster's memory that tensors may take; libraries and fragments take the rest.
        shapes: boxes to look at. Default: all of the cluster's ranks.

    Raises:
        ValueError: a share outside of (0, 1], a type or an overlap that there is not.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share must be above 0 and at most 1. Got {memory_share}.")
    limit = memory_share * cluster.memory
    plans, refused = [], []
    for shape in boxes(cluster.ranks) if shapes is None else shapes:
        reason = model.refuse(shape)
        found = [] if reason is not None else list(_fitting(model, shape, limit, choices))
        if reason is None and not found:
            least = _least(model, shape, choices)
            reason = f"needs {least.peak / 1e9:,.3g} GB on a rank, and there are {limit / 1e9:,.3g} GB"
        if reason is not None:
            refused.append(Refused(shape=shape, reason=reason))
            continue
        # As ranks usually lie; then the best of these in every other way.
        costs = [model.cost(shape, choice) for choice in found]
        cost = min(costs, key=lambda each: _seconds(step_time(each, cluster, kind, overlap)))
        ways = [(way, step_time(cost, cluster, kind, overlap, placed=way)) for way in placements(shape, cluster)]
        way, time = min(ways, key=lambda each: _seconds(each[1]))
        plans.append(BoxPlan(cost=replace(cost, wire=replace(cost.wire, shape=way)), time=time))
    return Search(plans=tuple(sorted(plans, key=lambda plan: _seconds(plan.time))), refused=tuple(refused))


def _seconds(time: StepTime) -> tuple[float, float]:
    """Of those that wait for the host alike, the one that leaves the device the least to do comes first."""
    return time.total, time.total - time.starting


def _fitting(
    model: PlannedModel, shape: CubeShape, limit: float, choices: Sequence[tuple[Recompute, bool]]
) -> Iterator[StepOptions]:
    """For each way to spend memory the fewest micro-batches that fit; recomputation where nothing else does."""
    numbers, fits_so_far = model.micro_batches(shape), False
    for recompute, keep_gathered in choices:
        if recompute != "none" and fits_so_far:
            return

        def fits(number: int, how: tuple[Recompute, bool] = (recompute, keep_gathered)) -> bool:
            choice = StepOptions(micro_batches=number, recompute=how[0], keep_gathered=how[1])
            return model.memory(shape, choice).peak <= limit

        # The second micro-batch also keeps the first one's gradients; further ones only make each smaller.
        if fits(numbers[0]):
            low = high = 0
        elif len(numbers) > 1 and fits(numbers[-1]):
            low, high = 1, len(numbers) - 1
        else:
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(numbers[middle]) else (middle + 1, high)
        fits_so_far = True
        yield StepOptions(micro_batches=numbers[low], recompute=recompute, keep_gathered=keep_gathered)


def _least(model: PlannedModel, shape: CubeShape, choices: Sequence[tuple[Recompute, bool]]) -> Memory:
    number = model.micro_batches(shape)[-1]
    every = [StepOptions(micro_batches=number, recompute=how, keep_gathered=kept) for how, kept in choices]
    return min((model.memory(shape, choice) for choice in every), key=lambda memory: memory.peak)


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]

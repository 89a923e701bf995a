"""Every box of a cluster's ranks, every placement of its axes on nodes, and what is best of them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.step_cost import Memory, PlannedModel, Recompute, StepCost, StepOptions
from tensor3d.cost_model.step_time import Overlap, StepTime, UnplacedStep, Wires
from tensor3d.distributed.cube_shape import AXES, AxisName, CubeShape

_DEAREST_LAST: tuple[tuple[Recompute, bool], ...] = (
    ("none", False),
    ("none", True),
    ("attention", False),
    ("attention", True),
    ("layer", False),
    ("layer", True),
)
"""What is recomputed and whether operands are gathered again, the fastest first, of as many micro-batches: of each kind
of recomputation the second takes less memory."""
_MIB = 2**20
"""Budgets for operands that stay are whole MiB, as recipes have them."""


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


CountMemory = Callable[[CubeShape, StepOptions], Memory]
"""Counts what a step needs, by running it in some way."""


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
    count: CountMemory | None = None,
    most: int = 5,
) -> Search:
    """The best plan of every box that holds the model.

    Of the micro-batches that fit, the largest is taken: weights travel once for each of them. What is recomputed and
    whether operands are gathered again are compared, in every placement: to compute layers again may take less time
    than to gather weights for more micro-batches. Where not all gathered operands can stay for backward, as many do as
    fit (the largest `StepOptions.keep_budget`), also with more micro-batches than there must be, if that is faster.

    Args:
        kind: type of the products: "fp32", "bf16" or "fp16".
        memory_share: of the cluster's memory that tensors may take; libraries and fragments take the rest.
        shapes: boxes to look at. Default: all of the cluster's ranks.
        count: counts the memory of a step, which takes its time. Without one, a formula's lower bound decides what
            fits; with it, `most` plans are those that fit by count, and come first.

    Raises:
        ValueError: a share outside of (0, 1], a type or an overlap that there is not.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share must be above 0 and at most 1. Got {memory_share}.")
    limit = memory_share * cluster.memory
    plans, refused = list[tuple[BoxPlan, _Box]](), list[Refused]()
    for shape in boxes(cluster.ranks) if shapes is None else shapes:
        box = _Box(model, shape, cluster, kind, overlap, limit, choices)
        found = _best_of_box(box)
        if isinstance(found, Refused):
            refused.append(found)
        else:
            plans.append((found, box))
    plans.sort(key=lambda each: _seconds(each[0].time))
    if count is not None:
        return _counted(plans, refused, count, most)
    return Search(plans=tuple(plan for plan, _ in plans), refused=tuple(refused))


@dataclass(frozen=True)
class _Box:
    """What the plan of a box follows from."""

    model: PlannedModel
    shape: CubeShape
    cluster: Cluster
    kind: str
    overlap: Overlap
    limit: float
    choices: Sequence[tuple[Recompute, bool]]
    shares: dict[tuple[Recompute, bool], float] = field(default_factory=dict)
    """By what is recomputed and kept: the share of the memory beside weights and the optimiser's state that the formula
    may fill, where a count has shown how much more there is than it knows of. Others take the newest."""
    beyond: dict[tuple[Recompute, int], int] = field(default_factory=dict)
    """By what is recomputed and the micro-batches: bytes that a count has found beyond the formula's. A budget is told
    exactly, and what the formula does not know of is there without one, too."""

    @cached_property
    def ways(self) -> list[Wires]:
        """All placements of its axes, the usual one first."""
        return [Wires(self.cluster, shape) for shape in placements(self.shape, self.cluster)]

    def fits(self, choice: StepOptions) -> bool:
        memory = self.model.memory(self.shape, choice)
        beyond = self.beyond.get((choice.recompute, choice.micro_batches))
        if choice.keep_budget and beyond is not None:
            return memory.peak + beyond <= self.limit
        newest = next(reversed(self.shares.values()), 1.0)
        share = self.shares.get((choice.recompute, choice.reshard_after_forward), newest)
        at_rest = memory.at_rest
        return memory.peak <= self.limit and memory.peak - at_rest <= share * (self.limit - at_rest)

    def learn(self, choice: StepOptions, counted: Memory) -> None:
        """From a count that is above the limit: afterwards that choice does not fit, nor any that needs as much."""
        memory = self.model.memory(self.shape, choice)
        if choice.keep_budget:
            self.beyond[choice.recompute, choice.micro_batches] = counted.peak - memory.peak
            return
        at_rest = memory.at_rest
        self.shares.pop((choice.recompute, choice.reshard_after_forward), None)
        self.shares[choice.recompute, choice.reshard_after_forward] = (memory.peak - at_rest) / (counted.peak - at_rest)


def _best_of_box(box: _Box, counted: Memory | None = None) -> BoxPlan | Refused:
    """The fastest of the choices that fit, in the best placement.

    Args:
        counted: the least that a choice was counted to need, if any was.
    """
    reason = box.model.refuse(box.shape)
    found = [] if reason is not None else list(_fitting(box))
    if reason is None and not found:
        least = counted or _least(box)
        told = "needs" if least.counted else "needs more than"
        reason = f"{told} {least.peak / 1e9:,.3g} GB on a rank, and there are {box.limit / 1e9:,.3g} GB"
    if reason is not None:
        return Refused(shape=box.shape, reason=reason)
    plan = _fastest(box, found)
    # A larger budget spares more bytes, but perhaps of a kind that products hide. Of more micro-batches than the
    # fastest has no smaller budget is better.
    alike = [each for each in found if each.recompute == plan.choice.recompute]
    rivals = [each for each in alike if each.micro_batches <= plan.choice.micro_batches]
    less = [_fastest(box, [smaller]) for each in rivals for smaller in _with_less(box, each)]
    return min([plan, *less], key=lambda each: _seconds(each.time))


def _fastest(box: _Box, choices: Sequence[StepOptions]) -> BoxPlan:
    """Of these choices, in all placements."""
    ways, best = box.ways, list[tuple[StepTime, StepCost, CubeShape]]()
    steps = [
        UnplacedStep.of(box.model.cost(box.shape, choice), box.cluster, box.kind, box.overlap) for choice in choices
    ]
    usual = [(step, step.on(ways[0])) for step in steps]
    for step, time in sorted(usual, key=lambda each: _seconds(each[1])):
        if best and step.least >= best[0][0].total:  # however its axes are placed
            continue
        placed = [(each, step.cost, way.shape) for way, each in zip(ways, (time, *map(step.on, ways[1:])), strict=True)]
        best = [min([*best, *placed], key=lambda each: _seconds(each[0]))]
    ((time, cost, way),) = best
    return BoxPlan(cost=replace(cost, wire=replace(cost.wire, shape=way)), time=time)


def _counted(plans: Sequence[tuple[BoxPlan, _Box]], refused: list[Refused], count: CountMemory, most: int) -> Search:
    """The fastest plans that fit by count, then the others, which no count has looked at.

    A plan that does not fit makes room for its box's next best one, which is counted when its turn comes.
    """
    waiting, accepted, lowest = list(plans), list[BoxPlan](), dict[CubeShape, Memory]()
    while waiting and len(accepted) < most:
        plan, box = waiting.pop(0)
        choice, how = plan.choice, (plan.choice.recompute, plan.choice.micro_batches)
        # The formula always leaves too much room for a budget; how much, a count without one tells.
        first = bool(choice.keep_budget) and how not in box.beyond
        choice = replace(choice, keep_budget=0) if first else choice
        memory = count(plan.shape, choice)
        if first:
            box.beyond[how] = memory.peak - box.model.memory(box.shape, choice).peak
        elif memory.peak <= box.limit:
            accepted.append(replace(plan, cost=replace(plan.cost, memory=memory)))
            continue
        if memory.peak > box.limit:
            lowest[box.shape] = min(memory, lowest.get(box.shape, memory), key=lambda each: each.peak)
            box.learn(choice, memory)
        other = _best_of_box(box, lowest.get(box.shape))
        if isinstance(other, Refused):
            refused.append(other)
        else:
            insort(waiting, (other, box), key=lambda each: _seconds(each[0].time))
    return Search(plans=(*accepted, *(plan for plan, _ in waiting)), refused=tuple(refused))


def _seconds(time: StepTime) -> tuple[float, float]:
    """Of those that wait for the host alike, the one that leaves the device the least to do comes first."""
    return time.total, time.total - time.starting


def _fitting(box: _Box) -> Iterator[StepOptions]:
    """For each way to spend memory the fewest micro-batches that fit, and budgets for a part of what could be kept."""
    numbers, found = box.model.micro_batches(box.shape), dict[tuple[Recompute, bool], int]()
    for recompute, reshard in box.choices:
        if recompute != "none" and found.get(("none", False)) == 0:  # all that could be won is
            break
        plain = StepOptions(recompute=recompute, reshard_after_forward=reshard)
        fewest = _fewest(box, numbers, plain)
        if fewest is not None:
            found[recompute, reshard] = fewest
            yield replace(plain, micro_batches=numbers[fewest])
    for (recompute, reshard), fewest in found.items():
        if reshard and recompute != "layer":
            # Where all of it can stay, no budget is needed. All numbers up to there: were it some from the fewest on,
            # more memory, for which fewer do, could leave out the best.
            for number in numbers[fewest : found.get((recompute, False))]:
                yield from _with_budget(box, StepOptions(micro_batches=number, recompute=recompute))


def _fewest(box: _Box, numbers: Sequence[int], plain: StepOptions) -> int | None:
    """The place of the fewest micro-batches that fit."""

    def fits(place: int) -> bool:
        return box.fits(replace(plain, micro_batches=numbers[place]))

    # The second micro-batch also keeps the first one's gradients; further ones only make each smaller.
    if fits(0):
        return 0
    if len(numbers) == 1 or not fits(len(numbers) - 1):
        return None
    low, high = 1, len(numbers) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _with_budget(box: _Box, plain: StepOptions) -> Iterator[StepOptions]:
    """The choice with the largest budget that fits, if there is one."""
    largest = _largest_budget(box, plain, 0, -(-box.model.keepable(box.shape, plain) // _MIB))
    if largest:
        yield replace(plain, keep_budget=largest * _MIB)


def _with_less(box: _Box, choice: StepOptions) -> Iterator[StepOptions]:
    """A choice with a budget, with smaller ones that may be faster (`PlannedModel.smaller_budgets`)."""
    for each in box.model.smaller_budgets(box.shape, choice) if choice.keep_budget else ():
        lowest = each.start // _MIB
        less = _largest_budget(box, choice, lowest, (each.stop - 1) // _MIB)
        if less > lowest:
            yield replace(choice, keep_budget=less * _MIB)


def _largest_budget(box: _Box, choice: StepOptions, low: int, high: int) -> int:
    """Of those between two that fit, in MiB; the low one is taken to fit."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if box.fits(replace(choice, keep_budget=middle * _MIB)) else (low, middle - 1)
    return low


def _least(box: _Box) -> Memory:
    number = box.model.micro_batches(box.shape)[-1]
    every = [
        StepOptions(micro_batches=number, recompute=how, reshard_after_forward=reshard) for how, reshard in box.choices
    ]
    return min((box.model.memory(box.shape, choice) for choice in every), key=lambda memory: memory.peak)


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]

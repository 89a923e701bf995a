"""Seconds of a training step on a cluster: computing, touching memory, starting operators, and the wire that shows.

A model of a rank, not of every event: collectives on different axes do not run at the same time, and what can be hidden
is hidden under the products alone.

    "none"      every collective is waited for where it is issued, as with `ExecutionPolicy(overlap=False)`
    "products"  A' of the backward pass comes under the product for dA, dA leaves under that for dW, dW under all that
                follows
    "prefetch"  W' comes under the products before it, too, as sharding/matmul.py does it from its second step on

`"products"` is the cautious default: it is what the first step does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tensor3d.cost_model.comm_volume import Bytes
from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.step_cost import Product, StepCost
from tensor3d.distributed.comm_stats import Key
from tensor3d.distributed.cube_shape import AXES, AxisName, CubeShape

Overlap = Literal["none", "products", "prefetch"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, in parts that add up."""

    products: float
    attention: float
    touching: float
    """Memory-bound operators."""
    starting: float
    """What the host needs to start operators: all of it where it does the work too, else what the device waits for."""
    exposed: float
    """Of the wire: what nothing hides."""
    hidden: float
    """Of the wire, under products: no part of the sum."""
    by_axis: dict[str, float]
    """All of the wire, hidden or not."""
    waits_for_host: bool = False
    """Whether the device does: then the step takes what starting operators takes, and nothing else shortens it."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.touching + self.starting + self.exposed

    @property
    def computing(self) -> float:
        """Without the wire; of a device that waits for its host all of it."""
        return self.total if self.waits_for_host else self.total - self.exposed

    @property
    def limit(self) -> str:
        """What takes most of the time, in words."""
        if self.waits_for_host:
            return "starting operators"
        parts = {
            "matrix products": self.products + self.attention,
            "memory bandwidth": self.touching,
            "starting operators": self.starting,
        }
        busiest = max(self.by_axis, key=self.by_axis.__getitem__, default=None)
        if busiest is not None:
            parts[f"the wire, most of it over {busiest}"] = self.exposed
        return max(parts, key=parts.__getitem__)


def step_time(cost: StepCost, cluster: Cluster, kind: str, overlap: Overlap = "products") -> StepTime:
    """
    Args:
        cost: its shape's `wire` says which axes lie inside a node.
        kind: type of the products: "fp32", "bf16" or "fp16"; of those that are in FP8 what they read and give.

    Raises:
        ValueError: an overlap or a type that there is not, or a box with other ranks than the cluster's.
    """
    return UnplacedStep.of(cost, cluster, kind, overlap).on(Wires(cluster, cost.wire.shape))


@dataclass(frozen=True, kw_only=True)
class UnplacedStep:
    """What of a step's time is the same wherever its axes lie: a planner asks for it in every placement."""

    cost: StepCost
    cluster: Cluster
    overlap: Overlap
    passes: Sequence[_Passes]
    """Of each product."""
    products: float
    attention: float
    touching: float
    """Seconds, as of `StepTime`."""
    starting: float
    """Seconds of the host, whether the device waits for them or not."""

    @classmethod
    def of(cls, cost: StepCost, cluster: Cluster, kind: str, overlap: Overlap = "products") -> UnplacedStep:
        """Args, Raises: see `step_time`; the shape's `wire` plays no part."""
        if overlap not in OVERLAPS:
            raise ValueError(f"overlap must be one of {', '.join(OVERLAPS)}. Got {overlap!r}.")
        shape, rate, micro_batches = cost.wire.shape, cluster.rate(kind), cost.choice.micro_batches
        if shape.ranks != cluster.ranks:
            raise ValueError(f"{cluster.name} has {cluster.ranks:,} ranks, and {shape} needs {shape.ranks:,}.")
        passes = [_Passes.of(product, shape, cluster, kind) for product in cost.products]
        computing = sum(
            product.times * (each.forward + each.input_grad + each.weight_grad)
            for product, each in zip(cost.products, passes, strict=True)
        )
        operators = micro_batches * cost.operators + cost.once_operators
        if cluster.overlaps:  # elsewhere the time of a collective holds what it takes to start it
            operators += micro_batches * sum(cost.micro_calls.values()) + sum(cost.once_calls.values())
        return cls(
            cost=cost,
            cluster=cluster,
            overlap=overlap,
            passes=passes,
            products=micro_batches * computing,
            attention=micro_batches * cost.attention_flops / rate,
            touching=(micro_batches * cost.touched + cost.once_touched) / cluster.memory_bandwidth,
            starting=operators * cluster.launch,
        )

    @property
    def least(self) -> float:
        """Seconds that the step takes at least, wherever its axes lie."""
        computing = self.products + self.attention + self.touching
        return max(computing, self.starting) if self.cluster.overlaps else computing + self.starting

    def on(self, wires: Wires) -> StepTime:
        """With its axes there."""
        cost, micro_batches, overlaps = self.cost, self.cost.choice.micro_batches, self.cluster.overlaps
        micro, once = wires.seconds(cost.micro, cost.micro_calls), wires.seconds(cost.once, cost.once_calls)
        hidden = _hidden(cost, wires, micro, self.passes, self.overlap) if overlaps else 0.0
        by_axis: dict[str, float] = {}
        for number, seconds in ((micro_batches, micro), (1, once)):
            for (axis, _), each in seconds.items():
                by_axis[axis] = by_axis.get(axis, 0.0) + number * each
        exposed = micro_batches * (sum(micro.values()) - hidden) + sum(once.values())
        busy = self.products + self.attention + self.touching + exposed
        return StepTime(
            products=self.products,
            attention=self.attention,
            touching=self.touching,
            starting=max(0.0, self.starting - busy) if overlaps else self.starting,
            exposed=exposed,
            hidden=micro_batches * hidden,
            by_axis=by_axis,
            waits_for_host=overlaps and self.starting > busy,
        )


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Seconds of a product, once."""

    forward: float
    """With what backward computes again."""
    input_grad: float
    weight_grad: float

    @classmethod
    def of(cls, product: Product, shape: CubeShape, cluster: Cluster, kind: str) -> _Passes:
        """Of a scale for each row of dC' there is no product for dW (sharding/matmul.py)."""
        flops = product.flops(shape)
        plain = flops / cluster.rate(kind)
        one = plain if product.fp8 is None else flops / cluster.rate("fp8")
        return cls(
            forward=(1 + product.repeated) * one,
            input_grad=one,
            weight_grad=plain if product.fp8 == "rowwise" else one,
        )


class Wires:
    """What collectives cost on a placement of a box."""

    def __init__(self, cluster: Cluster, shape: CubeShape) -> None:
        self.shape = shape
        """Its `wire` is the placement."""
        self._cluster = cluster
        self._known: dict[Key, tuple[float, float]] = {}

    def seconds(self, received: Bytes, calls: Bytes) -> dict[Key, float]:
        """Of all collectives of each axis and kind."""
        found: dict[Key, float] = {}
        for key, number in calls.items():
            latency, a_byte = self._known.get(key) or self._of(key)
            found[key] = number * latency + received[key] * a_byte
        return found

    def once(self, received: Bytes) -> float:
        """Of the one collective that `received` is of; 0 where there is none."""
        for key, count in received.items():
            latency, a_byte = self._known.get(key) or self._of(key)
            return latency + count * a_byte
        return 0.0

    def _of(self, key: Key) -> tuple[float, float]:
        axes: tuple[AxisName, ...] = tuple(axis for axis in AXES if axis in key[0].split("+"))
        self._known[key] = self._cluster.collective(self.shape, axes, key[1])
        return self._known[key]


def _hidden(
    cost: StepCost, wires: Wires, micro: Mapping[Key, float], passes: Sequence[_Passes], overlap: Overlap
) -> float:
    """Seconds of the wire in a micro-batch that are under products.

    Args:
        micro: seconds of all collectives of the micro-batch. Products are told one by one, and those whose weights
            travel together wait once for all: so no more is hidden over x than there is.
    """
    if overlap == "none":
        return 0.0
    hidden = late = early = sums = room_forward = room_backward = 0.0
    for product, each, computing in zip(cost.products, cost.collectives, passes, strict=True):
        again = 0.0 if product.kept in (True, "input") else min(wires.once(each.gather_a), computing.input_grad)
        leaving = min(wires.once(each.scatter_da), computing.weight_grad)
        gathering = 0.0 if overlap == "products" else wires.once(each.gather_w)
        hidden += product.times * (again + leaving)
        early += product.times * (1 + product.repeated) * gathering
        late += product.times * (0.0 if product.kept in (True, "weight") else gathering)
        sums += product.times * wires.once(each.scatter_dw)
        room_forward += product.times * computing.forward
        room_backward += product.times * (computing.input_grad + computing.weight_grad - again - leaving)
    sums = min(sums, micro.get(("x", "reduce-scatter"), 0.0))
    whole = micro.get(("x", "all-gather"), 0.0) / (early + late) if early + late else 1.0
    early, late = (min(1.0, whole) * gathers for gathers in (early, late))
    return hidden + min(early, room_forward) + min(late + sums, room_backward)

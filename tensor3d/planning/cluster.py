"""Computers and their links as few numbers: what a planner knows of the machines it plans for."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor3d.shape import AxisName, CubeShape
from tensor3d.traffic import Kind

_SLOWEST, _NARROWEST = 60.0, 1e-6  # seconds of latency, bytes/s: beyond that it is a slip of the finger


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank sends through. A ring of n members takes n - 1 steps."""

    latency: float
    """Seconds of one step of a ring, however little it carries."""
    bandwidth: float
    """Bytes/s that one rank receives."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A measured collective: seconds = latency + bytes received by a rank * seconds_per_byte."""

    kind: Kind
    members: int
    stride: int
    """Ranks from one member of the group to the next."""
    latency: float
    seconds_per_byte: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal ranks (GPUs, or processes of a CPU).

    Raises:
        ValueError: a number that is not finite and above 0, a latency above a minute, no bandwidth.
    """

    name: str
    nodes: int
    per_node: int
    """Ranks on a node."""
    flops: Mapping[str, float]
    """FLOP/s of a rank at its peak, by compute type: "fp32", "bf16", "fp16"."""
    memory: float
    """Bytes of a rank."""
    memory_bandwidth: float
    """Bytes/s of a rank's memory."""
    inside: Link
    """Between ranks of a node."""
    across: Link
    """Between nodes, for each rank of a node when all of them use it: where fewer do, each gets more."""
    efficiency: float = 0.6
    """Share of the peak that large matrix products reach."""
    launch: float = 5e-6
    """Seconds of one operator at least: what the host needs to start it."""
    overlaps: bool = True
    """Whether host, device and wire work at the same time: not where the same cores do it all."""
    fits: tuple[Fit, ...] = ()
    """Measured collectives. They stand in for `inside` and `across` where members, stride and kind are the same."""

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"a cluster's {name} must be a whole number of at least 1. Got {value!r}.")
        numbers = {f"flops of {kind}": value for kind, value in self.flops.items()}
        numbers |= {name: getattr(self, name) for name in ("memory", "memory_bandwidth", "efficiency", "launch")}
        for name, link in (("inside", self.inside), ("across", self.across)):
            numbers |= {f"latency {name}": link.latency, f"bandwidth {name}": link.bandwidth}
        for name, value in numbers.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"a cluster's {name} must be a number above 0. Got {value!r}.")
        for name, link in (("inside", self.inside), ("across", self.across)):
            if link.latency > _SLOWEST:
                raise ValueError(f"a cluster's latency {name} is in seconds, at most {_SLOWEST}. Got {link.latency}.")
            if link.bandwidth < _NARROWEST:
                raise ValueError(f"a cluster's bandwidth {name} is in bytes/s. Got {link.bandwidth}.")
        if not self.flops:
            raise ValueError('a cluster needs the FLOP/s of at least one type, such as {"bf16": 312e12}. Got none.')
        if self.efficiency > 1:
            raise ValueError(f"a cluster's efficiency must be at most 1. Got {self.efficiency}.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def rate(self, kind: str) -> float:
        """FLOP/s that matrix products of that type reach on a rank.

        Raises:
            ValueError: a type of which the cluster knows no peak.
        """
        if kind not in self.flops:
            raise ValueError(f"{self.name} knows the FLOP/s of {', '.join(self.flops)}. Got {kind!r}.")
        return self.flops[kind] * self.efficiency

    def collective(self, shape: CubeShape, axes: tuple[AxisName, ...], kind: Kind) -> tuple[float, float]:
        """(seconds of one collective over the axes, seconds for each byte that a rank receives in it).

        All groups along the axes work at the same time. A group that crosses nodes is a ring that enters and leaves
        each node once: with m members on a node, per_node/m rings share the node's wires.
        """
        members, stride = _members(shape, axes)
        found = self._fitted(kind, members, stride)
        if found is not None:
            return found.latency, found.seconds_per_byte
        here = self.on_one_node(shape, axes)
        steps = 2 * math.ceil(math.log2(members)) if kind == "all-reduce" else members - 1
        if here >= members:
            return steps * self.inside.latency, 1 / self.inside.bandwidth
        bandwidth = min(self.inside.bandwidth if here > 1 else math.inf, self.across.bandwidth * here)
        return steps * self.across.latency, 1 / bandwidth

    def _fitted(self, kind: Kind, members: int, stride: int) -> Fit | None:
        fitting = [fit for fit in self.fits if fit.kind == kind and fit.members == members]
        return min(fitting, key=lambda fit: abs(fit.stride - stride), default=None)

    def on_one_node(self, shape: CubeShape, axes: tuple[AxisName, ...]) -> int:
        """Members of a group along the axes that share a node, in the group of which the fewest do."""
        together = self.neighbours(shape)
        return math.prod(together[axis] for axis in axes)

    def neighbours(self, shape: CubeShape) -> dict[AxisName, int]:
        """On each axis, how many consecutive ranks share a node wherever one looks."""
        return shape.neighbours(shape.ranks if self.nodes == 1 else self.per_node)

    def to_json(self) -> dict[str, Any]:
        """As `read_cluster` reads it."""
        return dataclasses.asdict(self)


def _members(shape: CubeShape, axes: tuple[AxisName, ...]) -> tuple[int, int]:
    """Size of a group over the axes, and the ranks from its first member to the second."""
    members, stride, inner = 1, 0, 1
    for axis in reversed(shape.wire):
        size = shape.size(axis)
        if axis in axes and size > 1:
            members *= size
            stride = stride or inner
        inner *= size
    return members, stride or 1


def read_cluster(path: Path) -> Cluster:
    """A cluster from a JSON file with the fields of `Cluster`, as `python -m tools.bench collectives` writes it.

    Raises:
        ValueError: no JSON, a field that is missing or unknown, a number that cannot be; with the file's name.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cluster = content.get("cluster", content) if isinstance(content, dict) else content
        known = {field.name for field in dataclasses.fields(Cluster)}
        if not isinstance(cluster, dict) or set(cluster) - known:
            raise ValueError(f"a cluster has the fields {', '.join(sorted(known))}. Got {_told(cluster)}.")
        links = {name: Link(**cluster[name]) for name in ("inside", "across")}
        return Cluster(**{**cluster, **links, "fits": tuple(Fit(**fit) for fit in cluster.get("fits", ()))})
    except (ValueError, TypeError, KeyError) as problem:
        told = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{path} is no cluster: {told}") from None


def _told(value: object) -> str:
    return ", ".join(sorted(value)) if isinstance(value, dict) else repr(value)[:80]

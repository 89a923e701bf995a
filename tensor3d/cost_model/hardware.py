"""Computers and their links as few numbers: what a planner knows of the machines it plans for."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensor3d.distributed.comm_stats import Kind
from tensor3d.distributed.cube_shape import AxisName, CubeShape
from tensor3d.files import WRONG_ENTRIES, read_file, unique_keys

_SLOWEST, _NARROWEST = 60.0, 1e-6  # seconds of latency, bytes/s: beyond that it is a slip of the finger


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank sends through. A ring of n members takes n - 1 steps."""

    latency: float
    """Seconds of one step of a ring, however little it carries."""
    bandwidth: float
    """Bytes/s that one rank receives."""


@dataclass(frozen=True, kw_only=True)
class LinkFit:
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
    """FLOP/s of a rank at its peak, by compute type: "fp32", "bf16", "fp16"; and of products in "fp8"."""
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
    fits: tuple[LinkFit, ...] = ()
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

    def _fitted(self, kind: Kind, members: int, stride: int) -> LinkFit | None:
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
        content = json.loads(read_file(path).decode("utf-8-sig"), object_pairs_hook=unique_keys)
        cluster = content.get("cluster", content) if isinstance(content, dict) else content
        known = {field.name for field in dataclasses.fields(Cluster)}
        if not isinstance(cluster, dict) or set(cluster) - known:
            raise ValueError(f"a cluster has the fields {', '.join(sorted(known))}. Got {_told(cluster)}.")
        links = {name: Link(**cluster[name]) for name in ("inside", "across")}
        return Cluster(**{**cluster, **links, "fits": tuple(LinkFit(**fit) for fit in cluster.get("fits", ()))})
    except (*WRONG_ENTRIES, RecursionError) as problem:
        told = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{path} is no cluster: {told}") from None


def _told(value: object) -> str:
    return ", ".join(sorted(value)) if isinstance(value, dict) else repr(value)[:80]


# --- GPUs and clusters under a name: the vendors' figures, for who plans before there is a machine to measure ---------
#
# A measured file (`tensor3d.cost_model.hardware.read_cluster`) beats every preset. What a preset holds, and from where:
#
# - Peaks of dense products, memory and its bandwidth: NVIDIA's data sheets of V100 (SXM2), A100 (SXM), H100 (SXM), H200
#   (SXM). V100 has no bf16. fp32 is the vector units' figure, without TF32, as torch multiplies by default. FP8, which
#   came with Hopper, is half of the sheets' 3,958 TFLOP/s, which are told with sparsity.
# - Memory in the sheets' decimal GB. The chips hold a few per cent more; context and NCCL's buffers live in that rest.
# - Inside a node: NVLink in one direction, all links of a GPU: 6, 12, 18 and 18 links of 25 GB/s (architecture white
#   papers of Volta, Ampere, Hopper).
# - Across nodes: the InfiniBand ports of NVIDIA's DGX of that generation, shared out to its GPUs: DGX-1 4 x 100 Gbit/s
#   for 8, DGX A100 8 x 200 for 8, DGX H100 and H200 8 x 400 for 8.
#
# Three numbers are in no data sheet:
#
# - A link carries `_CARRIED` of its peak as payload. Assumed: packet headers and NCCL's protocol take about a fifth.
# - One step of a ring takes 1.9 us over NVLink and 4.0 us over the network: what NCCL's tuner assumes for its LL128
#   protocol (`hwLat` in its src/graph/tuning.cc).
# - Products reach `_REACHED` of the peak: an H200 was measured at about 790 of 989 TFLOP/s (bf16, 8192^3). The others,
#   and FP8, are assumed to do as well. Its copies ran at 4.3 of 4.8 TB/s; the presets hold the sheet's figure.

_CARRIED = 0.8
_REACHED = 0.8
_RING_STEP_INSIDE = 1.9e-6
_RING_STEP_ACROSS = 4.0e-6


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and the node that it usually sits in."""

    name: str
    flops: Mapping[str, float]
    """FLOP/s at most, by type, as of `Cluster`."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes/s."""
    inside: float
    """Bytes/s received from the other GPUs of a node at most."""
    across: float
    """Bytes/s received from other nodes at most: this GPU's share of the node's ports."""
    per_node: int
    """GPUs of a node."""


def _flops(fp32: float, fp16: float, bf16: float | None, fp8: float | None = None) -> Mapping[str, float]:
    tera = {"fp32": fp32, "fp16": fp16, "bf16": bf16, "fp8": fp8}
    return MappingProxyType({kind: value * 1e12 for kind, value in tera.items() if value is not None})


_VOLTA = Gpu(
    name="V100-32GB",
    flops=_flops(15.7, 125.0, None),
    memory=32e9,
    memory_bandwidth=900e9,
    inside=6 * 25e9,
    across=4 * 100e9 / 8 / 8,
    per_node=8,
)
_AMPERE = Gpu(
    name="A100-80GB",
    flops=_flops(19.5, 312.0, 312.0),
    memory=80e9,
    memory_bandwidth=2039e9,
    inside=12 * 25e9,
    across=8 * 200e9 / 8 / 8,
    per_node=8,
)
_HOPPER = Gpu(
    name="H100",
    flops=_flops(66.9, 989.4, 989.4, 1979.0),
    memory=80e9,
    memory_bandwidth=3350e9,
    inside=18 * 25e9,
    across=8 * 400e9 / 8 / 8,
    per_node=8,
)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        found.name: found
        for found in (
            dataclasses.replace(_VOLTA, name="V100-16GB", memory=16e9),
            _VOLTA,
            dataclasses.replace(_AMPERE, name="A100-40GB", memory=40e9, memory_bandwidth=1555e9),
            _AMPERE,
            _HOPPER,
            dataclasses.replace(_HOPPER, name="H200", memory=141e9, memory_bandwidth=4800e9),
        )
    }
)


def gpu(name: str) -> Gpu:
    """The preset of that name, in any case of its letters.

    Raises:
        ValueError: no such preset; the message lists them.
    """
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(
        f"GPUs with a preset are {', '.join(GPUS)}. Got {name!r}.{_near(name, GPUS)} Any other one: measure it, or "
        "write a cluster file."
    )


def _near(name: str, known: Iterable[str]) -> str:
    """Of "A100": " Did you mean A100-40GB or A100-80GB?"; nothing where no name is like it."""
    typed = name.lower()
    near = [each for each in known if typed and (typed in each.lower() or each.lower() in typed)]
    near = near or get_close_matches(name.upper(), known, n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def cluster_of(gpu_name: str, /, *, nodes: int = 1, per_node: int | None = None, **overrides: Any) -> Cluster:
    """Nodes of that GPU.

    Args:
        per_node: GPUs of a node; the preset's if None. The node's ports are shared by the GPUs that it has.
        overrides: fields of `Cluster` that replace the preset's.

    Raises:
        ValueError: an unknown GPU or field, or a number that `Cluster` refuses.
    """
    found = gpu(gpu_name)
    fields = [field.name for field in dataclasses.fields(Cluster)]
    unknown = sorted(set(overrides) - set(fields))
    if unknown:
        raise ValueError(f"a cluster has the fields {', '.join(fields)}. Got {', '.join(unknown)}.")
    ranks = found.per_node if per_node is None else per_node
    share = found.across * found.per_node / ranks if ranks > 0 else found.across  # Cluster refuses a node of none
    plain = Cluster(
        name=f"{nodes} x {ranks} {found.name}",
        nodes=nodes,
        per_node=ranks,
        flops=dict(found.flops),
        memory=found.memory,
        memory_bandwidth=found.memory_bandwidth,
        inside=Link(latency=_RING_STEP_INSIDE, bandwidth=_CARRIED * found.inside),
        across=Link(latency=_RING_STEP_ACROSS, bandwidth=_CARRIED * share),
        efficiency=_REACHED,
    )
    return dataclasses.replace(plain, **overrides)


def longhorn(nodes: int = 16) -> Cluster:
    """The machine of Bian et al. 2021 as far as it is known: TACC's Longhorn, IBM AC922 nodes with four V100 each.

    A node's two processors have two GPUs each. The two are joined by 75 GB/s of NVLink in a direction (Cornell Virtual
    Workshop, Understanding GPU Architecture). A ring over all four passes the bus between the processors, which bounds
    it: taken as 64 GB/s for both directions together, 32 for one. Across nodes: EDR InfiniBand, 100 Gbit/s. One such
    port a node is assumed, and GPUs of 16 GB: descriptions of the machine differ.
    """
    return cluster_of(
        "V100-16GB",
        nodes=nodes,
        per_node=4,
        name=f"Longhorn, {nodes} x 4 V100",
        inside=Link(latency=_RING_STEP_INSIDE, bandwidth=_CARRIED * 32e9),
        across=Link(latency=_RING_STEP_ACROSS, bandwidth=_CARRIED * 100e9 / 8 / 4),
    )


CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {f"8x{name}": cluster_of(name, nodes=8) for name in GPUS} | {"longhorn": longhorn()}
)
"""Ready-made: eight nodes of each GPU, and the 64 V100 of Bian et al."""


def cluster(name: str) -> Cluster:
    """A ready-made cluster.

    Raises:
        ValueError: no such cluster; the message lists them.
    """
    for known, found in CLUSTERS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(
        f"ready-made clusters are {', '.join(CLUSTERS)}. Got {name!r}.{_near(name, CLUSTERS)} cluster_of makes others."
    )

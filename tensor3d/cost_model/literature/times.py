"""Seconds of a known way on a cluster: the encoder's layers, forward and backward.

The products run at `Cluster.rate`. A collective takes what `Cluster.collective` says; those that wait for no product
(weights ahead of their use, gradients after it) run under the products, the others add to them. LayerNorm, GELU,
embedding, heads and optimiser are left out: they cost about the same in each way (1-D repeats LayerNorm on all ranks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.literature.volumes import Collective, Method, TransformerSpec
from tensor3d.distributed.cube_shape import CubeShape

Broadcasts = Literal["chain", "tree"]
"""How a block reaches n ranks. chain: in pieces from one to the next, which takes the block's time and n - 1 latencies;
NCCL does so. tree: whole, in ceil(log2 n) sends one after the other, as the table of Xu et al. 2021 counts."""


@dataclass(frozen=True, kw_only=True)
class MethodTime:
    """A way and its seconds of one step."""

    way: Method
    compute: float
    """Of the products."""
    blocking: float
    """Of collectives that products wait for."""
    hidden: float
    """Of collectives that run under the products."""

    @property
    def seconds(self) -> float:
        """Of a step; infinite where the way does not exist."""
        return math.inf if self.way.refused else self.blocking + max(self.compute, self.hidden)

    @property
    def exposed(self) -> float:
        """Seconds of communication that are seen."""
        return self.blocking + max(0.0, self.hidden - self.compute)


def timed(
    way: Method,
    encoder: TransformerSpec,
    cluster: Cluster,
    *,
    compute: str = "bf16",
    element: int = 2,
    gradient: int = 4,
    recomputed: bool = False,
    broadcasts: Broadcasts = "chain",
    overlapped: bool | None = None,
) -> MethodTime:
    """How long the encoder's layers take.

    Args:
        way: a row for this encoder, with the same `recomputed`.
        compute: type of the products, one of the cluster's `flops`.
        element: bytes of an element of activations and weights on the wire.
        gradient: bytes of an element of the gradients of weights on the wire.
        overlapped: whether collectives run under the products where they can, or all of them block; None: whether the
            cluster can (`overlaps`).

    Raises:
        ValueError: a type that the cluster does not know; more ranks than it has.
    """
    if way.ranks > cluster.ranks:
        raise ValueError(f"{cluster.name} has {cluster.ranks} ranks. Got a way on {way.ranks}.")
    passes = 4 if recomputed else 3  # forward, twice that backward, and forward again
    products = passes * encoder.layers * encoder.flops / (way.ranks * cluster.rate(compute))
    under = cluster.overlaps if overlapped is None else overlapped
    blocking = hidden = 0.0
    for move in way.moves:
        size = gradient if move.of == "gradients" else element
        seconds = encoder.layers * _seconds(move, size, way.box, cluster, broadcasts)
        if move.hidden and under:
            hidden += seconds
        else:
            blocking += seconds
    return MethodTime(way=way, compute=0.0 if way.refused else products, blocking=blocking, hidden=hidden)


def _seconds(move: Collective, size: int, box: CubeShape, cluster: Cluster, broadcasts: Broadcasts) -> float:
    members = math.prod(box.size(axis) for axis in move.axes)
    if members == 1:
        return 0.0
    if move.kind != "broadcast" and move.kind != "reduce":
        latency, per_byte = cluster.collective(box, move.axes, move.kind)
        return move.calls * latency + move.elements * size * per_byte
    # A ring of all-gather has the same links, and n - 1 steps too.
    latency, per_byte = cluster.collective(box, move.axes, "all-gather")
    blocks = move.elements * members / (members - 1) * size * per_byte  # the first of a chain receives nothing
    if broadcasts == "chain":
        return move.calls * latency + blocks
    sends = math.ceil(math.log2(members))
    return sends * (move.calls * latency / (members - 1) + blocks)

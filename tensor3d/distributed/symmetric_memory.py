"""What products by PyTorch's symmetric memory need of a cube's ranks (`ExecutionPolicy.symmetric_memory`).

Symmetric memory is memory of each member's GPU that the others write and read by themselves, over NVLink or PCIe. The
products that use it are those of sharding/fused_products.py, over the axes y and z.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tensor3d.distributed.cube_policies import MixedPrecisionPolicy
from tensor3d.distributed.cube_shape import AxisName, CubeShape

_AXES: tuple[AxisName, ...] = ("y", "z")


class GpuPlace(NamedTuple):
    """Where a rank's GPU is, as the rank sees it."""

    host: str
    device: int
    peers: tuple[int, ...]
    """Indices of the GPUs whose memory it may use."""

    @classmethod
    def own(cls, device: torch.device) -> GpuPlace:
        index = torch.cuda.current_device() if device.index is None else device.index
        others = [other for other in range(torch.cuda.device_count()) if other != index]
        peers = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
        return cls(socket.gethostname(), index, tuple(peers))


def check_symmetric_memory(
    shape: CubeShape,
    device: torch.device,
    backend: str,
    precision: MixedPrecisionPolicy,
    places: Callable[[], Sequence[GpuPlace]],
) -> None:
    """Raises ValueError, on every rank alike, where products of this cube cannot go by symmetric memory.

    Args:
        backend: of the process group.
        places: asks every rank for its own, by rank: a collective, for which all that one rank knows has to be right.
    """
    if shape.y * shape.z == 1:
        return  # no product has anything to gather or to sum over them
    if device.type != "cuda":
        _refuse("needs a GPU for each rank", f"a cube on {device.type}")
    if "nccl" not in backend:
        _refuse("needs a process group of NCCL", f"one of {backend}")
    if precision.fp8 is not None:
        _refuse("is for products in other types than FP8", f"fp8={precision.fp8!r}")
    told = places()
    for axis in _AXES:
        for first, *others in shape.groups((axis,)):
            for other in others:
                one, two = told[first], told[other]
                ranks = f"ranks {first} and {other}, which differ along {axis},"
                if one.host != two.host:
                    _refuse("needs all ranks along y and z on one node", f"{ranks} on {one.host} and {two.host}")
                if one.device == two.device:
                    _refuse(
                        "needs every rank to see all GPUs of its node, and to use one of its own",
                        f"{ranks} that both use the device cuda:{one.device} of those that they see",
                    )
                if two.device not in one.peers or one.device not in two.peers:
                    _refuse(
                        "needs GPUs that reach each other's memory",
                        f"{ranks} on cuda:{one.device} and cuda:{two.device}, which do not",
                    )


def _refuse(need: str, got: str) -> None:
    raise ValueError(
        f"ExecutionPolicy(symmetric_memory=True) {need}. Got {got}. Leave it out, or place the ranks otherwise."
    )

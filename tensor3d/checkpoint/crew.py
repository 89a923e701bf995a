"""The ranks that write one checkpoint, on a process group of their own: a background thread may use it at any time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tensor3d.cube import Cube


class Crew:
    """Every rank makes one at the same point; it then makes the same calls in the same order, from one thread at a
    time. Objects travel over gloo, whatever the backend of the job; on a cube of one process nothing travels.

    Args:
        timeout: how long a call waits for a rank that neither comes nor fails.
    """

    def __init__(self, cube: Cube, timeout: timedelta) -> None:
        self.rank = cube.rank
        self.size = cube.shape.ranks if cube.mesh is not None else 1
        self._group: Any = None
        if cube.mesh is not None:
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")

    def gather(self, value: Any) -> list[Any]:
        """All values by rank, on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self._group)
        return values

    def scatter(self, values: Sequence[Any]) -> Any:
        """To each rank its own of the values that rank 0 has."""
        if self._group is None:
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(values) if self.rank == 0 else None, src=0, group=self._group)
        return mine[0]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        if self._group is None:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

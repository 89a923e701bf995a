"""`tensor3d.testing`'s ranks, with what this project's tests need beside them."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from tensor3d.testing import ranks
from tensor3d.testing.ranks import RankError

__all__ = ["RankError", "run_ranks", "run_survivors"]

# The forkserver passes over what is not installed.
_PRELOAD = [
    *ranks.PRELOAD,
    "torch.distributed.checkpoint",
    "pytest",
    "transformers.models.bert.modeling_bert",
    "tools.bench.trial",
    "tools.doctor.__main__",
    "tools.doctor.nodes",
    "tests.ranks",
]


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`tensor3d.testing.run_ranks`, with LOCAL_RANK set as a launcher would."""
    with ranks.started(world, _launched, body, *args, timeout=timeout, preload=_PRELOAD) as crew:
        return ranks.collect(crew, timeout)


def run_survivors(world: int, lost: int, body: Callable[..., Any], *args: Any, timeout: float = 60.0) -> dict[int, Any]:
    """Like `run_ranks`, of ranks of which `lost` does not live to return; results of the others by rank."""
    with ranks.started(world, _launched, body, *args, timeout=timeout, preload=_PRELOAD) as crew:
        results = {}
        for rank in crew:
            if rank.number != lost:
                assert wait([rank.pipe], timeout), f"rank {rank.number} hangs"
                results[rank.number] = rank.result()
        return results


def _launched(body: Callable[..., Any], *args: Any) -> Any:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    return body(*args)

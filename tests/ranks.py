"""`tensor3d.testing`'s ranks, with what this project's tests need beside them."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from tensor3d import testing
from tensor3d.testing import Report, StandingRanks, processes
from tensor3d.testing.processes import RankError

__all__ = ["PRELOAD", "STANDING", "RankError", "check_layer", "run_fresh_ranks", "run_ranks", "run_survivors"]

# The forkserver passes over what is not installed.
PRELOAD = [
    *processes.PRELOAD,
    "torch.distributed.checkpoint",
    "pytest",
    "transformers.models.bert.modeling_bert",
    "tools.bench.harness.step_trial",
    "tools.doctor.__main__",
    "tools.doctor.nodes",
    "tests.ranks",
]

STANDING = StandingRanks(preload=PRELOAD, packages=("tensor3d", "models", "tools", "tests"))
"""The ranks that all tests of a run share; `conftest.py` ends them."""

_MOST = 8  # ranks of one cube that stay; more are rare, and would only take memory


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`tensor3d.testing.run_ranks` on standing ranks, with LOCAL_RANK set as a launcher would."""
    if world > _MOST:
        return run_fresh_ranks(world, body, *args, timeout=timeout)
    return STANDING.run(world, _launched, body, *args, timeout=timeout)


def run_fresh_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`run_ranks` on new processes: for what changes its process for good, or measures the most it ever held."""
    with processes.started(world, _launched, body, *args, timeout=timeout, preload=PRELOAD) as crew:
        return processes.collect(crew, timeout)


def run_survivors(world: int, lost: int, body: Callable[..., Any], *args: Any, timeout: float = 60.0) -> dict[int, Any]:
    """Like `run_fresh_ranks`, of ranks of which `lost` does not live to return; results of the others by rank."""
    with processes.started(world, _launched, body, *args, timeout=timeout, preload=PRELOAD) as crew:
        results = {}
        for rank in crew:
            if rank.number != lost:
                assert wait([rank.pipe], timeout), f"rank {rank.number} hangs"
                results[rank.number] = rank.result()
        return results


def check_layer(*arguments: Any, **options: Any) -> Report:
    """`tensor3d.testing.check_layer` on standing ranks."""
    return testing.check_layer(*arguments, **{"ranks": STANDING, **options})


def _launched(body: Callable[..., Any], *args: Any) -> Any:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    return body(*args)

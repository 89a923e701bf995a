"""Groups of processes: they keep their state, a failure ends them all, and none outlives the parent."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tools.bench.harness.processes import LocalGroup, RankFailedError


class Counting:
    """A session that remembers, and fails when it is told to."""

    def __init__(self, cube: Cube, broken: int | None = None) -> None:
        if cube.rank == broken:
            raise OSError(f"rank {cube.rank} finds no disk")
        self.rank, self.total = cube.rank, 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total * 10 + self.rank

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise ArithmeticError("three is not four")
        dist.barrier()  # where its peers wait for it

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        dist.barrier()

    def close(self) -> None:
        pass


def start(make: Any = Counting) -> LocalGroup[Counting]:
    return LocalGroup(CubeShape(x=2), make, cuda=False, cores=1)


Children = Callable[[], list[Any]]


@pytest.fixture
def children() -> Children:
    """This process's that were not there before the test: standing ranks and counting processes stay for many tests."""
    before = {process.pid for process in multiprocessing.active_children()}
    return lambda: [process for process in multiprocessing.active_children() if process.pid not in before]


def test_a_group_keeps_its_state_between_calls(children: Children) -> None:
    group = start()
    assert group.call(Counting.add, 1) == [10, 11]
    assert group.call(Counting.add, 2) == [30, 31]
    group.close()
    assert not children()


@pytest.mark.slow
def test_a_failing_rank_ends_its_group(children: Children) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 of 2x1x1 failed:.*in __init__.*rank 1 finds no disk"):
        start(partial(Counting, broken=1))
    assert not children()
    group = start()
    with pytest.raises(RankFailedError, match=r"(?s)rank \b0\b of 2x1x1 failed.*ArithmeticError"):
        group.call(Counting.fail, 0)
    assert not children()
    group = start()
    with pytest.raises(RankFailedError, match=r"rank \b1\b of 2x1x1.*7"):
        group.call(Counting.die, 1)
    assert not children()


def test_processes_end_when_the_parent_is_gone(children: Children) -> None:
    """Its ends of the pipes are closed then, which is all that a killed parent can do."""
    group = start()
    processes = children()
    assert len(processes) == 2
    del group
    gc.collect()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0

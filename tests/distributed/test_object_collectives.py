"""Decisions that ranks take together: what rank 0 does alone may take any time."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_rank0
from tensor3d.torch_private import default_group, set_timeout, timeout_of
from tests.ranks import run_ranks


def _slow() -> list[str]:
    """Twice what takes longer than a collective may, and an error of it."""
    cube, world = Cube(2, 1, 1), default_group()
    before = timeout_of(world)
    assert before is not None
    set_timeout(world, timedelta(seconds=1))

    def work(fails: bool) -> str:
        time.sleep(1.5)
        if fails:
            raise ValueError("no corpus")
        return "done"

    try:
        told = [run_on_rank0(cube, lambda: work(False), any_time=True)]
        with pytest.raises(ValueError, match="no corpus"):
            run_on_rank0(cube, lambda: work(True), any_time=True)
        return told
    finally:
        set_timeout(world, before)


@pytest.mark.slow
def test_rank_0_may_take_longer_than_a_collective_waits() -> None:
    assert run_ranks(2, _slow) == [["done"]] * 2

"""Many cubes in one process: what a cube holds of the process goes with it, and others do not notice."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube, ExecutionPolicy, Linear3D, all_reduce_replicated, distribute, shard
from tensor3d.distributed.group_teardown import destroy
from tensor3d.sharding.param_layout import matrix
from tensor3d.torch_private import group_table
from tests.ranks import run_fresh_ranks, run_ranks
from tests.single_device_reference import full, ranks_of

Shape = tuple[int, int, int, int]
OLD = torch.__version__ < (2, 13)


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(most: tuple[int, int]) -> tuple[int, int]:
    """What is held, as soon as it is no more than that, or after a while."""
    until = time.monotonic() + 20
    while time.monotonic() < until and not all(now <= before for now, before in zip(held(), most, strict=True)):
        time.sleep(0.02)
    return held()


def learned(cube: Cube, steps: bool = True) -> float:
    """A loss, also after steps with torch's optimiser, whose operators DTensor keeps plans of."""
    cube.manual_seed(0)
    layer = Linear3D(8, 8, cube)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    x = shard(torch.linspace(-1, 1, 8 * 16).reshape(16, 8), cube, "z")
    for _ in range(1 + steps):
        loss = all_reduce_replicated(layer(x).square().sum(), cube.over("data", "x", "y", "z"))
        loss.backward()
        if steps:
            optimizer.step()
    return loss.item() + (float(full(layer.weight).sum()) if steps else 0.0)


def _one_after_another(shape: Shape, steps: bool) -> tuple[tuple[int, int], dict[str, tuple[int, int]], list[float]]:
    learned(Cube.single(), steps)  # what torch itself opens at a first use
    first = Cube(*shape)
    dist.barrier()
    before, after, losses = held(), {}, []
    for way in ("close", "del", "close a relative", "cycle", "del"):
        cube = Cube(*shape)
        cube.over("x", "data")
        losses.append(learned(cube, steps))
        assert held() > before
        if way == "close":
            cube.close()
            assert settled(before)[0] <= before[0], "while its owner is there"
        elif way == "close a relative":
            cube.with_policy(speed=ExecutionPolicy(overlap=False)).close()
        elif way == "cycle":
            cube.itself = cube  # type: ignore[attr-defined]
        del cube
        gc.collect()
        after[way] = settled(before)
    losses.append(learned(first, steps))
    return before, after, losses


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        ((1, 2, 1, 1), False),
        pytest.param((1, 2, 1, 2), True, marks=pytest.mark.skipif(OLD, reason="torch itself holds plans of operators")),
    ],
)
@pytest.mark.slow
def test_a_cube_that_ends_leaves_no_descriptor_and_no_thread(shape: Shape, steps: bool) -> None:
    # New processes: those that stay keep what was cached before from the collector, and from whoever empties caches.
    for before, after, losses in run_fresh_ranks(ranks_of(shape), _one_after_another, shape, steps):
        assert all(fd <= before[0] and threads <= before[1] for fd, threads in after.values()), (before, after)
        assert len(set(losses)) == 1


def _late(_: int) -> float:
    """Rank 1 lets go of its cube long after rank 0, which goes on with another."""
    cube, other = Cube(2, 1, 1), Cube(1, 2, 1)
    value = torch.ones(4)
    if cube.rank == 0:
        del cube
    found = learned(other, steps=False)
    if other.rank == 1:
        time.sleep(0.3)
        del cube
    dist.all_reduce(value)
    return found + float(value.sum())


def test_ranks_let_go_of_a_cube_when_they_like() -> None:
    first, second = run_ranks(2, _late, 0)
    assert first == second


def _kept() -> float:
    """A tensor outlives the cube that it was made on."""
    parameter = distribute(torch.arange(16.0).reshape(4, 4), matrix("z"), Cube(1, 2, 1))
    gc.collect()
    time.sleep(0.1)
    return float(full(parameter).sum())


def test_a_parameter_keeps_the_groups_of_its_cube() -> None:
    assert run_ranks(2, _kept) == [120.0, 120.0]


def _closed() -> tuple[str, bool]:
    cube = Cube(2, 1, 1, data=2)
    layer, relative = Linear3D(8, 8, cube), cube.with_policy(speed=ExecutionPolicy(overlap=False))
    cube.close()
    cube.close(timedelta(seconds=1))  # a second time nothing happens
    for each in (layer, Linear3D(8, 8, relative)):
        with pytest.raises(ValueError, match=r"the cube is closed.*Make another one") as caught:
            each(torch.ones(4, 8))
    return str(caught.value), dist.is_initialized()


def test_a_closed_cube_sends_nothing_and_says_so() -> None:
    for _, connected in run_ranks(4, _closed):
        assert connected, "the process group is not the cube's"


# The end of a process that has let go of a cube a moment before.
PROGRAM = """
import gc, sys, threading
import torch, torch.distributed as dist
from tensor3d import Cube
gc.disable()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
class Ring: ...
for _ in range(200_000):
    ring = Ring()
    ring.itself, ring.tensor = ring, torch.empty(1)
del ring
gc.freeze()
Cube(1, 1, 1)
gc.collect()
gc.unfreeze()
begun = threading.Event()
gc.callbacks.append(lambda phase, _: begun.set())
while not begun.wait(0.001):  # what the thread wants done between operators is done here
    pass
"""


@pytest.mark.slow
def test_a_process_ends_well_while_what_a_cube_left_is_collected(tmp_path: Path) -> None:
    """Tensors that a thread frees while Python is taken apart end the process by SIGABRT."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "store")], capture_output=True, timeout=99)
    assert (ended.returncode, ended.stderr) == (0, b"")


def _ended_by_two() -> tuple[list[str], bool]:
    """Two threads end one group at once: a cube's that nobody has any more, and whoever ends all groups."""
    group, both = dist.new_group([0]), threading.Barrier(2, timeout=20)
    shutdown, problems = dist.ProcessGroup.shutdown, []

    def beside(group: dist.ProcessGroup) -> None:
        both.wait()
        shutdown(group)

    def end() -> None:
        try:
            destroy(group)
        except Exception as problem:
            problems.append(repr(problem))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "shutdown", beside)
        threads = [threading.Thread(target=end) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return problems, group in group_table()


def test_a_group_may_be_ended_by_two_threads_at_once() -> None:
    assert run_ranks(1, _ended_by_two) == [([], False)]

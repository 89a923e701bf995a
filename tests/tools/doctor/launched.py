"""Runs the doctor on ranks of this machine as a launcher would, two ranks to a node."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensor3d.distributed.group_teardown import disconnect
from tensor3d.testing import processes
from tests.ports import free_port
from tests.ranks import PRELOAD
from tools.doctor import nodes
from tools.doctor.__main__ import main

PER_NODE = 2


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended, and what it wrote."""

    status: int | None
    out: str
    err: str


def doctors(
    folder: Path,
    world: int,
    arguments: list[str],
    *,
    absent: tuple[int, ...] = (),
    lost: tuple[int, ...] = (),
    prepare: Callable[[int], Any] | None = None,
    timeout: float = 60.0,
) -> dict[int, Ended]:
    """`python -m tools.doctor` on ranks; how each of them ended.

    Args:
        absent: ranks that never start.
        lost: ranks that are not waited for.
        prepare: called on each rank before; may return other arguments for it.
    """
    body = partial(_doctor, folder, arguments, absent, free_port(), prepare)
    return _collected(folder, world, body, absent + lost, timeout)


def roll(
    folder: Path, arguments: dict[int, list[str]], *, last_after: tuple[int, ...] = (), timeout: float = 60.0
) -> dict[int, Ended]:
    """`python -m tools.doctor.nodes` on nodes, with these arguments.

    Args:
        last_after: the last node comes when one of these has complained.
    """
    absent = tuple(node for node in range(max(arguments) + 1) if node not in arguments)
    return _collected(folder, max(arguments) + 1, partial(_node, folder, arguments, last_after), absent, timeout)


def _collected(
    folder: Path, world: int, body: Callable[..., Any], absent: tuple[int, ...], timeout: float
) -> dict[int, Ended]:
    found = {}
    with processes.started(world, body, timeout=timeout, preload=PRELOAD) as crew:
        for rank in crew:
            if rank.number in absent:
                continue
            assert wait([rank.pipe], timeout), f"rank {rank.number} hangs"
            try:
                status = rank.result()
            except processes.RankError:
                rank.process.join(5)
                status = rank.process.exitcode
                if status is None:  # it lives: its body raised
                    raise
            out, err = ((folder / f"{name}-{rank.number}").read_text() for name in ("out", "err"))
            found[rank.number] = Ended(status=status, out=out, err=err)
    return found


def _doctor(
    folder: Path, arguments: list[str], absent: tuple[int, ...], port: int, prepare: Callable[[int], Any] | None
) -> int:
    rank, world = _alone()
    if rank in absent:
        return 0
    arguments = (prepare(rank) if prepare else None) or arguments
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % PER_NODE),
        LOCAL_WORLD_SIZE=str(PER_NODE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return _written(folder, rank, lambda: main(arguments))


def _node(folder: Path, arguments: dict[int, list[str]], last_after: tuple[int, ...]) -> int:
    number, world = _alone()
    complaints = [folder / f"err-{node}" for node in last_after if number == world - 1]
    while complaints and not any(path.exists() and path.stat().st_size for path in complaints):
        time.sleep(0.05)
    return _written(folder, number, lambda: nodes.main(arguments[number])) if number in arguments else 0


def _alone() -> tuple[int, int]:
    """Leaves the group that the ranks of a test have, when all of them are connected; rank and world that they had."""
    own = dist.get_rank(), dist.get_world_size()
    disconnect(timedelta(seconds=30))
    return own


def _written(folder: Path, rank: int, action: Callable[[], int]) -> int:
    with (
        open(folder / f"out-{rank}", "w", buffering=1) as out,
        open(folder / f"err-{rank}", "w", buffering=1) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            return action()
        except SystemExit as leaving:
            return int(leaving.code or 0)

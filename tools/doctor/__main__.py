"""Checks a set of ranks before training: `python -m tools.doctor [--cube XxYxZ] [--data-parallel N] [--quick]`.

Started like training, on every rank by any launcher that sets torchrun's variables, or as one process alone:

    python launch/torchrun.py --standalone --nproc-per-node=8 -m tools.doctor --cube 2x2x2

and never restarted by it (--max-restarts 0): what is found must end it.

In this order, each bounded by --wait: do all ranks come; do they have the same versions, sources and recipe; are the
nodes alike; is each directory one place that all nodes can write; do the clocks agree; do the ranks connect; are the
results of collectives right on every axis, and how fast are they; is a rank slow.

Standard output ends with "ready: 8 ranks on 2 nodes", or standard error with "not ready: ..." and the reason.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch.distributed as dist
import tyro

from tensor3d import Cube, CubeShape, rendezvous
from tensor3d.rendezvous import Place
from tensor3d.shape import AxisName
from tools.bench.machine import check_output
from tools.doctor import connected, reaching
from tools.doctor.board import Board
from tools.doctor.checks import Checks
from tools.doctor.directories import SEEN
from tools.doctor.ending import NOT_READY, ending_on_sigterm
from tools.doctor.findings import Finding, Names, NotReadyError
from tools.doctor.report import NAME, Report
from tools.doctor.wires import Effort
from tools.entry import guarded


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check a set of ranks before training."""

    cube: str | None = None
    """Sizes of the axes x, y and z, as XxYxZ. Default, without --data-parallel too: 1x1x1 and a copy for each rank."""
    data_parallel: int | None = None
    """Copies of the cube (default 1 where --cube is given)."""
    wire: str | None = None
    """Order of the axes over the ranks, slowest first, such as "data,x,y,z". Default: as training lays them."""
    gpu: bool = False
    """Insist on a GPU for each rank."""
    quick: bool = False
    """Measure small sizes, a few times: some seconds in all."""
    recipe: Path | None = None
    """File that must be the same everywhere."""
    directory: tuple[Path, ...] = ()
    """Folders, there already or to be made, that must be one place that every node can write."""
    wait: float = 120.0
    """Seconds in which a rank must come to each check."""
    output: Path | None = None
    """JSON file for all that is found and measured, written by rank 0."""

    def shape(self, place: Place) -> CubeShape:
        """The cube, laid on the nodes. Raises ValueError for what can be seen before any rank is connected."""
        if not (math.isfinite(self.wait) and self.wait > 0):
            raise ValueError(f"--wait must be a number of seconds above 0. Got {self.wait}.")
        if place.rank == 0:  # which alone writes it
            check_output(self.output)
        copies = self.data_parallel
        if copies is None:
            copies = place.world if self.cube is None else 1
        shape = CubeShape.parse(self.cube or "1x1x1", copies)
        if shape.ranks != place.world:
            raise ValueError(
                f"the cube {shape} needs {shape.ranks} ranks (x*y*z*data), and {place.world} were started. Start "
                f"{shape.ranks}, or choose sizes whose product is {place.world}."
            )
        if self.wire is not None:
            return replace(shape, wire=cast("tuple[AxisName, ...]", tuple(self.wire.split(","))))
        return shape.placed(place.per_node)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 where training would start, warnings or not; 2 for a finding that prevents it or a bad call, on
    every rank; 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(NAME, lambda: run(arguments))


def run(arguments: Sequence[str]) -> int:
    place = rendezvous.place()
    own = place or Place(rank=0, world=1, local_rank=0, per_node=1, address="", port=0, hosted=False)
    try:
        # A bad call is the same on all ranks: told by the first.
        with contextlib.redirect_stderr(io.StringIO()) if own.rank else contextlib.nullcontext():
            command: DoctorCommand = tyro.cli(DoctorCommand, args=list(arguments), prog=f"python -m {NAME}")
        shape = command.shape(own)
    except ValueError:
        if own.rank == 0:
            raise
        return NOT_READY
    try:
        with ending_on_sigterm():
            examine(command, shape, own, launched=place is not None, arguments=arguments)
    except NotReadyError:
        return NOT_READY
    return 0


def examine(
    command: DoctorCommand, shape: CubeShape, place: Place, *, launched: bool, arguments: Sequence[str]
) -> None:
    """All checks. Raises NotReadyError, on every rank, where training would not start."""
    effort = Effort.quick() if command.quick else Effort()
    report = Report(arguments=arguments, output=command.output)
    raw = open_store(command, place, report) if launched else None
    board = Board(
        dist.PrefixStore("tensor3d/doctor", raw) if raw is not None else None,
        names=Names(kind="rank", per_node=place.per_node),
        member=place.rank,
        members=place.world,
        wait=command.wait,
        say=report.found,
        alone=_speaks(place),
    )
    try:
        call = f"cube {shape}, wire {','.join(shape.wire)}, quick {command.quick}, gpu {command.gpu}"
        Checks(board, place, report).run(
            call=call,
            recipe=command.recipe,
            folders=command.directory,
            seen_within=min(SEEN, command.wait / 2),
            trips=effort.trips,
            gpu=command.gpu,
        )
        if raw is None:
            cube = Cube.from_env()
        else:
            cube = connected.connect(board, place, shape, raw, command.wait)
        connected.measure(board, place, cube, effort, report, command.wait)
        if place.rank == 0:
            report.conclude(shape.ranks)
        cube.close()
    except NotReadyError:
        board.leave(host=place.rank == 0 and not place.hosted)
        if dist.is_initialized():
            connected.end()
        raise


def open_store(command: DoctorCommand, place: Place, report: Report) -> dist.Store:
    """The job's store. Raises NotReadyError where it is not to be had, told by the first rank of each node."""
    timeout = reaching.seconds(command.wait)
    try:
        if place.rank or place.hosted:
            reaching.reach(place.address, place.port, command.wait)
        elif reaching.in_use(place.port):
            text = f"port {place.port} of the master {place.address} is in use. Choose another one."
            raise NotReadyError([Finding(text=text)])
        return reaching.open_within(lambda: place.open_store(timeout, wait=False), f"{place.address}:{place.port}")
    except NotReadyError as error:
        if _speaks(place):
            report.found(error.findings)
        raise


def _speaks(place: Place) -> bool:
    """Whether this rank tells what ranks without a store cannot agree upon: one a node, and on node 0, where rank 0 may
    be what is missing, any."""
    return place.local_rank == 0 or place.node == 0


if __name__ == "__main__":
    sys.exit(main())

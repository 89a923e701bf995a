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
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.distributed import group_teardown, job_store, process_group
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.distributed.process_group import WorkerInfo
from tensor3d.distributed.watchdog import Watchdog
from tools.common.cli import run_main
from tools.common.files import check_output
from tools.common.log import take_verbose
from tools.common.parse import parse_options
from tools.common.signals import ending_on_sigterm
from tools.doctor import network
from tools.doctor.checks import SEEN, Checks
from tools.doctor.collective_checks import CollectiveChecks, TimingBudget, figures, product_seconds, slowest_axis
from tools.doctor.report import NAME, Report
from tools.doctor.rules import NOT_READY, Finding, MemberNames, NotReadyError, judge_products
from tools.doctor.store_agreement import RoundResult, StoreRounds

# --- The checks that need a process group: collectives and products, under a watch that names who goes silent ---------

_HEARD = 2.0
"""Seconds that the host of the store stays after a hang, so that the others adopt the verdict that is in it."""


def connect(board: StoreRounds, place: WorkerInfo, shape: CubeShape, store: dist.Store, wait: float) -> Cube:
    """The cube, as training connects it; ends the process where that takes too long.

    Raises:
        NotReadyError: the ranks cannot be connected.
    """
    # The watch and the limit must be first: the error of a collective that times out names nobody.
    timeout = timedelta(seconds=2 * wait + 60)
    try:
        with _limited(board, place, wait):
            device = process_group.connect(shape.ranks, timeout, store=store)
            cube = Cube(shape.x, shape.y, shape.z, shape.data, device=device, wire=shape.wire)
            assert board.store is not None
            board.store.set(_connected(place.rank), "yes")
    except RuntimeError as error:
        finding = Finding(
            text=f"{board.names.one(place.rank)} cannot connect to the others: {str(error).strip().splitlines()[0]} "
            "Look at --interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and at firewalls between the nodes."
        )
        board.tell_once(finding)
        raise NotReadyError([finding]) from error
    return cube


def measure(
    board: StoreRounds, place: WorkerInfo | None, cube: Cube, effort: TimingBudget, report: Report, wait: float
) -> None:
    """Results, times and speeds of all ranks. Raises NotReadyError on every rank where a result is wrong."""
    with _watched(board, place, cube, wait) as note:
        note("making groups")
        wires = CollectiveChecks(cube, effort)
        note("checking collectives")
        faults = wires.check()
        board.decide("collectives", faults, lambda of_ranks: RoundResult(findings=_wrong(of_ranks)))
        seconds = wires.measure(note) if wires.points else []
        note("computing a product")
        together = dist.barrier if cube.mesh is not None else lambda: None
        product = product_seconds(cube.device, effort.product_seconds, together)

        def judge(times: list[Any]) -> RoundResult:
            per_node = place.per_node if place is not None else 1
            report.cube = f"cube {cube.shape}, wire {','.join(cube.shape.wire)}"
            report.wires = figures(cube.shape, per_node, effort.sizes, [each["wires"] for each in times])
            report.advice = slowest_axis(cube.shape, per_node, report.wires)
            report.products = [each["product"] for each in times]
            return RoundResult(findings=judge_products(report.products, board.names))

        board.decide("times", {"wires": seconds, "product": product}, judge)


def _wrong(faults: list[list[str]]) -> list[Finding]:
    return [
        Finding(text=f"{fault}. Look at drivers, firmware and cables there.", about=(rank,))
        for rank, of_rank in enumerate(faults)
        for fault in of_rank
    ]


@contextmanager
def _watched(board: StoreRounds, place: WorkerInfo | None, cube: Cube, wait: float) -> Iterator[Callable[[str], None]]:
    """Inside, a rank that makes no progress for `wait` seconds ends all of them with one message that names it. Yields
    what notes the progress of this one."""

    def say(line: str) -> None:
        hosted = place is None or place.hosted or "store" not in line
        board.tell_once(Finding(text=line if hosted else f"{line} ({board.names.one(0)} hosts it)"))

    def abort(_: int) -> None:
        _leave(place)

    steps = iter(range(1, 1_000_000))
    with Watchdog(cube, hang_after=wait, say=say, abort=abort) as watch:
        # There is nothing to save: a signal ends this process as it would any other.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        try:
            yield lambda doing: watch.at(next(steps), doing)
        except RuntimeError as error:
            finding = Finding(text=watch.failed(str(error)))
            board.tell_once(finding)
            raise NotReadyError([finding]) from error


@contextmanager
def _limited(board: StoreRounds, place: WorkerInfo, wait: float) -> Iterator[None]:
    """Inside, time runs out after `wait` seconds: gloo and NCCL would say only that a connection was not made."""

    def expire() -> None:
        finding = Finding(text=f"the ranks did not connect to each other within {wait:g} s.")
        try:
            assert board.store is not None
            out = [rank for rank in range(place.world) if not board.store.check([_connected(rank)])]
            finding = Finding(
                text=f"{board.names.many(out)} did not connect to the others within {wait:g} s. Look at --interface "
                "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and at firewalls between the nodes."
            )
        except RuntimeError:
            pass  # the store is gone; nobody can tell who is missing
        board.tell_once(finding)
        _leave(place)

    timer = threading.Timer(wait, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connected(rank: int) -> str:
    return f"connected/{rank}"


def _leave(place: WorkerInfo | None) -> None:
    """Ends this process at once: its main thread is in the middle of a collective."""
    if place is not None and place.rank == 0 and not place.hosted:
        time.sleep(_HEARD)
    end()


def end() -> NoReturn:
    """Ends this process without a farewell to the others: groups that have failed may hold whoever destroys them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(NOT_READY)


# --- Checks a set of ranks before training ----------------------------------------------------------------------------


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

    def shape(self, place: WorkerInfo) -> CubeShape:
        """The cube, laid on the nodes. Raises ValueError for what can be seen before any rank is connected."""
        if not (math.isfinite(self.wait) and self.wait > 0):
            raise ValueError(f"--wait must be a number of seconds above 0. Got {self.wait}.")
        if place.rank == 0:  # which alone writes it
            check_output(self.output, others=[self.recipe])
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
    words, verbose = take_verbose(arguments)
    return run_main(NAME, lambda: run(words), verbose=verbose)


def run(arguments: Sequence[str]) -> int:
    place = process_group.place()
    own = place or WorkerInfo(rank=0, world=1, local_rank=0, per_node=1, address="", port=0, hosted=False)
    try:
        # A bad call is the same on all ranks: told by the first.
        with contextlib.redirect_stderr(io.StringIO()) if own.rank else contextlib.nullcontext():
            command: DoctorCommand = parse_options(DoctorCommand, arguments, f"python -m {NAME}")
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
    command: DoctorCommand, shape: CubeShape, place: WorkerInfo, *, launched: bool, arguments: Sequence[str]
) -> None:
    """All checks. Raises NotReadyError, on every rank, where training would not start."""
    effort = TimingBudget.quick() if command.quick else TimingBudget()
    report = Report(arguments=arguments, output=command.output)
    raw = open_store(command, place, report) if launched else None
    board = StoreRounds(
        job_store.KeyedStore(raw, "tensor3d/doctor", process_group.job_secret()) if raw is not None else None,
        names=MemberNames(kind="rank", per_node=place.per_node),
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
            cube = connect(board, place, shape, raw, command.wait)
        measure(board, place, cube, effort, report, command.wait)
        if place.rank == 0:
            report.conclude(shape.ranks)
        cube.close()
        if dist.is_initialized():
            group_teardown.disconnect(timedelta(minutes=1))
    except NotReadyError:
        board.leave(host=place.rank == 0 and not place.hosted)
        if dist.is_initialized():
            end()
        raise


def open_store(command: DoctorCommand, place: WorkerInfo, report: Report) -> dist.Store:
    """The job's store. Raises NotReadyError where it is not to be had, told by the first rank of each node."""
    timeout = network.seconds(command.wait)
    try:
        if place.rank or place.hosted:
            network.reach(place.address, place.port, command.wait)
        elif network.in_use(place.port):
            text = f"port {place.port} of the master {place.address} is in use. Choose another one."
            raise NotReadyError([Finding(text=text)])
        at = f"{place.address}:{place.port}"
        return network.open_within(lambda: place.open_store(timeout, wait=False), at, command.wait)
    except NotReadyError as error:
        if _speaks(place):
            report.found(error.findings)
        raise


def _speaks(place: WorkerInfo) -> bool:
    """Whether this rank tells what ranks without a store cannot agree upon: one a node, and on node 0, where rank 0 may
    be what is missing, any."""
    return place.local_rank == 0 or place.node == 0


if __name__ == "__main__":
    sys.exit(main())

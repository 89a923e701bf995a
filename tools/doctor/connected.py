"""The checks that need a process group: collectives and products, under a watch that names who goes silent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from tensor3d import Cube, CubeShape, rendezvous
from tensor3d.rendezvous import Place
from tensor3d.watch import Watch
from tools.doctor.board import Board, Verdict
from tools.doctor.ending import NOT_READY
from tools.doctor.findings import Finding, NotReadyError
from tools.doctor.judging import judge_products
from tools.doctor.products import product_seconds
from tools.doctor.report import Report
from tools.doctor.wires import Effort, Wires, figures, slowest_axis

_HEARD = 2.0
"""Seconds that the host of the store stays after a hang, so that the others adopt the verdict that is in it."""


def connect(board: Board, place: Place, shape: CubeShape, store: dist.Store, wait: float) -> Cube:
    """The cube, as training connects it; ends the process where that takes too long.

    Raises:
        NotReadyError: the ranks cannot be connected.
    """
    # The watch and the limit must be first: the error of a collective that times out names nobody.
    timeout = timedelta(seconds=2 * wait + 60)
    try:
        with _limited(board, place, wait):
            device = rendezvous.connect(shape.ranks, timeout, store=store)
            cube = Cube(shape.x, shape.y, shape.z, shape.data, device=device, wire=shape.wire)
            store.set(_connected(place.rank), "")
    except RuntimeError as error:
        finding = Finding(
            text=f"{board.names.one(place.rank)} cannot connect to the others: {str(error).strip().splitlines()[0]} "
            "Look at --interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and at firewalls between the nodes."
        )
        board.tell_once(finding)
        raise NotReadyError([finding]) from error
    return cube


def measure(board: Board, place: Place | None, cube: Cube, effort: Effort, report: Report, wait: float) -> None:
    """Results, times and speeds of all ranks. Raises NotReadyError on every rank where a result is wrong."""
    with _watched(board, place, cube, wait) as note:
        note("making groups")
        wires = Wires(cube, effort)
        note("checking collectives")
        faults = wires.check()
        board.decide("collectives", faults, lambda of_ranks: Verdict(findings=_wrong(of_ranks)))
        seconds = wires.measure(note) if wires.points else []
        note("computing a product")
        together = dist.barrier if cube.mesh is not None else lambda: None
        product = product_seconds(cube.device, effort.product_seconds, together)

        def judge(times: list[Any]) -> Verdict:
            per_node = place.per_node if place is not None else 1
            report.cube = f"cube {cube.shape}, wire {','.join(cube.shape.wire)}"
            report.wires = figures(cube.shape, per_node, effort.sizes, [each["wires"] for each in times])
            report.advice = slowest_axis(cube.shape, per_node, report.wires)
            report.products = [each["product"] for each in times]
            return Verdict(findings=judge_products(report.products, board.names))

        board.decide("times", {"wires": seconds, "product": product}, judge)


def _wrong(faults: list[list[str]]) -> list[Finding]:
    return [
        Finding(text=f"{fault}. Look at drivers, firmware and cables there.", about=(rank,))
        for rank, of_rank in enumerate(faults)
        for fault in of_rank
    ]


@contextmanager
def _watched(board: Board, place: Place | None, cube: Cube, wait: float) -> Iterator[Callable[[str], None]]:
    """Inside, a rank that makes no progress for `wait` seconds ends all of them with one message that names it. Yields
    what notes the progress of this one."""

    def say(line: str) -> None:
        hosted = place is None or place.hosted or "store" not in line
        board.tell_once(Finding(text=line if hosted else f"{line} ({board.names.one(0)} hosts it)"))

    def abort(_: int) -> None:
        _leave(place)

    steps = iter(range(1, 1_000_000))
    with Watch(cube, hang_after=wait, say=say, abort=abort) as watch:
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
def _limited(board: Board, place: Place, wait: float) -> Iterator[None]:
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


def _leave(place: Place | None) -> None:
    """Ends this process at once: its main thread is in the middle of a collective."""
    if place is not None and place.rank == 0 and not place.hosted:
        time.sleep(_HEARD)
    end()


def end() -> NoReturn:
    """Ends this process without a farewell to the others: groups that have failed may hold whoever destroys them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(NOT_READY)

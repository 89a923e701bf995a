"""The checks that need no process group: who comes, versions, nodes, folders, clocks. Every rank makes all of them."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensor3d.distributed.object_collectives import format_error
from tensor3d.distributed.process_group import WorkerInfo
from tools.doctor.facts import NodeFacts, versions
from tools.doctor.report import Report
from tools.doctor.rules import (
    Finding,
    MemberNames,
    judge_calls,
    judge_clocks,
    judge_nodes,
    judge_versions,
    odd_ones,
    who_has,
)
from tools.doctor.store_agreement import RoundResult, StoreRounds

# --- Whether a folder is the same place for all nodes, and each of them can write there -------------------------------

SEEN = 10.0
"""Seconds in which a file must be seen by other nodes: network file systems look again after some."""
_PREFIX = ".tensor3d-doctor-"

State = Mapping[str, str]
"""JSON of one folder on one node: `base`, its nearest part that exists, and `error`, empty where that is writable."""


def state_of(folder: Path) -> State:
    """How a folder looks from here. A file is written beside what is there, and gone when this returns."""
    folder = folder.absolute()
    base = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    error = ""
    if not base.exists():
        error = f"is a link to {os.readlink(base)!r}, which is not there"
    elif not base.is_dir():
        error = "is a file"
    else:
        try:
            with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=base):
                pass
        except OSError as problem:
            error = problem.strerror or str(problem)
    return {"folder": str(folder), "base": str(base), "error": error}


def judge_states(states: Sequence[Sequence[State]], names: MemberNames) -> list[Finding]:
    """What nodes say of the same folders.

    Args:
        states: by node and folder.
        names: of nodes.
    """
    found = []
    for of_nodes in zip(*states, strict=True):
        folder, paths = of_nodes[0]["folder"], [state["folder"] for state in of_nodes]
        if len(set(paths)) > 1:
            text = (
                f"a directory has different paths: {who_has(paths, names)}. Start in the same folder, or give it whole."
            )
            found.append(Finding(text=text, about=odd_ones(paths)))
            continue
        deepest = max((state["base"] for state in of_nodes), key=len)
        lost = [node for node, state in enumerate(of_nodes) if state["base"] != deepest]
        refused = [node for node, state in enumerate(of_nodes) if state["error"] and node not in lost]
        if lost:
            there = [node for node in range(len(of_nodes)) if node not in lost]
            what = folder if deepest == folder else f"{deepest}, for {folder},"
            text = (
                f"directory {what} is missing on {names.many(lost)} and there on {names.many(there)}. It must be the "
                "same place on all nodes: mount it there, or choose another one."
            )
            found.append(Finding(text=text, about=tuple(lost)))
        if refused:
            base, error = of_nodes[refused[0]]["base"], of_nodes[refused[0]]["error"]
            text = f"directory {folder} cannot be written on {names.many(refused)}: {base}: {error}."
            found.append(Finding(text=text, about=tuple(refused)))
    return found


@contextmanager
def probes(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """A file in each folder, or in what there is of its path, until the end. Yields the word in their names, and why
    one cannot be written, if so."""
    word, problem = uuid.uuid4().hex, ""
    made: list[Path] = []
    try:
        for folder in folders:
            path = probe_of(folder, word)
            made.append(path)
            try:
                path.write_text(word)
            except OSError as error:
                problem = format_error(error)
        yield word, problem
    finally:
        for path in made:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def probe_of(folder: Path, word: str) -> Path:
    """Where the file for a folder is."""
    return Path(state_of(folder)["base"]) / f"{_PREFIX}{word}"


def sees(folders: Sequence[Path], word: str, wait: float) -> list[bool]:
    """Whether the file for each folder is there, after at most `wait` seconds in all."""
    paths = [probe_of(folder, word) for folder in folders]
    until = time.monotonic() + wait
    while not all(path.exists() for path in paths) and time.monotonic() < until:
        time.sleep(0.05)
    return [path.exists() for path in paths]


def judge_seen(seen: Sequence[Sequence[bool]], folders: Sequence[Path], names: MemberNames) -> list[Finding]:
    """Findings for folders in which nodes do not see what node 0 has written there; `seen` by node and folder."""
    found = []
    for folder, of_nodes in zip(folders, zip(*seen, strict=True), strict=True):
        if lost := [node for node, there in enumerate(of_nodes) if not there]:
            text = (
                f"directory {folder} is another place on {names.many(lost)} than on {names.one(0)}: a file written on "
                "this one is not seen there. Checkpoints need one place for all nodes; choose one that they share."
            )
            found.append(Finding(text=text, about=tuple(lost)))
    return found


# --- By how much the clocks of nodes differ, from round trips through the job's store ---------------------------------


def ask(
    store: dist.Store, nodes: Sequence[int], trips: int, clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Node 0's part: seconds by which the clock of each node is ahead of this one, and the error of that.

    Of several round trips the shortest counts: the other clock was read somewhere within it.
    """
    found = {}
    for node in nodes:
        best: tuple[float, float] | None = None
        for trip in range(trips):
            before, since = clock(), time.perf_counter()
            store.set(f"clock/{node}/ask/{trip}", "")
            theirs = float(store.get(f"clock/{node}/answer/{trip}"))
            half = (time.perf_counter() - since) / 2
            if best is None or half < best[1]:
                best = (theirs - before - half, half)
        assert best is not None, "at least one trip"
        found[node] = best
    return found


def answer(store: dist.Store, node: int, trips: int, clock: Callable[[], float] = time.time) -> None:
    """The part of any other node."""
    for trip in range(trips):
        store.get(f"clock/{node}/ask/{trip}")
        store.set(f"clock/{node}/answer/{trip}", repr(clock()))


# --- The checks that need no process group ----------------------------------------------------------------------------


class Checks:
    """Those of one rank.

    Args:
        place: of this rank; the leaders of nodes, of local rank 0, speak for them.
        report: filled on rank 0.
    """

    def __init__(self, board: StoreRounds, place: WorkerInfo, report: Report) -> None:
        self._board, self._place, self._report = board, place, report
        self._leads = place.local_rank == 0
        self._nodes: list[int] = []
        self._names = MemberNames(kind="node")

    def run(
        self,
        *,
        call: str,
        recipe: Path | None,
        folders: Sequence[Path],
        seen_within: float,
        trips: int,
        gpu: bool = False,
    ) -> None:
        """All of them, in this order. Raises NotReadyError on every rank at the first that finds something.

        Args:
            call: the options that must be the same on all ranks, as text.
            seen_within: seconds in which a file must be seen by other nodes.
            trips: round trips to each node for its clock.
            gpu: whether each rank must have one.
        """
        self._board.meet(socket.gethostname())
        self.versions(call, recipe)
        self.nodes(gpu)
        if folders:
            self.folders(folders, seen_within)
        if len(self._nodes) > 1:
            self.clocks(trips)

    def versions(self, call: str, recipe: Path | None) -> None:
        def judge(reports: list[Any]) -> RoundResult:
            names = self._board.names
            self._report.versions = reports[0]["versions"]
            found = judge_calls([report["call"] for report in reports], names)
            return RoundResult(findings=found + judge_versions([report["versions"] for report in reports], names))

        self._board.decide("versions", {"call": call, "versions": versions(recipe)}, judge)

    def nodes(self, gpu: bool) -> None:
        def judge(reports: list[Any]) -> RoundResult:
            nodes = [NodeFacts.from_json(report) for report in reports if report is not None]
            leaders = [rank for rank, report in enumerate(reports) if report is not None]
            names = MemberNames(kind="node", hosts=tuple(node.host for node in nodes))
            self._report.nodes = nodes
            found = judge_nodes(nodes, names, gpu=gpu)
            # Ranks are numbered node by node, as the placement of axes takes for granted.
            ranks, first = [node.ranks for node in nodes], 0
            for leader, here in zip(leaders, ranks, strict=True):
                if not found and leader != first:
                    found.append(
                        Finding(
                            text=f"ranks are not numbered node by node: {names.one(leaders.index(leader))} begins with "
                            f"rank {leader}, and rank {first} is needed. Start them by node (not by slot or core)."
                        )
                    )
                first += here
            return RoundResult(findings=found, data={"leaders": leaders, "hosts": names.hosts})

        own = dataclasses.asdict(NodeFacts.here(self._place.per_node)) if self._leads else None
        told = self._board.decide("nodes", own, judge)
        self._nodes, self._names = told["leaders"], MemberNames(kind="node", hosts=tuple(told["hosts"]))

    def folders(self, folders: Sequence[Path], seen_within: float) -> None:
        self._board.decide(
            "directories",
            [state_of(folder) for folder in folders] if self._leads else None,
            lambda states: RoundResult(findings=judge_states(_of_leaders(states), self._names)),
        )
        if self._place.rank == 0:
            with probes(folders) as (word, problem):
                found = [Finding(text=problem)] if problem else []
                self._board.decide("writing into directories", None, lambda _: RoundResult(findings=found, data=word))
                self._same_place(folders, word, seen_within)
            self._report.directories = list(folders)
        else:
            word = self._board.decide("writing into directories", None, lambda _: RoundResult())
            self._same_place(folders, word, seen_within)

    def _same_place(self, folders: Sequence[Path], word: str, seen_within: float) -> None:
        self._board.decide(
            "reading from directories",
            sees(folders, word, seen_within) if self._leads else None,
            lambda seen: RoundResult(findings=judge_seen(_of_leaders(seen), folders, self._names)),
        )

    def clocks(self, trips: int) -> None:
        store, problem = self._board.store, list[Finding]()
        assert store is not None, "several nodes have a store"
        offsets: dict[int, tuple[float, float]] = {}
        try:
            if self._place.rank == 0:
                offsets = ask(store, range(1, len(self._nodes)), trips)
            elif self._leads:
                answer(store, self._nodes.index(self._place.rank), trips)
        except RuntimeError as error:  # time has run out, or the store is gone
            problem.append(Finding(text=f"clocks could not be compared: {str(error).splitlines()[0]}"))

        def judge(_: list[Any]) -> RoundResult:
            self._report.clocks = offsets
            return RoundResult(findings=[*problem, *judge_clocks(offsets, self._names)])

        self._board.decide("clocks", None, judge)


def _of_leaders(reports: Sequence[Any]) -> list[Any]:
    return [report for report in reports if report is not None]

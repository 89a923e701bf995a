"""The checks that need no process group: who comes, versions, nodes, folders, clocks. Every rank makes all of them."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensor3d.rendezvous import Place
from tools.doctor import clocks
from tools.doctor.board import Board, Verdict
from tools.doctor.directories import judge_seen, judge_states, probes, sees, state_of
from tools.doctor.facts import NodeFacts, versions
from tools.doctor.findings import Finding, Names
from tools.doctor.judging import judge_calls, judge_clocks, judge_nodes, judge_versions
from tools.doctor.report import Report


class Checks:
    """Those of one rank.

    Args:
        place: of this rank; the leaders of nodes, of local rank 0, speak for them.
        report: filled on rank 0.
    """

    def __init__(self, board: Board, place: Place, report: Report) -> None:
        self._board, self._place, self._report = board, place, report
        self._leads = place.local_rank == 0
        self._nodes: list[int] = []
        self._names = Names(kind="node")

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
        def judge(reports: list[Any]) -> Verdict:
            names = self._board.names
            self._report.versions = reports[0]["versions"]
            found = judge_calls([report["call"] for report in reports], names)
            return Verdict(findings=found + judge_versions([report["versions"] for report in reports], names))

        self._board.decide("versions", {"call": call, "versions": versions(recipe)}, judge)

    def nodes(self, gpu: bool) -> None:
        def judge(reports: list[Any]) -> Verdict:
            nodes = [NodeFacts.from_json(report) for report in reports if report is not None]
            leaders = [rank for rank, report in enumerate(reports) if report is not None]
            names = Names(kind="node", hosts=tuple(node.host for node in nodes))
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
            return Verdict(findings=found, data={"leaders": leaders, "hosts": names.hosts})

        own = dataclasses.asdict(NodeFacts.here(self._place.per_node)) if self._leads else None
        told = self._board.decide("nodes", own, judge)
        self._nodes, self._names = told["leaders"], Names(kind="node", hosts=tuple(told["hosts"]))

    def folders(self, folders: Sequence[Path], seen_within: float) -> None:
        self._board.decide(
            "directories",
            [state_of(folder) for folder in folders] if self._leads else None,
            lambda states: Verdict(findings=judge_states(_of_leaders(states), self._names)),
        )
        if self._place.rank == 0:
            with probes(folders) as (word, problem):
                found = [Finding(text=problem)] if problem else []
                self._board.decide("writing into directories", None, lambda _: Verdict(findings=found, data=word))
                self._same_place(folders, word, seen_within)
            self._report.directories = list(folders)
        else:
            word = self._board.decide("writing into directories", None, lambda _: Verdict())
            self._same_place(folders, word, seen_within)

    def _same_place(self, folders: Sequence[Path], word: str, seen_within: float) -> None:
        self._board.decide(
            "reading from directories",
            sees(folders, word, seen_within) if self._leads else None,
            lambda seen: Verdict(findings=judge_seen(_of_leaders(seen), folders, self._names)),
        )

    def clocks(self, trips: int) -> None:
        store, problem = self._board.store, list[Finding]()
        assert store is not None, "several nodes have a store"
        offsets: dict[int, tuple[float, float]] = {}
        try:
            if self._place.rank == 0:
                offsets = clocks.ask(store, range(1, len(self._nodes)), trips)
            elif self._leads:
                clocks.answer(store, self._nodes.index(self._place.rank), trips)
        except RuntimeError as error:  # time has run out, or the store is gone
            problem.append(Finding(text=f"clocks could not be compared: {str(error).splitlines()[0]}"))

        def judge(_: list[Any]) -> Verdict:
            self._report.clocks = offsets
            return Verdict(findings=[*problem, *judge_clocks(offsets, self._names)])

        self._board.decide("clocks", None, judge)


def _of_leaders(reports: Sequence[Any]) -> list[Any]:
    return [report for report in reports if report is not None]

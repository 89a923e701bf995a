"""Calls the roll of nodes before their launchers start: `python -m tools.doctor.nodes`, one process a node.

    python -m tools.doctor.nodes --nodes 2 --node-rank 0 --master a:29501 --training-port 29500 --per-node 8

A launcher that waits for a node in vain names none. Here node 0 opens a store at --master, the others come to it, and
whoever does not come within --wait is named on all nodes that did. Then versions, sources, the recipe, numbers of ranks
and GPUs and directories are compared. Node 0 tells what is wrong, and so does the node that it is about.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensor3d.distributed.job_store import KeyedStore, host_store
from tensor3d.distributed.process_group import job_secret
from tools.common.cli import run_main
from tools.common.log import take_verbose
from tools.common.parse import parse_options
from tools.common.signals import ending_on_sigterm
from tools.doctor.checks import judge_states, state_of
from tools.doctor.facts import NodeFacts, versions
from tools.doctor.network import address_of, in_use, is_own, open_within, reach, seconds
from tools.doctor.rules import (
    NOT_READY,
    Finding,
    MemberNames,
    NotReadyError,
    as_lines,
    count,
    judge_calls,
    judge_nodes,
    judge_versions,
)
from tools.doctor.store_agreement import RoundResult, StoreRounds

NAME = "tools.doctor.nodes"
_log = logging.getLogger(NAME)


@dataclass(frozen=True, kw_only=True)
class NodesCommand:
    """Call the roll of nodes, and compare them, before training is started on them."""

    nodes: int
    """How many there are."""
    node_rank: int
    """Which of them this is, from 0."""
    master: str
    """HOST:PORT of node 0, where the roll is called."""
    per_node: int
    """Ranks that this node will start."""
    training_port: int | None = None
    """Port of the training that follows: on node 0 it and the second one after it must be free."""
    wait: float = 300.0
    """Seconds in which all nodes must have come."""
    hosts: str | None = None
    """Names of all nodes by number, as a,b,c, to name those that do not come."""
    recipe: Path | None = None
    """File that must be the same everywhere."""
    directory: tuple[Path, ...] = ()
    """Folders that must be there on all nodes, or on none."""

    def check(self) -> tuple[str, int]:
        """The master's address. Raises ValueError for what cannot be."""
        for name, value in (("--nodes", self.nodes), ("--per-node", self.per_node)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1. Got {value}.")
        if not 0 <= self.node_rank < self.nodes:
            raise ValueError(f"--node-rank must be from 0 to {self.nodes - 1}. Got {self.node_rank}.")
        if not (math.isfinite(self.wait) and self.wait > 0):
            raise ValueError(f"--wait must be a number of seconds above 0. Got {self.wait}.")
        if self.training_port is not None and not 0 < self.training_port < 65534:
            raise ValueError(f"--training-port must be from 1 to 65533. Got {self.training_port}.")
        if self.hosts is not None and len(self.hosts.split(",")) != self.nodes:
            raise ValueError(f"--hosts must name all {self.nodes} nodes with commas between them. Got {self.hosts!r}.")
        return address_of(self.master)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status, the same on all nodes that come: 0 where all have come and are alike, else 2; 130 after Ctrl-C."""
    words, verbose = take_verbose(arguments)
    return run_main(NAME, lambda: run(words), verbose=verbose)


def run(arguments: Sequence[str]) -> int:
    command = parse_options(NodesCommand, arguments, f"python -m {NAME}")
    host, port = command.check()
    try:
        with ending_on_sigterm():
            call_roll(command, host, port)
    except NotReadyError:
        return NOT_READY
    return 0


def call_roll(command: NodesCommand, host: str, port: int) -> None:
    """All checks. Raises NotReadyError, on every node that came, where training should not be started."""
    first = command.node_rank == 0
    named = MemberNames(kind="node", hosts=tuple(command.hosts.split(",")) if command.hosts else ())
    store = open_store(command, host, port)
    board = StoreRounds(
        store,
        names=named,
        member=command.node_rank,
        members=command.nodes,
        wait=command.wait,
        say=tell,
        hears=lambda finding: finding.for_all or command.node_rank in finding.about,
    )
    try:
        compare(command, board, host)
        if first:
            nodes = f"{count(command.nodes, 'node')} with {count(command.per_node, 'rank')} each"
            print(f"ready: {nodes}: {', '.join(board.names.hosts)}", flush=True)
    except NotReadyError as error:
        if not first and not any(finding.for_all or command.node_rank in finding.about for finding in error.findings):
            print(f"not ready: node 0 ({board.names.hosts[0] if board.names.hosts else host}) tells why", flush=True)
        raise
    finally:
        board.leave(host=first)


def compare(command: NodesCommand, board: StoreRounds, host: str) -> None:
    """The rounds. Raises NotReadyError at the first that finds something."""
    board.meet(socket.gethostname(), lambda: own_ports(command, host))

    def judge(reports: list[Any]) -> RoundResult:
        names = board.names
        found = judge_calls([report["call"] for report in reports], names)
        return RoundResult(findings=found + judge_versions([report["versions"] for report in reports], names))

    call = f"--nodes {command.nodes}, {count(len(command.directory), 'directory')}"
    board.decide("versions", {"call": call, "versions": versions(command.recipe)}, judge)

    def judge_machines(reports: list[Any]) -> RoundResult:
        names = board.names
        found = judge_nodes([NodeFacts.from_json(report["node"]) for report in reports], names)
        return RoundResult(findings=found + judge_states([report["directories"] for report in reports], names))

    own = NodeFacts.here(command.per_node)
    folders = [state_of(folder) for folder in command.directory]
    board.decide("machines", {"node": dataclasses.asdict(own), "directories": folders}, judge_machines)


def open_store(command: NodesCommand, host: str, port: int) -> dist.Store:
    """The store of the roll, which node 0 makes. Raises NotReadyError, and tells, where it is not to be had."""
    first = command.node_rank == 0
    try:
        if not first:
            reach(host, port, command.wait)
        elif in_use(port):
            raise NotReadyError([_taken(port, "of the roll call (--master)")])
        store = open_within(
            lambda: (
                host_store(host, port, alone=command.nodes == 1, timeout=seconds(command.wait))
                if first
                else dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds(command.wait))
            ),
            f"{host}:{port}",
            command.wait,
        )
        keyed = KeyedStore(store, "tensor3d/nodes", job_secret())
        word = uuid.uuid4().hex
        if keyed.compare_set(f"number/{command.node_rank}", "", word).decode() != word:
            text = f"another process has come as node {command.node_rank}. Give each node a --node-rank of its own."
            raise NotReadyError([Finding(text=text, about=(command.node_rank,))])
    except NotReadyError as error:
        tell(error.findings)
        raise
    return keyed


def own_ports(command: NodesCommand, host: str) -> list[Finding]:
    """What node 0 finds wrong with its ports and its address."""
    found = []
    if command.training_port is not None:
        ports = {command.training_port: "of the training", command.training_port + 2: "of the check before training"}
        found = [_taken(port, what) for port, what in ports.items() if in_use(port)]
    if command.nodes > 1 and not is_own(host):
        text = f"{host} (--master) is not an address of this machine, node 0; others reach it by another way, or not."
        found.append(Finding(text=text, about=(0,), warning=True))
    return found


def _taken(port: int, what: str) -> Finding:
    return Finding(
        text=f"port {port} {what} is in use on node 0 ({socket.gethostname()}). End what has it (ss -ltnp shows it), "
        "or choose another port, the same on all nodes.",
        about=(0,),
    )


def tell(findings: Sequence[Finding]) -> None:
    _log.error("%s", as_lines(findings, NAME))


if __name__ == "__main__":
    sys.exit(main())

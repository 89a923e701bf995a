"""What is wrong with what the members know: pure functions, so that every case can be tested without a cluster."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

from tools.doctor.facts import MISSING, NodeFacts

# --- What a check has found, whom it is about, and how ranks and nodes are named --------------------------------------

_HOSTS_AT_MOST = 6


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that keeps training from starting, or slows it down."""

    text: str
    """What there is, what is needed and what to do."""
    about: tuple[int, ...] = ()
    """Members at fault, as far as it is known."""
    warning: bool = False
    """Whether training would start all the same."""
    for_all: bool = False
    """Whether every member tells it, not only those that it is about."""


class NotReadyError(Exception):
    """Training would not start. Whoever had to has told it already."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("; ".join(finding.text for finding in findings))
        self.findings = tuple(findings)


@dataclass(frozen=True, kw_only=True)
class MemberNames:
    """Names the members of a roll: ranks, or nodes.

    Args:
        kind: "rank" or "node".
        per_node: ranks of a node; None where the members are nodes.
        hosts: by member, empty where unknown.
    """

    kind: str
    per_node: int | None = None
    hosts: tuple[str, ...] = ()

    def many(self, members: Sequence[int]) -> str:
        """`rank 3 (node 1, b)`, `ranks 4-7 (node 1, b)`, `nodes 1-2 (b, c)`."""
        members = sorted(members)
        named = f"{self.kind}{'' if len(members) == 1 else 's'} {numbers(members)}"
        parts = []
        if self.per_node is not None:
            nodes = sorted({member // self.per_node for member in members})
            parts.append(f"node{'' if len(nodes) == 1 else 's'} {numbers(nodes)}")
        known = [self.hosts[member] for member in members if member < len(self.hosts) and self.hosts[member]]
        hosts = list(dict.fromkeys(known))
        more = len(hosts) - _HOSTS_AT_MOST
        parts += [*hosts[:_HOSTS_AT_MOST], *([f"{more} more hosts"] if more > 0 else [])]
        return f"{named} ({', '.join(parts)})" if parts else named

    def one(self, member: int) -> str:
        return self.many([member])


def as_lines(findings: Sequence[Finding], name: str) -> str:
    """What is printed of findings; the last line begins with "not ready" where one of them is no mere warning.

    Args:
        name: of the command, such as "tools.doctor".
    """
    prevents = [finding.text for finding in findings if not finding.warning]
    lines = [f"{name}: warning: {finding.text}" for finding in findings if finding.warning]
    if len(prevents) > 1:
        lines += [f"{name}: {text}" for text in prevents]
    if prevents:
        lines.append(f"not ready: {prevents[0] if len(prevents) == 1 else count(len(prevents), 'finding') + ', above'}")
    return "\n".join(lines)


def numbers(members: Sequence[int]) -> str:
    """Ascending numbers in short: `0-3, 5, 7-8`."""
    runs: list[list[int]] = []
    for member in members:
        if runs and member == runs[-1][1] + 1:
            runs[-1][1] = member
        else:
            runs.append([member, member])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def count(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


# --- How a check ends -------------------------------------------------------------------------------------------------

NOT_READY = 2
"""Exit status where training would not start."""


# --- What is wrong with what the members know -------------------------------------------------------------------------

V = TypeVar("V")
SKEW = 1.0
"""Seconds by which a clock may differ."""
SLOW = 2.0
"""Times the median that a rank may take for the same product."""


def who_has(values: Sequence[V], names: MemberNames, show: Callable[[V], str] = str) -> str:
    """`2.13.0 on rank 0 (a), 2.12.1 on ranks 1-2 (b)`."""
    holders: dict[V, list[int]] = {}
    for member, value in enumerate(values):
        holders.setdefault(value, []).append(member)
    return ", ".join(f"{show(value)} on {names.many(members)}" for value, members in holders.items())


def odd_ones(values: Sequence[object]) -> tuple[int, ...]:
    """Members whose value is not that of most; where no value is that of most, those that differ from member 0."""
    ranked = Counter(values).most_common()
    usual = values[0] if len(ranked) > 1 and ranked[0][1] == ranked[1][1] else ranked[0][0]
    return tuple(member for member, value in enumerate(values) if value != usual)


def judge_versions(reports: Sequence[Mapping[str, str]], names: MemberNames) -> list[Finding]:
    """A finding for each version, source or file that is not the same on all members."""
    found = []
    for what in dict.fromkeys(name for report in reports for name in report):
        values = [report.get(what, "none") for report in reports]
        if lost := [member for member, value in enumerate(values) if value == MISSING]:
            found.append(
                Finding(
                    text=f"{what} cannot be read on {names.many(lost)}. Put the same file there on every node.",
                    about=tuple(lost),
                )
            )
        elif len(set(values)) > 1:
            remedy = "Copy one of them to all nodes." if what.startswith("recipe ") else "Install the same everywhere."
            found.append(Finding(text=f"{what} differs: {who_has(values, names)}. {remedy}", about=odd_ones(values)))
    return found


def judge_calls(calls: Sequence[str], names: MemberNames) -> list[Finding]:
    """A finding where the members were not called alike."""
    if len(set(calls)) == 1:
        return []
    text = f"options differ: {who_has(calls, names)}. Give the same on every node."
    return [Finding(text=text, about=odd_ones(calls))]


def judge_nodes(nodes: Sequence[NodeFacts], names: MemberNames, *, gpu: bool = False) -> list[Finding]:
    """What keeps nodes from working together: numbers of ranks and GPUs, GPUs that cannot be used, addresses.

    Args:
        nodes: by number.
        names: of nodes.
        gpu: whether each rank must have one.
    """
    found = []
    for what, values in {"rank": [node.ranks for node in nodes], "GPU": [len(node.gpus) for node in nodes]}.items():
        if len(set(values)) > 1:
            told = who_has(values, names, lambda value: count(value, what))  # noqa: B023
            found.append(
                Finding(
                    text=f"nodes have different numbers of {what}s: {told}. Every node needs as many as the others; "
                    "start fewer ranks a node, or leave a node out.",
                    about=odd_ones(values),
                )
            )
    for number, node in enumerate(nodes):
        if node.gpu_error:
            text = f"the GPUs of {names.one(number)} cannot be used: {node.gpu_error}"
            found.append(Finding(text=text, about=(number,)))
        if gpu and len(node.gpus) < node.ranks:
            has = count(len(node.gpus), "GPU")
            text = f"{names.one(number)} has {has} for {node.ranks} ranks, and --gpu needs one for each."
            found.append(Finding(text=text, about=(number,)))
        elif 0 < len(node.gpus) < node.ranks:
            text = f"{names.one(number)} has {count(len(node.gpus), 'GPU')} for {node.ranks} ranks: they use the CPU."
            found.append(Finding(text=text, about=(number,), warning=True))
    kinds = [" + ".join(dict.fromkeys(node.gpus)) for node in nodes]
    if len(set(kinds)) > 1 and all(kinds):
        text = f"GPUs differ: {who_has(kinds, names)}. The slowest sets the pace."
        found.append(Finding(text=text, about=odd_ones(kinds), warning=True))
    return found + judge_addresses(nodes, names)


def judge_addresses(nodes: Sequence[NodeFacts], names: MemberNames) -> list[Finding]:
    """Findings for nodes at which others would look for them in vain: gloo tells its address to the others."""
    found = []
    several = len({node.host for node in nodes}) > 1
    for number, node in enumerate(nodes):
        if node.interface:
            named = [name.strip() for name in node.interface.split(",")]
            if lost := [name for name in named if node.interfaces and name not in node.interfaces]:
                text = (
                    f"{names.one(number)} has no network interface {', '.join(lost)} (GLOO_SOCKET_IFNAME). It has "
                    f"{', '.join(node.interfaces)}; give --interface one of these."
                )
                found.append(Finding(text=text, about=(number,)))
        elif several and (not node.address or ip_address(node.address.partition("%")[0]).is_loopback):
            resolves = f"resolves to {node.address}" if node.address else "does not resolve"
            text = (
                f"the host name of {names.one(number)} {resolves} there, so that other nodes cannot reach its ranks. "
                f"Give --interface (GLOO_SOCKET_IFNAME) one of {', '.join(node.interfaces) or 'its interfaces'}."
            )
            found.append(Finding(text=text, about=(number,), warning=bool(node.gpus)))
    return found


def judge_clocks(offsets: Mapping[int, tuple[float, float]], names: MemberNames) -> list[Finding]:
    """Warnings for nodes whose clock is off.

    Args:
        offsets: seconds by which a node's clock is ahead of node 0's, and the error of that, by node.
    """
    return [
        Finding(
            text=f"the clock of {names.one(node)} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that "
            "of node 0: times in logs and files will not agree. Set it by NTP.",
            about=(node,),
            warning=True,
        )
        for node, (offset, error) in offsets.items()
        if abs(offset) - error > SKEW
    ]


def judge_products(seconds: Sequence[float], names: MemberNames) -> list[Finding]:
    """A warning for ranks that are slow at a product that all of them computed at the same time."""
    median = statistics.median(seconds)
    slow = [rank for rank, taken in enumerate(seconds) if taken > SLOW * median]
    if not slow:
        return []
    worst = max(seconds[rank] for rank in slow) / median
    text = (
        f"{names.many(slow)} computed up to {worst:.1f} x slower than the median rank, and every step waits for the "
        "slowest. Look for other work there, a hot GPU, too few cores."
    )
    return [Finding(text=text, about=tuple(slow), warning=True)]

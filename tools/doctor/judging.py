"""What is wrong with what the members know: pure functions, so that every case can be tested without a cluster."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import TypeVar

from tools.doctor.facts import MISSING, NodeFacts
from tools.doctor.findings import Finding, Names, count

V = TypeVar("V")
SKEW = 1.0
"""Seconds by which a clock may differ."""
SLOW = 2.0
"""Times the median that a rank may take for the same product."""


def who_has(values: Sequence[V], names: Names, show: Callable[[V], str] = str) -> str:
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


def judge_versions(reports: Sequence[Mapping[str, str]], names: Names) -> list[Finding]:
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


def judge_calls(calls: Sequence[str], names: Names) -> list[Finding]:
    """A finding where the members were not called alike."""
    if len(set(calls)) == 1:
        return []
    text = f"options differ: {who_has(calls, names)}. Give the same on every node."
    return [Finding(text=text, about=odd_ones(calls))]


def judge_nodes(nodes: Sequence[NodeFacts], names: Names, *, gpu: bool = False) -> list[Finding]:
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


def judge_addresses(nodes: Sequence[NodeFacts], names: Names) -> list[Finding]:
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


def judge_clocks(offsets: Mapping[int, tuple[float, float]], names: Names) -> list[Finding]:
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


def judge_products(seconds: Sequence[float], names: Names) -> list[Finding]:
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

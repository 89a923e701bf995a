"""What a check has found, whom it is about, and how ranks and nodes are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class Names:
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

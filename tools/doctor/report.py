"""What rank 0 shows and writes: the nodes, the collectives, what was found, and whether training would start."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.common.machine import format_table, write_json
from tools.common.units import in_bytes
from tools.doctor.collective_checks import HEADER, WireFigures, as_json
from tools.doctor.facts import NodeFacts
from tools.doctor.rules import Finding, as_lines, count, numbers

NAME = "tools.doctor"
_log = logging.getLogger(NAME)
_NODES = ("node", "host", "ranks", "GPUs", "cores", "memory", "clock ms")


@dataclass(kw_only=True)
class Report:
    """Filled as the checks go on."""

    arguments: Sequence[str] = ()
    output: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    nodes: Sequence[NodeFacts] = ()
    clocks: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds ahead of node 0, and their error, by node."""
    directories: Sequence[Path] = ()
    cube: str = ""
    wires: Sequence[WireFigures] = ()
    products: Sequence[float] = ()
    """Seconds, by rank."""
    advice: str = ""

    def found(self, findings: Sequence[Finding]) -> None:
        """Tells them on standard error, and writes the file where training would not start."""
        self.findings += findings
        _log.error("%s", as_lines(findings, NAME))
        if not self.ready:
            self.write()

    @property
    def ready(self) -> bool:
        return all(finding.warning for finding in self.findings)

    def conclude(self, ranks: int) -> None:
        """The last thing that is shown where training would start."""
        nodes = self.nodes
        lines = [*self._shown_nodes()]
        lines.append("the same everywhere: " + ", ".join(f"{name} {value}" for name, value in self.versions.items()))
        lines += [f"directory {path}: the same place on all nodes, writable" for path in self.directories]
        if self.wires:
            lines += ["", f"{self.cube}, all groups at once, the slowest group of each:"]
            lines += format_table(HEADER, [figures.row() for figures in self.wires])
        lines += [self.advice] if self.advice else []
        self.write()
        print("\n".join([*lines, "", f"ready: {count(ranks, 'rank')} on {count(len(nodes), 'node')}"]), flush=True)

    def write(self) -> None:
        """The JSON file, if one is asked for."""
        if self.output is None:
            return
        content: dict[str, Any] = {
            "command": shlex.join(["python", "-m", NAME, *self.arguments]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "ready": self.ready,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "versions": dict(self.versions),
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "clocks": {str(node): {"ahead": ahead, "error": error} for node, (ahead, error) in self.clocks.items()},
            "directories": [str(path) for path in self.directories],
            "cube": self.cube,
            "collectives": as_json(self.wires),
            "product_seconds": list(self.products),
            "advice": self.advice,
        }
        write_json(self.output, content)

    def _shown_nodes(self) -> list[str]:
        rows, first = [], 0
        for number, node in enumerate(self.nodes):
            ahead, error = self.clocks.get(number, (0.0, 0.0))
            clock = f"{ahead * 1e3:+.1f} ± {error * 1e3:.1f}" if number in self.clocks else "-"
            rows.append(
                [
                    str(number),
                    node.host,
                    numbers(range(first, first + node.ranks)),
                    _gpus(node),
                    str(node.cores),
                    "-" if node.memory is None else in_bytes(node.memory),
                    clock,
                ]
            )
            first += node.ranks
        return format_table(_NODES, rows)


def _gpus(node: NodeFacts) -> str:
    kinds = [f"{name} {in_bytes(memory)}" for name, memory in zip(node.gpus, node.gpu_memory, strict=False)]
    told = " + ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return told + (f" ({'/'.join(node.links)})" if node.links else "") if told else "-"

"""One row of an explanation, and how equal ones become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from tensor3d.distributed.comm_stats import Key
from tensor3d.distributed.cube_shape import AXES

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One layer by itself, without the layers inside it. All counts are of one rank."""

    name: str
    """As in `named_modules`, `layers.0-11.mlp.up` for equal layers that were folded into one row; or what else sends
    and keeps, in brackets."""
    kind: str
    """The module's class."""
    times: int = 1
    """Layers that this row stands for. Its other numbers are those of one."""
    faces: tuple[str, str] = ("", "")
    """Face of the input and of the output, `"y"` or `"z"`; `""` for what lies on none or is not known."""
    input_shape: Shape | None = None
    """Local shape of the first tensor that goes in; None where the layer was not called."""
    output_shape: Shape | None = None
    """Local shape of the first tensor that comes out."""
    parameters: int = 0
    """Elements of its parameters, of the whole model. A tied parameter counts where it comes first."""
    parameters_here: int = 0
    """Those on this rank."""
    forward: Counter[Key] = field(default_factory=Counter)
    """Bytes received by (axis, kind of collective) in the forward pass."""
    backward: Counter[Key] = field(default_factory=Counter)
    """The same in the backward pass, recomputation included."""
    saved: int = 0
    """Bytes that it keeps for backward, parameters left out. What several keep counts for the first of them, and for a
    row of its own if they are equal layers of a stack (an index of the batch)."""

    @property
    def received(self) -> Counter[Key]:
        """Bytes received by (axis, kind of collective)."""
        return self.forward + self.backward

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "times": self.times,
            "face_in": self.faces[0],
            "face_out": self.faces[1],
            "input_shape": self.input_shape,
            "output_shape": self.output_shape,
            "parameters": self.parameters,
            "parameters_here": self.parameters_here,
            "received_forward": named(self.forward),
            "received_backward": named(self.backward),
            "saved": self.saved,
        }


def by_axis(received: Counter[Key]) -> Counter[str]:
    """Bytes by axis alone."""
    total: Counter[str] = Counter()
    for (axis, _), count in received.items():
        total[axis] += count
    return total


def named(received: Counter[Key]) -> dict[str, int]:
    """Bytes by `"y all-gather"` and the like, in order of their names."""
    return {f"{axis} {kind}": count for (axis, kind), count in sorted(received.items())}


# --- equal layers ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Layer:
    """Layer `first` of a stack, and those up to `last` that are like it."""

    first: int
    last: int
    rows: list[ReportRow]

    def is_followed_by(self, number: int, rows: list[ReportRow], depth: int) -> bool:
        if number != self.last + 1:
            return False
        return [_renamed(row, depth, "") for row in rows] == [_renamed(row, depth, "") for row in self.rows]

    def folded(self, depth: int) -> list[ReportRow]:
        if self.first == self.last:
            return self.rows
        count, name = self.last - self.first + 1, f"{self.first}-{self.last}"
        return [replace(_renamed(row, depth, name), times=row.times * count) for row in self.rows]


def folded(rows: Iterable[ReportRow], depth: int = 0) -> list[ReportRow]:
    """The rows, with layers of a stack that follow each other and are equal in all but their number as one.

    Args:
        depth: parts of a name, between its dots, that the rows have in common.
    """
    result: list[ReportRow] = []
    layer: _Layer | None = None
    for part, members in groupby(rows, key=lambda row: _part(row, depth)):
        group = list(members)
        inner = group if part is None else folded(group, depth + 1)
        number = int(part) if part is not None and part.isdecimal() else None
        if number is not None and layer is not None and layer.is_followed_by(number, inner, depth):
            layer.last = number
            continue
        result += layer.folded(depth) if layer else []
        layer = None if number is None else _Layer(first=number, last=number, rows=inner)
        result += inner if number is None else []
    return result + (layer.folded(depth) if layer else [])


def _part(row: ReportRow, depth: int) -> str | None:
    parts = row.name.split(".")
    return parts[depth] if depth < len(parts) else None


def _renamed(row: ReportRow, depth: int, part: str) -> ReportRow:
    parts = row.name.split(".")
    return replace(row, name=".".join([*parts[:depth], part, *parts[depth + 1 :]]))


# --- Rows as a table for people: bytes in units, a column for each axis that something is sent over -------------------

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LEFT = 4  # columns of words; those of numbers stand on the right


def table(rows: Sequence[ReportRow]) -> list[str]:
    """The lines of a table of `rows`, with their sums and a legend below."""
    axes = _axes(rows)
    head = ["layer", "kind", "faces", "local shapes", "parameters", "here", *[f"over {axis}" for axis in axes], "saved"]
    lines = [head, *[_cells(row, axes) for row in rows], _totals(rows, axes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [_line(line, widths) for line in lines]
    rule = "-" * max(map(len, text))
    return [text[0], rule, *text[1:-1], rule, text[-1], "", *_legend(rows)]


def amount(size: int) -> str:
    """`1536` bytes as `"1.5 KiB"`."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _axes(rows: Sequence[ReportRow]) -> list[str]:
    """Single axes first, then those taken together, each in the cube's order."""
    found = {axis for row in rows for axis in by_axis(row.received)}
    order: list[str] = list(AXES)
    return sorted(found, key=lambda name: (name.count("+"), [order.index(part) for part in name.split("+")]))


def _cells(row: ReportRow, axes: list[str]) -> list[str]:
    received = by_axis(row.received)
    return [
        (row.name or "(the model itself)") + (f"  x{row.times}" if row.times > 1 else ""),
        row.kind,
        " -> ".join(face or "." for face in row.faces) if any(row.faces) else "",
        _shapes(row.input_shape, row.output_shape),
        f"{row.parameters:,}" if row.parameters else "",
        f"{row.parameters_here:,}" if row.parameters else "",
        *[amount(received[axis]) if received[axis] else "" for axis in axes],
        amount(row.saved) if row.saved else "",
    ]


def _shapes(before: Shape | None, after: Shape | None) -> str:
    if before is None and after is None:
        return ""
    return " -> ".join("." if shape is None else f"({', '.join(map(str, shape))})" for shape in (before, after))


def _totals(rows: Sequence[ReportRow], axes: list[str]) -> list[str]:
    received: Counter[str] = Counter()
    for row in rows:
        for axis, count in by_axis(row.received).items():
            received[axis] += row.times * count
    parameters = sum(row.times * row.parameters for row in rows)
    here = sum(row.times * row.parameters_here for row in rows)
    saved = sum(row.times * row.saved for row in rows)
    numbers = [f"{parameters:,}", f"{here:,}", *[amount(received[axis]) for axis in axes], amount(saved)]
    return ["total", "", "", f"received {amount(received.total())}", *numbers]


def _line(cells: list[str], widths: list[int]) -> str:
    columns = [
        cell.ljust(width) if number < _LEFT else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(columns).rstrip()


def _legend(rows: Sequence[ReportRow]) -> list[str]:
    lines = [
        "parameters: elements, of the whole model and here; over <axis>: bytes that this rank receives, forward and",
        "backward; saved: bytes kept for backward, without parameters. Each row is of a layer without those inside it.",
    ]
    if any(row.times > 1 for row in rows):
        lines.append("xN: so many equal layers; the numbers are those of one.")
    return lines

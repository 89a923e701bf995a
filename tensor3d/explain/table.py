"""Rows as a table for people: bytes in units, a column for each axis that something is sent over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tensor3d.explain.row import Row, Shape, by_axis
from tensor3d.shape import AXES

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LEFT = 4  # columns of words; those of numbers stand on the right


def table(rows: Sequence[Row]) -> list[str]:
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


def _axes(rows: Sequence[Row]) -> list[str]:
    """Single axes first, then those taken together, each in the cube's order."""
    found = {axis for row in rows for axis in by_axis(row.received)}
    order: list[str] = list(AXES)
    return sorted(found, key=lambda name: (name.count("+"), [order.index(part) for part in name.split("+")]))


def _cells(row: Row, axes: list[str]) -> list[str]:
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


def _totals(rows: Sequence[Row], axes: list[str]) -> list[str]:
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


def _legend(rows: Sequence[Row]) -> list[str]:
    lines = [
        "parameters: elements, of the whole model and here; over <axis>: bytes that this rank receives, forward and",
        "backward; saved: bytes kept for backward, without parameters. Each row is of a layer without those inside it.",
    ]
    if any(row.times > 1 for row in rows):
        lines.append("xN: so many equal layers; the numbers are those of one.")
    return lines

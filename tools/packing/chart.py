"""The picture of a report: how full the packs are, by method and by the limit on the sequences of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tools.packing.measure import Row, limit_text
from tools.plot import COLOURS, save

MARKERS = "osD^vP"
# Methods often agree: under dashes and smaller marks the one drawn before stays visible.
_STYLES: tuple[Any, ...] = ("-", "-", (0, (3, 3)), "-", (0, (1, 1.5)))
# Shares of the slots that stay empty; a full pack has no place on a logarithmic axis.
_TICKS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001)
_LEAST = 0.00005


def draw_report(rows: Sequence[Row], capacity: int, output: Path) -> None:
    """Writes a PNG: one line a method, and the bound dashed.

    The axis is logarithmic in what stays empty, since 99.9 and 99.98 % would lie on one another otherwise.
    """
    save(figure_of(rows, capacity), output)


def figure_of(rows: Sequence[Row], capacity: int) -> Figure:
    """The picture, before it is written."""
    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    axes = figure.add_subplot()
    depths = list(dict.fromkeys(row.max_sequences for row in rows))
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [row for row in rows if row.method == method]
        style = _STYLES[number % len(_STYLES)]
        axes.plot(
            [depths.index(row.max_sequences) for row in own],
            [max(_LEAST, 1 - row.efficiency) for row in own],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=10 if style == "-" else 6,
            linewidth=2.4,
            linestyle=style,
            label=method,
        )
    _draw_bound(axes, rows, depths)
    axes.set_xticks(range(len(depths)), [limit_text(depth) for depth in depths])
    axes.set_xlabel("sequences of a pack, at most", fontsize=12)
    axes.set_ylabel("slots that hold a token (%)", fontsize=12)
    _scale(axes)
    axes.set_title(f"Fill of packs of {capacity} slots", fontsize=13, loc="left")
    axes.tick_params(labelsize=11)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10.5, frameon=False)
    return figure


def _draw_bound(axes: Axes, rows: Sequence[Row], depths: Sequence[int | None]) -> None:
    first = {row.max_sequences: row for row in reversed(rows)}
    # Tokens by slots of any plan, were it as short as the bound.
    shares = [first[depth].efficiency * first[depth].packs / first[depth].lower_bound_packs for depth in depths]
    kinds = " and ".join(sorted({row.lower_bound_kind for row in rows}))
    axes.plot(
        range(len(depths)),
        [max(_LEAST, 1 - share) for share in shares],
        color="0.25",
        linestyle="--",
        linewidth=1.3,
        label=f"bound ({kinds})",
        zorder=3,
    )


def _scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda empty, _: f"{100 * (1 - empty):.4g}"))

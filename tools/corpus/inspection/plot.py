"""The histograms of an inspection as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.corpus.inspection.histogram import Histogram
from tools.plot import COLOURS, save


def draw_histograms(histograms: Sequence[Histogram], title: str, output: Path) -> None:
    """Writes a PNG, one histogram below the other."""
    save(figure_of(histograms, title), output)


def figure_of(histograms: Sequence[Histogram], title: str) -> Figure:
    """The picture, before it is written."""
    figure = Figure(figsize=(9.0, 0.6 + 3.6 * len(histograms)), layout="constrained")
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    grid = figure.subplots(len(histograms), 1, squeeze=False)
    for number, histogram in enumerate(histograms):
        _draw(grid[number, 0], histogram, COLOURS[number % len(COLOURS)])
    return figure


def _draw(axes: Axes, histogram: Histogram, colour: str) -> None:
    bins = histogram.bins()
    shares = [100 * found.held / histogram.total for found in bins]
    axes.bar(range(len(bins)), shares, width=0.92, color=colour)
    axes.set_xticks(range(len(bins)), [_label(found.low, found.high) for found in bins], rotation=40, ha="right")
    axes.set_xlabel(f"{histogram.title}; mean {histogram.mean:,.1f}", fontsize=12)
    axes.set_ylabel(f"share of {histogram.total:,} (%)", fontsize=12)
    axes.tick_params(labelsize=10)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}\N{EN DASH}{high:,}"

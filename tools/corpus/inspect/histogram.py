"""How often each length occurs, exactly; in bins when it is shown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.common.plotting import COLOURS, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLOCK = 1 << 20
_BINS = 16
_BAR = 40


class Bin(NamedTuple):
    """Lengths from `low` to `high`, both counted."""

    low: int
    high: int
    held: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """Lengths that occur, ascending, and how often each does."""

    title: str
    """What is counted, as "tokens of a sequence"."""
    lengths: NDArray[np.int64]
    """int64 (n,)"""
    counts: NDArray[np.int64]
    """int64 (n,), above 0."""
    doubling: bool
    """Bins that double, for lengths without a limit; else bins of one width."""

    @classmethod
    def of_counts(cls, title: str, counts: Mapping[int, int], *, doubling: bool = True) -> Histogram:
        lengths = sorted(counts)
        return cls(
            title=title,
            lengths=np.array(lengths, dtype=np.int64),
            counts=np.array([counts[length] for length in lengths], dtype=np.int64),
            doubling=doubling,
        )

    @classmethod
    def of_lengths(cls, title: str, parts: Iterable[NDArray[np.integer]], *, doubling: bool) -> Histogram:
        """Of arrays, which may be memory maps: they are read a block at a time."""
        total: dict[int, int] = {}
        for part in parts:
            for begin in range(0, len(part), _BLOCK):
                found, counts = np.unique(part[begin : begin + _BLOCK], return_counts=True)
                for length, count in zip(found.tolist(), counts.tolist(), strict=True):
                    total[length] = total.get(length, 0) + count
        return cls.of_counts(title, total, doubling=doubling)

    @property
    def total(self) -> int:
        """Things counted."""
        return int(self.counts.sum())

    @property
    def sum(self) -> int:
        """Of all lengths."""
        return int(self.lengths @ self.counts)

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.total)

    def quantile(self, share: float) -> int:
        """The smallest length that so large a share does not exceed; 0 of nothing."""
        if not self.total:
            return 0
        place = np.searchsorted(np.cumsum(self.counts), share * self.total)
        return int(self.lengths[min(int(place), len(self.lengths) - 1)])

    def dense(self, longest: int) -> NDArray[np.int64]:
        """int64 (longest + 1,): entry `i` counts those of length `i`, as planners take it."""
        counts = np.zeros(longest + 1, dtype=np.int64)
        counts[self.lengths] = self.counts
        return counts

    def bins(self) -> list[Bin]:
        """From the first to the last that holds anything."""
        if not self.total:
            return []
        low, high = int(self.lengths[0]), int(self.lengths[-1])
        edges = _doubling(low, high) if self.doubling else _even(high)
        sums = np.concatenate(([0], np.cumsum(self.counts)))
        places = sums[np.searchsorted(self.lengths, edges)]
        bins = [
            Bin(begin, end - 1, int(after - before))
            for begin, end, before, after in zip(edges, edges[1:], places, places[1:], strict=False)
        ]
        filled = [place for place, found in enumerate(bins) if found.held]
        return bins[filled[0] : filled[-1] + 1]

    def text(self) -> Iterator[str]:
        """Lines: a summary, then a bar for each bin."""
        if not self.total:
            yield f"{self.title}: there are none"
            return
        yield (
            f"{self.title}: mean {self.mean:,.1f}, median {self.quantile(0.5):,}, "
            f"95 % up to {self.quantile(0.95):,}, at most {int(self.lengths[-1]):,}"
        )
        bins = self.bins()
        tallest = max(found.held for found in bins)
        width = len(f"{bins[-1].high:,}")
        for found in bins:
            bar = "█" * round(_BAR * found.held / tallest) or ("▏" if found.held else "")
            share = 100 * found.held / self.total
            yield (
                f"  {found.low:>{width},} to {found.high:>{width},}  {bar:<{_BAR}} {found.held:>14,} {share:>5.1f} %"
            )

    def values(self) -> dict[str, object]:
        """For JSON."""
        return {
            "title": self.title,
            "mean": round(self.mean, 3),
            "median": self.quantile(0.5),
            "percentile_95": self.quantile(0.95),
            "largest": int(self.lengths[-1]) if len(self.lengths) else 0,
            "bins": [list(found) for found in self.bins()],
        }


def _doubling(low: int, high: int) -> list[int]:
    """Edges 0, 1, 2, 4, ...: the last one is above `high`."""
    edges = [0, 1]
    while edges[-1] <= high:
        edges.append(2 * edges[-1])
    return edges if low == 0 else edges[1:]


def _even(high: int) -> list[int]:
    """Edges of at most `_BINS` bins of one width, the last of which ends at `high` or soon after it.

    They begin with 1: lengths end at a power of two in most recipes, so bins are 1 to 32, 33 to 64 and so on.
    """
    width = max(1, -(-high // _BINS))
    return list(range(1, high + width + 1, width))


def draw_histograms(histograms: Sequence[Histogram], title: str, output: Path) -> None:
    """Writes a PNG, one histogram below the other."""
    save(figure_of(histograms, title), output)


def figure_of(histograms: Sequence[Histogram], title: str) -> Figure:
    """The picture, before it is written."""
    figure = new_figure(9.0, 0.6 + 3.6 * len(histograms))
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
    plain(axes, "y")


def _label(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}\N{EN DASH}{high:,}"

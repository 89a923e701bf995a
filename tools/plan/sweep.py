"""`--ranks 8,64,512`: the best plan of each kind on clusters of several sizes, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tensor3d.planning.cluster import Cluster
from tensor3d.planning.search import Plan, Search
from tools.bench.machine import aligned
from tools.dry_run import in_time
from tools.plan.kinds import KINDS, best_of_kinds
from tools.plan.tables import inside, mfu, spent

_APART = 1.01
HEADER = ("ranks", "pick", "inside a node", "memory for", "step", "MFU", "limit", *KINDS)
_STYLES = {
    "data": ("#E69F00", "v"),
    "fully sharded": ("#CC79A7", "^"),
    "1-D": ("#D55E00", "s"),
    "2-D": ("#009E73", "D"),
    "cube": ("#0072B2", "o"),
    "other": ("0.35", "x"),
}  # Okabe and Ito's colours, which colour-blind readers can tell apart


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cluster of one size."""

    cluster: Cluster
    found: Search

    @property
    def best(self) -> dict[str, Plan]:
        """By kind."""
        return best_of_kinds(self.found.plans)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Between two sizes next to each other one kind overtakes another."""

    faster: str
    slower: str
    after: int
    """Ranks: the last at which `slower` was ahead."""
    at: int
    """Ranks: the first at which `faster` is ahead."""


def crossings(points: Mapping[int, Point]) -> list[Crossing]:
    """All of them, of kinds that exist at both sizes and are a hundredth apart."""
    found, ranks = [], sorted(points)
    seconds = {size: {kind: plan.time.total for kind, plan in points[size].best.items()} for size in ranks}
    for before, after in pairwise(ranks):
        both = [kind for kind in KINDS if kind in seconds[before] and kind in seconds[after]]
        found += [
            Crossing(faster=one, slower=two, after=before, at=after)
            for one in both
            for two in both
            if seconds[before][one] > _APART * seconds[before][two]
            and _APART * seconds[after][one] < seconds[after][two]
        ]
    return found


def table(points: Mapping[int, Point], compute: str) -> list[str]:
    """A line for each size: the pick, and how much longer the best of each kind takes."""
    rows = []
    for ranks, point in sorted(points.items()):
        if not point.found.plans:
            rows.append((f"{ranks:,}", "none fits", *(("-",) * (len(HEADER) - 2))))
            continue
        pick, best = point.found.plans[0], point.best
        others = [f"{best[kind].time.total / pick.time.total:.2f}" if kind in best else "-" for kind in KINDS]
        share = mfu(pick, point.cluster, compute)
        place = inside(pick.shape, point.cluster)
        told = (spent(pick), in_time(pick.time.total), f"{share:.1%}", pick.time.limit)
        rows.append((f"{ranks:,}", str(pick.shape), place, *told, *others))
    return aligned(HEADER, rows)


def told(found: Sequence[Crossing]) -> list[str]:
    return [
        f"{each.faster} overtakes {each.slower} between {each.after:,} and {each.at:,} ranks" for each in found
    ] or ["no kind overtakes another"]


def plot(points: Mapping[int, Point], title: str, path: Path) -> None:
    """How much longer than the pick each kind takes, against ranks: where two lines cross, one kind overtakes another.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # an extra
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib. Install it with pip install 'tensor3d[pretrain]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for kind in KINDS:
        line = [
            (ranks, point.best[kind].time.total / point.found.plans[0].time.total)
            for ranks, point in sorted(points.items())
            if kind in point.best
        ]
        if line:
            colour, marker = _STYLES[kind]
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=kind, linewidth=1.5, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="predicted time of a step over the pick's", title=title)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    sizes = sorted(points)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    draft = path.with_name(path.name + ".partial")
    figure.savefig(draft, format="png", dpi=150)
    pyplot.close(figure)
    draft.replace(path)

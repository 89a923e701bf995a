"""`python -m tools.packing report`: every planner at several limits on the sequences of a pack, side by side."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing import PLANNERS, LowerBound, PackingPlan, Planner
from tools.common.log import progress
from tools.common.plotting import COLOURS, MARKERS, check_picture, new_figure, plain, save
from tools.packing.histogram import HistogramSource

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- Plans of one histogram by several planners at several limits, timed and compared with the bound ------------------

_log = logging.getLogger(__name__)
ALL = "all"
DEPTHS: tuple[int | None, ...] = (2, 3, 4, 8, 12, 16, None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan."""

    method: str
    max_sequences: int | None
    """Sequences of a pack, at most; None: no limit but the capacity."""
    packs: int
    efficiency: float
    """Share of the token slots that hold a token, 0 to 1."""
    packing_factor: float
    """Sequences per pack, on average."""
    seconds: float
    """For planning alone, without what is computed once a process."""
    lower_bound_packs: int
    """Packs that no plan with this limit can do without."""
    lower_bound_kind: Literal["lp", "tokens"]


def planners_of(method: str) -> Mapping[str, Planner]:
    """Those that are asked for, by name. Raises ValueError for a name that there is not."""
    if method != ALL and method not in PLANNERS:
        raise ValueError(f"--method must be one of {', '.join(PLANNERS)}, or {ALL}. Got {method}.")
    return {name: planner for name, planner in PLANNERS.items() if method in (ALL, name)}


def measure(
    counts: NDArray[np.int64],
    capacity: int,
    planners: Mapping[str, Planner],
    depths: Sequence[int | None],
    *,
    skip_refusals: bool,
) -> list[Row]:
    """Plans with each planner at each limit.

    Args:
        counts: int64 (lengths,): sequences of each length.
        capacity: token slots of a pack.
        planners: by name.
        depths: limits on the sequences of a pack.
        skip_refusals: whether a method that refuses a limit is left out with a line on stderr, or ends the report.

    Raises:
        ValueError: what no planner takes, or what one of them refuses.
    """
    for planner in planners.values():
        # What is imported at the first call is not the planner's time.
        planner([0, 2, 1], 4, 2)
    rows = []
    with progress(total=len(depths) * len(planners), leave=False) as bar:
        for depth in depths:
            timed: dict[str, tuple[PackingPlan, float]] = {}
            refusals: dict[str, ValueError] = {}
            for name, planner in planners.items():
                bar.set_description(f"{name}, {limit_text(depth)} sequences a pack")
                start = perf_counter()
                try:
                    timed[name] = planner(counts, capacity, depth), perf_counter() - start
                except ValueError as refusal:
                    refusals[name] = refusal
                bar.update()
            # What all refuse is no fault of a method.
            if refusals and (not skip_refusals or not timed):
                raise next(iter(refusals.values()))
            for name, reason in refusals.items():
                bar.write(f"left out: {name}, {limit_text(depth)} sequences a pack: {reason}", file=sys.stderr)
            rows += list(_rows(timed, depth))
    return rows


def limit_text(depth: int | None) -> str:
    return "any" if depth is None else str(depth)


def _rows(timed: Mapping[str, tuple[PackingPlan, float]], depth: int | None) -> Iterator[Row]:
    bound = _bound([plan for plan, _ in timed.values()])
    for name, (plan, seconds) in timed.items():
        yield Row(
            method=name,
            max_sequences=depth,
            packs=plan.packs,
            efficiency=plan.efficiency,
            packing_factor=plan.packing_factor,
            seconds=seconds,
            lower_bound_packs=bound.packs,
            lower_bound_kind=bound.kind,
        )


def _bound(plans: Sequence[PackingPlan]) -> LowerBound:
    """The bound of plans for the same sequences and limits: one that a planner found on its way costs nothing."""
    known = [plan.known_bound for plan in plans if plan.known_bound is not None]
    return max(known, key=lambda bound: bound.packs) if known else plans[0].lower_bound


# --- The command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReportCommand(HistogramSource):
    """Plan with every method and show how full the packs are, how long it took, and what no plan can beat."""

    method: str = ALL
    """One of padded, spfhp, lpfhp, nnlshp, lp; or all."""
    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: several limits side by side."""
    json: bool = False
    """Print a list of JSON objects instead of the table."""
    plot: Path | None = None
    """PNG file to draw: fill against the limit on sequences."""

    def run(self) -> int:
        planners = planners_of(self.method)
        check_picture(self.plot, others=[self.histogram])
        counts, capacity = self.lengths()
        depths = DEPTHS if self.max_sequences is None else (self.max_sequences,)
        rows = measure(counts, capacity, planners, depths, skip_refusals=self.method == ALL)
        if self.json:
            print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        else:
            print("\n".join(table(rows, counts, capacity)))
        if self.plot is not None:
            draw_report(rows, capacity, self.plot)
            _log.info("written: %s", self.plot)
        return 0


def table(rows: Sequence[Row], counts: NDArray[np.int64], capacity: int) -> Iterator[str]:
    """Lines: what was packed, then a line a plan."""
    tokens = int(counts @ np.arange(len(counts)))
    yield f"{int(counts.sum()):,} sequences, {tokens:,} tokens, packs of {capacity}"
    yield ""
    yield f"{'sequences':>9}  {'method':<8}{'packs':>13}{'fill %':>10}{'factor':>9}{'seconds':>10}{'above bound':>19}"
    for index, row in enumerate(rows):
        if index and row.max_sequences != rows[index - 1].max_sequences:
            yield ""
        above = f"{row.packs - row.lower_bound_packs:+,} {row.lower_bound_kind}"
        yield (
            f"{limit_text(row.max_sequences):>9}  {row.method:<8}{row.packs:>13,}{100 * row.efficiency:>10.4f}"
            f"{row.packing_factor:>9.4f}{row.seconds:>10.3f}{above:>19}"
        )
    yield ""
    yield "factor: sequences per pack. above bound: packs more than the bound, which is that of a linear programme (lp)"
    yield "or, where that is too large, of the tokens (tokens)."


# --- The picture: how full the packs are, by method and by the limit on the sequences of a pack -----------------------

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
    figure = new_figure()
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
    plain(axes)
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
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda empty, _: f"{100 * (1 - empty):.4g}"))

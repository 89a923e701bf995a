"""Pictures of scaling, and `bench plot`, which draws them from the JSON files of earlier runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tensor3d import CubeShape
from tools.bench.harness.benchmark import Subcommand
from tools.common.files import WRONG_ENTRIES, parsed_json, read_file, what_is_wrong
from tools.common.plotting import COLOURS, MARKERS, check_drawing, mark, new_figure, plain, plain_numbers, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- The boxes that scaling compares: for a number of ranks, one of each known kind -----------------------------------


def cube(ranks: int) -> CubeShape:
    """The box nearest to a cube; the smallest side is x, the largest y (Bian et al. 2021 for equal sides)."""
    sides = [s for s in product(_divisors(ranks), repeat=2) if ranks % math.prod(s) == 0]
    boxes = [(x, y, ranks // (x * y)) for x, y in sides]
    x, y, z = min((box for box in boxes if box[0] <= box[2] <= box[1]), key=lambda box: (sum(box), box))
    return CubeShape(x=x, y=y, z=z)


def one_dimensional(ranks: int) -> CubeShape:
    """Megatron's tensor parallelism, with sequence parallelism: (1, P, 1)."""
    return CubeShape(y=ranks)


def two_dimensional(ranks: int) -> CubeShape:
    """(1, q, q). Raises ValueError where the number is no square."""
    side = math.isqrt(ranks)
    if side**2 != ranks:
        raise ValueError(f"{ranks} ranks are no square.")
    return CubeShape(y=side, z=side)


def fully_sharded(ranks: int) -> CubeShape:
    """Every rank has a part of each weight and gathers what it needs: (P, 1, 1)."""
    return CubeShape(x=ranks)


def copies(ranks: int) -> CubeShape:
    """Data parallelism: P copies of one rank."""
    return CubeShape(data=ranks)


KINDS: Mapping[str, Callable[[int], CubeShape]] = {
    "cube": cube,
    "1d": one_dimensional,
    "2d": two_dimensional,
    "fsdp": fully_sharded,
    "data": copies,
}
"""Kinds of boxes by name; each makes the box of so many ranks, or raises ValueError where there is none."""
OTHER = "other"


def kinds_of(shape: CubeShape) -> tuple[str, ...]:
    """All the kinds that a box is of. With few ranks several kinds are the same box."""
    found = []
    for name, make in KINDS.items():
        try:
            found += [name] if make(shape.ranks) == shape else []
        except ValueError:
            continue
    return tuple(found) or (OTHER,)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


# --- Pictures of scaling ----------------------------------------------------------------------------------------------

Result = Mapping[str, Any]
"""One box of "results" in a JSON file of `bench strong` or `bench weak`."""
SCALINGS = ("strong", "weak")
_STYLES = {**dict(zip(KINDS, zip(COLOURS, MARKERS, strict=True), strict=False)), OTHER: ("0.35", "x")}
_NAMES = {
    "cube": "nearest to a cube",
    "1d": "1-D, 1×P×1",
    "2d": "2-D, 1×Q×Q",
    "fsdp": "fully sharded, P×1×1",
    "data": "data parallel",
    OTHER: "other boxes",
}
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of the quantities."""

    label: str
    key: str
    """Of a result."""
    unit: float = 1.0
    shared_out: bool = False
    """Whether P ranks ideally have 1/P of it in strong scaling."""


TIME = "seconds_median"
PANELS = (
    Panel(label="time of a step (s)", key=TIME, shared_out=True),
    Panel(label="received in a step, busiest rank (MiB)", key="bytes_received", unit=_MIB),
    Panel(label="kept for backward, one rank (MiB)", key="saved_bytes", unit=_MIB, shared_out=True),
    Panel(label="most tensor memory at once, one rank (MiB)", key="peak_tensor_bytes", unit=_MIB, shared_out=True),
)


@dataclass(frozen=True, kw_only=True)
class PlotCommand(Subcommand):
    """Draw time, traffic and memory against ranks, from the JSON files of `strong` or `weak`."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """JSON files of the same recipe; those of one kind of scaling, such as runs on 8, 64 and 512 ranks, are drawn
    together."""
    output_dir: Path = Path()
    """Folder for strong.png and weak.png."""

    def run(self, arguments: Sequence[str]) -> int:
        if not self.output_dir.is_dir():
            raise ValueError(f"--output-dir must be a folder that exists. Got {self.output_dir}.")
        check_drawing("plot")
        for scaling, results in read_results(self.files).items():
            picture = self.output_dir / f"{scaling}.png"
            save(draw(scaling, results), picture)
            print(f"written: {picture}")
        sys.stdout.flush()
        return 0


def read_results(files: Sequence[Path]) -> dict[str, list[Result]]:
    """The results of all files, by kind of scaling.

    Raises:
        ValueError: no file, or one that neither `strong` nor `weak` has written.
        OSError: one that cannot be read, or is a folder, a FIFO or a device.
    """
    found: dict[str, list[Result]] = {}
    for path in files:
        try:
            content = parsed_json(read_file(path), unique=True)
            scaling, results = content["benchmark"], content["results"]
            if scaling not in [*SCALINGS]:
                raise ValueError(f"it is of tools.bench {scaling!r:.40}")
            if not isinstance(results, list) or not results:
                raise ValueError("it has no results")
            for number, result in enumerate(results):
                _check_result(result, f"its result {number}")
        except WRONG_ENTRIES as problem:
            raise ValueError(
                f"a file that tools.bench strong or weak has written by --output is needed. Got {path}: "
                f"{what_is_wrong(problem)}."
            ) from None
        found.setdefault(scaling, []).extend(results)
    if not found:
        raise ValueError("name at least one file that tools.bench strong or weak has written by --output.")
    return found


_LARGEST = 2**62
"""Of numbers in a picture, whose axes end somewhere beyond that."""


def _check_result(result: Any, where: str) -> None:
    """Raises ValueError unless it has what is drawn. Peaks of many ranks are not measured."""
    if not isinstance(result, dict):
        raise ValueError(f"{where} is no object")
    for name in ("ranks", "global_batch"):
        if type(result[name]) is not int or not 0 < result[name] < _LARGEST:
            raise ValueError(f"{where} has no number of at least 1 for {name!r}: {result[name]!r:.40}")
    for panel in PANELS:
        value = result[panel.key]
        if value is not None and not (type(value) in (int, float) and 0 <= value < _LARGEST):
            raise ValueError(f"{where} has no number of at least 0 for {panel.key!r}: {value!r:.40}")
    if not result[TIME]:
        raise ValueError(f"{where} has no time of a step, {TIME!r}")
    kinds = result["kinds"]
    if not isinstance(kinds, list) or not kinds or any(kind not in list(_STYLES) for kind in kinds):
        raise ValueError(f"{where} is of no known kind of box ({', '.join(_STYLES)}): {kinds!r:.40}")
    if not isinstance(result["cube"], str):
        raise ValueError(f"{where} has no name for 'cube': {result['cube']!r:.40}")


def draw(scaling: str, results: Sequence[Result]) -> Figure:
    """Four panels; in each a line for each kind of boxes, and in grey what is ideal.

    Args:
        scaling: "strong" or "weak".
    """
    figure = new_figure(11.0, 8.0)
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _draw_panel(axes, panel, scaling, results)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10.5)
    batch = sorted({result["global_batch"] for result in results})
    packs = f"{batch[0]} packs a step" if len(batch) == 1 else f"{batch[0]} to {batch[-1]} packs a step"
    figure.suptitle(f"{scaling} scaling, {packs}", fontsize=13)
    return figure


def lines(results: Sequence[Result], key: str) -> dict[str, list[tuple[int, float]]]:
    """(ranks, value) of each kind, ascending. What is 0, as the traffic of one rank, has no place on its scale."""
    found: dict[str, list[tuple[int, float]]] = {}
    for kind in [*KINDS, OTHER]:
        points = [(result["ranks"], result[key]) for result in results if kind in result["kinds"] and result[key] > 0]
        if points:
            found[kind] = sorted(points)
    return found


def _draw_panel(axes: Axes, panel: Panel, scaling: str, results: Sequence[Result]) -> None:
    # Peaks of many ranks are not measured, and one rank receives nothing, for which the scale has no place.
    if not any(result[panel.key] for result in results):
        axes.set_title(f"{panel.label}: none", fontsize=11, loc="left")
        axes.set_axis_off()
        return
    results = [result for result in results if result[panel.key] is not None]
    for kind, points in lines(results, panel.key).items():
        colour, marker = _STYLES[kind]
        ranks, values = zip(*points, strict=True)
        axes.plot(
            ranks,
            [value / panel.unit for value in values],
            color=colour,
            marker=marker,
            linestyle="none" if kind == OTHER else "-",
            linewidth=1.8,
            label=_NAMES[kind],
        )
    _draw_ideal(axes, panel, scaling, results)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_numbers(axes, (1.0, 2.0, 5.0))
    mark(axes, sorted({result["ranks"] for result in results}))
    axes.set_xlabel("ranks")
    axes.set_title(panel.label, fontsize=11, loc="left")
    plain(axes)


def _draw_ideal(axes: Axes, panel: Panel, scaling: str, results: Sequence[Result]) -> None:
    """From the fewest ranks on: 1/P of it where the work is the same, as much where the work grows."""
    if not panel.shared_out:
        return
    numbers = sorted({result["ranks"] for result in results})
    first = min(result[panel.key] for result in results if result["ranks"] == numbers[0]) / panel.unit
    if not first:
        return
    ideal = [first * (numbers[0] / number if scaling == "strong" else 1.0) for number in numbers]
    axes.plot(numbers, ideal, color="0.7", linestyle="--", linewidth=1.2, label="ideal", zorder=1)

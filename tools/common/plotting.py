"""What all pictures share: colours, axes, running means, and a file that is written beside and renamed.

matplotlib takes a second to import, for which nobody should wait who wants no picture: it is imported here, and where
something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tools.common.files import check_output, check_suffix, draft

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
PICTURES = (".png",)
"""How their files are called."""


# Runs on different cubes often have the same curve: under dashes the other one stays visible.
DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def check_picture(path: Path | None, option: str = "--plot", *, others: Iterable[Path | None] = ()) -> None:
    """Raises ValueError where a picture can be neither drawn nor written: better before a measurement than after.

    Args:
        others: as of `check_output`.
    """
    if path is not None:
        check_output(path, option, others=others)
        check_suffix(path, PICTURES, option)
        check_drawing(option)


def check_drawing(what: str) -> None:
    """Raises ValueError where nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{what} needs the package matplotlib: pip install matplotlib.")


def new_figure(width: float = 9.0, height: float = 5.4) -> Figure:
    """An empty picture of that many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain(axes: Axes, grid: Literal["both", "y"] = "both") -> None:
    """A grey grid behind what is drawn, and no frame above and on the right."""
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_numbers(axes: Axes, steps: Sequence[float] | None = None) -> None:
    """Of an axis y of powers: 20 and not 2·10¹.

    Args:
        steps: of each power that are marked. Default: matplotlib's choice.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    if steps is not None:
        axes.yaxis.set_major_locator(LogLocator(subs=tuple(steps)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def mark(axes: Axes, values: Sequence[int]) -> None:
    """Exactly these values, on an axis x of powers."""
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()


def style(number: int) -> dict[str, Any]:
    """Colour and dashes of a curve; no two of the first have the same of both."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}


def save(figure: Figure, output: Path, *, dpi: int = 150) -> None:
    """Writes beside `output` and renames.

    Raises:
        ValueError: there is no such folder.
    """
    check_output(output)
    with draft(output) as file:
        figure.savefig(file, format="png", dpi=dpi)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of `window` points around each; near the ends of as many as there are, the same on both sides.

    Taken around the point and not before it, because a loss that falls would otherwise be shown too high.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    points = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(points, len(values) - 1 - points))
    means: NDArray[np.float64] = (sums[points + half + 1] - sums[points - half]) / (2 * half + 1)
    return means


def window_of(points: int) -> int:
    """An odd number of points for the running mean: a twelfth of them, from 1 to 101."""
    return min(101, points // 12 // 2 * 2 + 1)

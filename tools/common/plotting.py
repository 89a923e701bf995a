"""What all pictures share: colours, running means, and a file that is written beside and renamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tools.common.files import draft

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


# Runs on different cubes often have the same curve: under dashes the other one stays visible.
DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def save(figure: Figure, output: Path) -> None:
    """Writes beside `output` and renames.

    Raises:
        ValueError: there is no such folder.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output must be a file in a folder that exists. Got {output}.")
    with draft(output) as file:
        figure.savefig(file, format="png", dpi=150)


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

"""The picture of `bench library`: one run, or several drawn together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.library_data import FULL, PADDED, SORTED
from tools.bench.library_figures import LOSS_TOLERANCE, SideFigures
from tools.bench.library_operators import Operator
from tools.bench.library_sides import COMPILED, CONTENDERS, MASKED, OURS, PLAIN, ROWS, ROWS_COMPILED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {
    PLAIN: "0.6",
    MASKED: "#56B4E9",
    OURS: "#0072B2",
    ROWS: "#009E73",
    COMPILED: "#E69F00",
    ROWS_COMPILED: "#D55E00",
}
_KINDS = {FULL: "no padding", PADDED: "padded", SORTED: "padded, sorted by length"}


def read_results(path: Path) -> list[SideFigures]:
    """What an earlier run has written.

    Raises:
        ValueError: it is no file of `bench library`, or one of other columns.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["benchmark"] == "library":
            return [_side(result) for result in content["results"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    names = ", ".join(field.name for field in fields(SideFigures))
    raise ValueError(
        f"--also must be files that tools.bench library has written by --output, with the figures {names}. Got {path}."
    )


def _side(result: dict[str, Any]) -> SideFigures:
    operators = result.pop("operators")
    return SideFigures(**result, operators=operators and [Operator(*each) for each in operators])


def draw(results: Sequence[SideFigures]) -> Figure:
    """A row of panels for each preset, in it one for each kind of input: contenders beside one another, by precision.

    A contender has its colour in all of them; a number is its ratio to "transformers-masked".
    """
    from matplotlib.figure import Figure  # it takes a second, for which nobody should wait who wants no picture

    presets = list(dict.fromkeys(side.preset for side in results))
    precisions = [name for name in LOSS_TOLERANCE if any(side.precision == name for side in results)]
    kinds = [kind for kind in _KINDS if any(side.inputs == kind for side in results)]
    figure = Figure(figsize=(1.0 + 4.2 * len(kinds), 1.0 + 3.2 * len(presets)), layout="constrained")
    panels = figure.subplots(len(presets), len(kinds), squeeze=False, sharey="row")
    for row, preset in zip(panels, presets, strict=True):
        first = True
        for axes, kind in zip(row, kinds, strict=True):
            sides = [side for side in results if (side.preset, side.inputs) == (preset, kind)]
            if not sides:
                axes.set_axis_off()
                continue
            _draw_panel(axes, precisions, sides)
            axes.set_title(f"BERT-{preset}, {_KINDS[kind]}", fontsize=11, loc="left")
            if first:
                axes.set_ylabel("real tokens a second")
                axes.tick_params(labelleft=True)
            first = False
    shown = dict(item for axes in figure.axes for item in zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in CONTENDERS if name in shown]
    handles = [shown[name] for name in names]
    columns = min(2 * len(kinds), len(names))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=10.5)
    return figure


def _draw_panel(axes: Axes, precisions: Sequence[str], sides: Sequence[SideFigures]) -> None:
    names = [name for name in CONTENDERS if any(side.contender == name for side in sides)]
    width = 0.84 / len(names)
    for number, name in enumerate(names):
        bars = [side for side in sides if side.contender == name]
        places = [precisions.index(side.precision) + (number + 0.5) * width - 0.42 for side in bars]
        heights = np.array([side.tokens_per_second for side in bars])
        low, high = np.array([side.tokens_per_second_range for side in bars]).T
        axes.bar(
            places,
            heights,
            width=width * 0.94,
            color=_COLOURS[name],
            label=name,
            # Of equal rounds the whole differs by rounding, maybe to the other side.
            yerr=[np.maximum(heights - low, 0), np.maximum(high - heights, 0)],
            error_kw={"elinewidth": 1.0, "ecolor": "0.2"},
        )
        for place, top, side in zip(places, np.maximum(high, heights), bars, strict=True):
            axes.annotate(
                f"{side.ratio:.2f}", (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7.5
            )
    axes.set_xticks(range(len(precisions)), precisions)
    axes.set_xlim(-0.5, len(precisions) - 0.5)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

"""Charts as Vega-Lite specifications, plain dictionaries; the page's script gives them their colours and draws them.

The data are columns, {"run": [...], "step": [...], "value": [...]}: half as long as Vega's rows, which the script
makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.common.plotting import COLOURS, running_mean, window_of

Columns = dict[str, list[Any]]
MOST = 1000
"""Points of a curve in a picture that is a thousand pixels wide."""
_DASHES = [[1, 0], [7, 5], [2, 4], [12, 4, 2, 4]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture with what it says in words."""

    title: str
    unit: str
    """Of its numbers, behind the title; empty for none."""
    spec: dict[str, Any]
    data: Columns
    notes: tuple[str, ...] = ()
    """What is not drawn."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A quantity of one run."""

    run: str
    steps: Sequence[int]
    values: Sequence[float]
    left_out: int = 0
    """Values that are not finite."""
    held_out_steps: Sequence[int] = ()
    held_out_values: Sequence[float] = ()
    smooth: bool = True


def curve(title: str, unit: str, lines: Sequence[Line], runs: Sequence[str]) -> Chart:
    """A quantity against steps: every point thin, a running mean bold, held-out evaluations as circles.

    Args:
        runs: all of the page, so that a run has the same colour in every chart.
    """
    data: Columns = {name: [] for name in ("what", "drawn", "run", "step", "value")}
    notes = []
    for line in lines:
        window = window_of(len(line.values)) if line.smooth else 1
        means = running_mean(np.array(line.values), window).tolist() if window > 1 else ()
        for what, drawn, steps, values in (
            ("step", "thin" if window > 1 else "bold", line.steps, line.values),
            ("mean", "bold", line.steps, means),
            ("held out", "held out", line.held_out_steps, line.held_out_values),
        ):
            shown = thinned(values)
            data["what"] += [what] * len(shown)
            data["drawn"] += [drawn] * len(shown)
            data["run"] += [line.run] * len(shown)
            data["step"] += [steps[place] for place in shown]
            # Six digits of a mean are more than a picture shows; what was logged keeps all of its own.
            data["value"] += [float(f"{values[i]:.6g}") if what == "mean" else values[i] for i in shown]
            if what == "step" and len(shown) < len(values):
                notes.append(
                    f"{line.run}: {len(shown):,} of {len(values):,} points are drawn, the lowest and the highest of "
                    "each stretch."
                )
        if line.left_out:
            notes.append(f"{line.run}: left out, values that are not finite: {line.left_out:,}.")
    steps_axis = {"field": "step", "type": "quantitative", "scale": {"zero": False, "nice": False}}
    common = {
        "x": {**steps_axis, "axis": {"format": ",d", "tickMinStep": 1, "tickCount": 7}},
        "y": _number("value", data["value"]),
        "color": _colour("run", runs),
        "tooltip": _tips("run", "what", "step", "value"),
    }
    near = {"name": "near", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
    under_pointer = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    # Runs on different cubes often have the same curve: under dashes the other one stays visible.
    dashes = {"field": "run", "scale": {"domain": list(runs), "range": _DASHES}, "legend": None}
    marks: dict[str, list[dict[str, Any]]] = {
        "thin": [{"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.35}}],
        "bold": [
            {"mark": {"type": "line", "strokeWidth": 2.2}, "encoding": {"strokeDash": dashes}},
            {"mark": {"type": "point", "size": 40}, "params": [near], "encoding": {"opacity": under_pointer}},
        ],
        "held out": [{"mark": {"type": "point", "filled": True, "size": 60, "opacity": 1}}],
    }
    layers = [
        {**mark, "transform": [{"filter": {"field": "drawn", "equal": drawn}}]}
        for drawn, each in marks.items()
        if drawn in data["drawn"]
        for mark in each
    ]
    return Chart(
        title=title, unit=unit, spec={"height": 220, "encoding": common, "layer": layers}, data=data, notes=tuple(notes)
    )


def bars(title: str, unit: str, data: Columns, *, across: str, value: str, by: str, groups: Sequence[str]) -> Chart:
    """A bar for each `across`, beside one another by `by`."""
    encoding = {
        "x": {"field": across, "type": "ordinal", "axis": {"labelAngle": 0, "labelOverlap": True}},
        "xOffset": {"field": by, "sort": list(groups)},
        "y": _number(value, data[value], zero=True),
        "color": _colour(by, groups),
        "tooltip": _tips(by, across, value),
    }
    return Chart(title=title, unit=unit, spec={"height": 220, "mark": "bar", "encoding": encoding}, data=data)


def stacks(title: str, unit: str, data: Columns, *, down: str, value: str, part: str, parts: Sequence[str]) -> Chart:
    """A horizontal bar for each `down`, of parts in their order."""
    encoding = {
        "y": {"field": down, "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 150}},
        "x": _number(value, data[value], zero=True),
        "color": _colour(part, parts, legend=True),
        "order": {"field": "order"},
        "tooltip": _tips(down, part, value),
    }
    numbered = data | {"order": [parts.index(each) for each in data[part]]}
    height = 42 * len(set(data[down]))
    return Chart(title=title, unit=unit, spec={"height": height, "mark": "bar", "encoding": encoding}, data=numbered)


def scatter(
    title: str,
    data: Columns,
    *,
    x: tuple[str, str],
    y: tuple[str, str],
    by: str,
    groups: Sequence[str],
    log: bool = False,
    rule: tuple[float, str] | None = None,
    joined: bool = False,
) -> Chart:
    """Points in colours of `by`.

    Args:
        x, y: the column, and its label with a unit.
        groups: all that `by` may be, so that one has the same colour in charts beside one another.
        log: both scales.
        rule: a limit of y, and what it is.
        joined: a line through those of one colour; x are whole numbers.
    """
    axes = {
        "x": _number(x[0], data[x[0]], title=x[1], log=log),
        "y": _number(y[0], data[y[0]], title=None if y[1] == title else y[1], log=log),
    }
    encoding = {**axes, "color": _colour(by, groups, legend=True), "tooltip": _tips(*data)}
    mark = {"type": "line", "point": {"size": 50, "filled": True}} if joined else {"type": "point", "filled": True}
    layers: list[dict[str, Any]] = [{"mark": {"size": 70, "opacity": 0.85, **mark}, "encoding": encoding}]
    if joined:
        layers[0]["mark"].pop("size")
        axes["x"]["axis"] = {"values": sorted(set(data[x[0]])), "format": ",d", "labelOverlap": True}
    if rule is not None:
        limit: dict[str, Any] = {
            "data": {"values": [{"limit": rule[0], "text": rule[1]}]},
            "encoding": {"y": {"datum": rule[0]}},
        }
        layers.append({**limit, "mark": {"type": "rule", "strokeDash": [5, 4]}})
        text = {"type": "text", "align": "left", "dx": 4, "dy": -6, "x": 0}
        layers.append({**limit, "mark": text, "encoding": {**limit["encoding"], "text": {"field": "text"}}})
    return Chart(title=title, unit="", spec={"height": 320, "layer": layers}, data=data)


def thinned(values: Sequence[float]) -> list[int]:
    """Which of many points are drawn: the first, the last, and the lowest and the highest of each stretch."""
    if len(values) <= MOST:
        return list(range(len(values)))
    array = np.asarray(values)
    chosen = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), MOST // 2 - 1):
        chosen |= {int(stretch[np.argmin(array[stretch])]), int(stretch[np.argmax(array[stretch])])}
    return sorted(chosen)


def _number(
    name: str, values: Sequence[float], *, title: str | None = None, zero: bool = False, log: bool = False
) -> dict[str, Any]:
    scale = {"type": "log", "base": 2, "nice": False, "padding": 14} if log else {"zero": zero}
    # 12k beyond ten thousand; 0.9, and not 900m, below.
    axis = {"format": "~s" if max(values, default=0.0) >= 1e4 else ",.4~r", "tickCount": 6}
    return {"field": name, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def _colour(name: str, groups: Sequence[str], *, legend: bool = False) -> dict[str, Any]:
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(groups))]
    shown = {"orient": "bottom", "title": None, "columns": 3, "labelLimit": 220} if legend else None
    scale = {"domain": list(groups), "range": colours}
    return {"field": name, "type": "nominal", "scale": scale, "legend": shown, "sort": list(groups)}


def _tips(*names: str) -> list[dict[str, Any]]:
    return [{"field": name} for name in names]

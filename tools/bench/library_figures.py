"""The figures of `bench library`, their table and their picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tools.bench.library_data import FULL, PADDED, SORTED
from tools.bench.library_sides import COMPILED, MASKED, OURS, PLAIN, ROWS, ROWS_COMPILED, Checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative difference of first losses that rounding can explain with a wide margin."""
NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
"""The same for norms of gradients."""
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {
    PLAIN: "0.6",
    MASKED: "#56B4E9",
    OURS: "#0072B2",
    ROWS: "#009E73",
    COMPILED: "#E69F00",
    ROWS_COMPILED: "#D55E00",
}
_LABELS = {FULL: "no padding", PADDED: "padded", SORTED: "padded, sorted by length"}
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step of one contender."""

    seconds: float
    tokens: int
    """Real ones."""


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """One contender on one kind of input."""

    preset: str
    precision: str
    inputs: str
    contender: str
    steps: int
    seconds_median: float
    """Of a step."""
    seconds_quartiles: tuple[float, float]
    tokens_per_second: float
    """Real tokens; median of the rounds."""
    tokens_per_second_range: tuple[float, float]
    """The lowest and the highest round."""
    ratio: float
    """Tokens/s over those of "transformers-masked", median of the rounds: above 1 is faster."""
    ratio_range: tuple[float, float]
    fill: float
    """Share of the slots that hold a token, over all steps."""
    peak_tensor_bytes: int | None
    """The most tensor memory at once in a step, above weights and optimiser. None: not measured."""
    first_loss: float
    """Nats, without dropout, before any step."""
    first_gradient_norm: float
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""


def figures(
    place: tuple[str, str, str],
    contender: str,
    rounds: Sequence[Sequence[Sample]],
    base: Sequence[Sequence[Sample]],
    *,
    fill: float,
    checked: Checked,
    peak: int | None = None,
) -> SideFigures:
    """The figures of a contender.

    Args:
        place: preset, precision and kind of input.
        rounds: its steps, by round.
        base: those of the contender to compare with, in the same rounds.
    """
    seconds = [sample.seconds for turn in rounds for sample in turn]
    speeds = [_speed(turn) for turn in rounds]
    ratios = [speed / _speed(other) for speed, other in zip(speeds, base, strict=True)]
    low, median, high = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
    preset, precision, inputs = place
    return SideFigures(
        preset=preset,
        precision=precision,
        inputs=inputs,
        contender=contender,
        steps=len(seconds),
        seconds_median=median,
        seconds_quartiles=(low, high),
        tokens_per_second=statistics.median(speeds),
        tokens_per_second_range=(min(speeds), max(speeds)),
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        fill=fill,
        peak_tensor_bytes=peak,
        first_loss=checked.loss,
        first_gradient_norm=checked.gradient_norm,
        seconds=tuple(tuple(sample.seconds for sample in turn) for turn in rounds),
    )


def _speed(turn: Sequence[Sample]) -> float:
    return sum(sample.tokens for sample in turn) / sum(sample.seconds for sample in turn)


def differences(sides: Sequence[SideFigures]) -> tuple[float, float]:
    """The largest relative differences of first losses and of norms of first gradients, of contenders on one input."""
    return _spread([side.first_loss for side in sides]), _spread([side.first_gradient_norm for side in sides])


def agree(precision: str, loss: float, norm: float) -> bool:
    """Whether rounding explains the differences. What is no number agrees with nothing."""
    return loss <= LOSS_TOLERANCE[precision] and norm <= NORM_TOLERANCE[precision]


def all_agree(results: Sequence[SideFigures]) -> bool:
    """Whether contenders agree wherever they were compared."""
    places = dict.fromkeys((side.preset, side.precision, side.inputs) for side in results)
    return all(
        agree(place[1], *differences([s for s in results if (s.preset, s.precision, s.inputs) == place]))
        for place in places
    )


def verdict(sides: Sequence[SideFigures]) -> str:
    """In words, of the contenders on one kind of input."""
    precision, (loss, norm) = sides[0].precision, differences(sides)
    told = "agree" if agree(precision, loss, norm) else "do NOT agree"
    return (
        f"first steps without dropout {told}: losses differ by {loss:.1e} (at most {LOSS_TOLERANCE[precision]:g}), "
        f"norms of gradients by {norm:.1e} (at most {NORM_TOLERANCE[precision]:g})"
    )


def _spread(values: Sequence[float]) -> float:
    array = np.array(values)
    # numpy's pass on what is not a number; Python's may lose it.
    return float((array.max() - array.min()) / np.abs(array).min())


HEADER = (
    "contender",
    "real tokens/s",
    "by round",
    f"over {MASKED}",
    "by round",
    "step ms",
    "quartiles",
    "fill",
    "peak MiB",
    "first loss",
)


def row(side: SideFigures) -> tuple[str, ...]:
    """What the table shows of a contender, under `HEADER`."""
    peak = side.peak_tensor_bytes
    return (
        side.contender,
        f"{side.tokens_per_second:,.0f}",
        "{:,.0f}-{:,.0f}".format(*side.tokens_per_second_range),
        f"{side.ratio:.3f}",
        "{:.3f}-{:.3f}".format(*side.ratio_range),
        f"{side.seconds_median * 1e3:,.0f}",
        "{:,.0f}-{:,.0f}".format(*(second * 1e3 for second in side.seconds_quartiles)),
        f"{side.fill:.2%}",
        "-" if peak is None else f"{peak / _MIB:,.0f}",
        f"{side.first_loss:.5f}",
    )


def draw(results: Sequence[SideFigures]) -> Figure:
    """A panel for each preset and precision; in it the contenders beside one another, by kind of input."""
    from matplotlib.figure import Figure  # it takes a second, for which nobody should wait who wants no picture

    places = list(dict.fromkeys((side.preset, side.precision) for side in results))
    figure = Figure(figsize=(1.5 + 5.0 * len(places), 4.6), layout="constrained")
    for axes, (preset, precision) in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        _draw_panel(axes, [side for side in results if (side.preset, side.precision) == (preset, precision)])
        axes.set_title(f"BERT-{preset}, {precision}", fontsize=11, loc="left")
    figure.axes[0].set_ylabel("real tokens a second")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10.5)
    return figure


def _draw_panel(axes: Axes, sides: Sequence[SideFigures]) -> None:
    kinds = list(dict.fromkeys(side.inputs for side in sides))
    names = list(dict.fromkeys(side.contender for side in sides))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        bars = [side for side in sides if side.contender == name]
        heights = [side.tokens_per_second for side in bars]
        low, high = zip(*(side.tokens_per_second_range for side in bars), strict=True)
        axes.bar(
            [kinds.index(side.inputs) + (number + 0.5) * width - 0.4 for side in bars],
            heights,
            width=width * 0.94,
            color=_COLOURS[name],
            label=name,
            yerr=[np.subtract(heights, low), np.subtract(high, heights)],
            error_kw={"elinewidth": 1.0, "ecolor": "0.2"},
        )
    axes.set_xticks(range(len(kinds)), [_LABELS[kind] for kind in kinds])
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

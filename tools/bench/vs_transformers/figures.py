"""The figures of `bench library` and their table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.bench.harness.figures import Column, flat, mebibytes, milliseconds, quartiles, relative_difference, spread
from tools.bench.harness.memory import without_notes
from tools.bench.vs_transformers.contenders import (
    COMPILED,
    COMPILED_DELAYED,
    COMPILED_FP8,
    COMPILED_SHADOWS,
    COMPILED_TENSORWISE,
    CONTENDERS,
    GRAPHED,
    MASKED,
    MASKED_COMPILED,
    OURS,
    PLAIN,
    ROWS,
    ROWS_COMPILED,
    ROWS_FP8,
    ROWS_SHADOWS,
    UNPADDED,
    UNPADDED_COMPILED,
    Checked,
)
from tools.bench.vs_transformers.data import FULL, PADDED, SORTED, Work
from tools.common.files import WRONG_ENTRIES, parsed_json, read_file
from tools.common.machine import format_table
from tools.common.plotting import COLOURS, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- Where the time of a step goes: its dearest operators, from a profile ---------------------------------------------

OPERATOR_HEADER = ("operator", "calls", "own ms", "share")


class Operator(NamedTuple):
    """All calls of one operator in a step."""

    name: str
    calls: int
    seconds: float
    """Without what other operators did inside of it: on a GPU that of its kernels, else that of the host."""
    share: float
    """Of all operators' seconds."""


def operators_of(device: torch.device, run: Callable[[], object], most: int) -> list[Operator]:
    """The operators of `run` that take longest, so many at most. The profiler slows `run` down: time another one."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with without_notes(), profile(activities=activities, acc_events=True) as trace:
        run()
    # Kernels stand in the list too, and with the operators that launch them: once is enough.
    events: list[Any] = [event for event in trace.key_averages() if event.device_type == DeviceType.CPU]
    own = {event.key: (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e6 for event in events}
    whole = sum(own.values())
    calls = {event.key: event.count for event in events}
    dearest = sorted(own, key=lambda key: own[key], reverse=True)[:most]
    # A profiler that is kept from a GPU's kernels tells of none.
    shares = {key: own[key] / whole if whole else 0.0 for key in dearest}
    return [Operator(name=key, calls=calls[key], seconds=own[key], share=shares[key]) for key in dearest]


def table(operators: Sequence[Operator]) -> list[str]:
    rows = [(each.name, f"{each.calls:,}", f"{each.seconds * 1e3:,.1f}", f"{each.share:.1%}") for each in operators]
    return format_table(OPERATOR_HEADER, rows)


# --- The figures of `bench library` and their table -------------------------------------------------------------------

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative difference of first losses that rounding can explain with a wide margin."""
NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
"""The same for norms of gradients."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step of one contender."""

    seconds: float
    tokens: int
    """Real ones."""
    sequences: int
    flops: int
    """Of the model, for these sequences: padding, and logits without a label, count nothing."""


@dataclass(frozen=True, kw_only=True)
class InputFigures:
    """What the timed steps of one kind of input hold: the same sequences for all contenders."""

    inputs: str
    steps: int
    sequences: int
    tokens: int
    """Real ones."""
    padded_batches: int
    """Micro-batches of `transformers`."""
    padded_fill: float
    """Share of their slots that hold a token."""
    packed_batches: int
    """Micro-batches of packs."""
    packed_fill: float

    def __str__(self) -> str:
        return (
            f"{self.inputs}: {self.sequences:,} sequences of {self.tokens:,} tokens in {self.steps} timed steps; "
            f"{self.padded_batches} padded micro-batches, {self.padded_fill:.2%} filled; "
            f"{self.packed_batches} of packs, {self.packed_fill:.2%} filled"
        )


def input_figures(kind: str, timed: Sequence[Work]) -> InputFigures:
    tokens = sum(work.step.tokens for work in timed)
    return InputFigures(
        inputs=kind,
        steps=len(timed),
        sequences=sum(work.step.sequences for work in timed),
        tokens=tokens,
        padded_batches=sum(len(work.padded) for work in timed),
        padded_fill=tokens / sum(work.padded_slots for work in timed),
        packed_batches=sum(len(work.step.batches) for work in timed),
        packed_fill=tokens / sum(work.packed_slots for work in timed),
    )


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """One contender on one kind of input."""

    preset: str
    precision: str
    inputs: str
    contender: Annotated[str, Column("contender")]
    steps: int
    tokens_per_second: Annotated[float, Column("real tokens/s", ",.0f")]
    """Real tokens of all timed steps over their seconds."""
    tokens_per_second_median: float
    """The same of each round; median."""
    tokens_per_second_range: Annotated[tuple[float, float], Column("by round", ",.0f")]
    """The lowest and the highest round."""
    ratio: Annotated[float, Column(f"over {MASKED}", ".3f")]
    """Tokens/s over those of "transformers-masked", of all timed steps: above 1 is faster. Long steps count for more
    in it, and no round is left out of it, however few there are."""
    ratio_median: Annotated[float, Column("median round", ".3f")]
    """The same of each round; median."""
    ratio_range: Annotated[tuple[float, float], Column("by round", ".3f")]
    """The lowest and the highest round."""
    seconds_median: Annotated[float, milliseconds("step ms", ",.0f")]
    """Of a step."""
    seconds_quartiles: Annotated[tuple[float, float], milliseconds("quartiles", ",.0f")]
    fill: Annotated[float, Column("fill", ".2%")]
    """Share of the slots that hold a token, over all steps."""
    sequences_per_second: Annotated[float, Column("sequences/s", ",.1f")]
    """Of all timed steps."""
    model_flops: Annotated[float, Column("model GFLOP/s", ",.0f", 1e-9)]
    """FLOP/s of the model, of all timed steps: what these sequences need, whatever else was computed."""
    mfu: Annotated[float, Column("MFU", ".1%")]
    """The same as a share of what products of matrices alone reach here, in this type."""
    peak_tensor_bytes: Annotated[int | None, mebibytes("peak MiB", ",.0f")]
    """The most tensor memory at once in a step, above weights and optimiser. None: not measured."""
    operators: Sequence[Operator] | None
    """The dearest of one more step, by their own time. None: not measured."""
    first_loss: Annotated[float, Column("first loss", ".5f")]
    """Nats, without dropout, before any step."""
    first_gradient_norm: float
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""


def figures(
    place: tuple[str, str, str],
    contender: str,
    rounds: Sequence[Sequence[Sample]],
    base: Sequence[Sequence[Sample]] | None,
    *,
    fill: float,
    products: float,
    checked: Checked,
    peak: int | None = None,
    operators: Sequence[Operator] | None = None,
) -> SideFigures:
    """The figures of a contender.

    Args:
        place: preset, precision and kind of input.
        rounds: its steps, by round.
        base: those of the contender to compare with, in the same rounds. None: it has failed; ratios are no numbers.
        products: FLOP/s of products of matrices alone, in this type.
    """
    everything = flat(rounds)
    seconds, speed = [sample.seconds for sample in everything], _speed(everything)
    speeds = [_speed(turn) for turn in rounds]
    others = [math.nan] * len(speeds) if base is None else [_speed(turn) for turn in base]
    ratios = [mine / other for mine, other in zip(speeds, others, strict=True)]
    low, median, high = quartiles(seconds)
    preset, precision, inputs = place
    whole, flops = sum(seconds), sum(sample.flops for sample in everything)
    return SideFigures(
        preset=preset,
        precision=precision,
        inputs=inputs,
        contender=contender,
        steps=len(seconds),
        seconds_median=median,
        seconds_quartiles=(low, high),
        tokens_per_second=speed,
        tokens_per_second_median=statistics.median(speeds),
        tokens_per_second_range=spread(speeds),
        sequences_per_second=sum(sample.sequences for sample in everything) / whole,
        model_flops=flops / whole,
        mfu=flops / whole / products,
        ratio=math.nan if base is None else speed / _speed(flat(base)),
        ratio_median=statistics.median(ratios),
        ratio_range=spread(ratios),
        fill=fill,
        peak_tensor_bytes=peak,
        operators=operators,
        first_loss=checked.loss,
        first_gradient_norm=checked.gradient_norm,
        seconds=tuple(tuple(sample.seconds for sample in turn) for turn in rounds),
    )


def _speed(steps: Sequence[Sample]) -> float:
    return sum(sample.tokens for sample in steps) / sum(sample.seconds for sample in steps)


def differences(sides: Sequence[SideFigures]) -> tuple[float, float]:
    """The largest relative differences of first losses and of norms of first gradients, of contenders on one input."""
    losses, norms = [side.first_loss for side in sides], [side.first_gradient_norm for side in sides]
    return relative_difference(losses), relative_difference(norms)


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


# --- The picture of `bench library`: one run, or several drawn together -----------------------------------------------

_COLOURS = {
    PLAIN: "0.6",
    MASKED: COLOURS[5],
    MASKED_COMPILED: "#999933",
    UNPADDED: COLOURS[3],
    UNPADDED_COMPILED: "#882255",
    GRAPHED: "#000000",
    OURS: COLOURS[0],
    ROWS: COLOURS[2],
    COMPILED: COLOURS[4],
    ROWS_COMPILED: COLOURS[1],
    ROWS_SHADOWS: "#EE8866",
    COMPILED_SHADOWS: "#44AA99",
    ROWS_FP8: "#66CCEE",
    COMPILED_FP8: "#AA3377",
    COMPILED_TENSORWISE: "#BBCC33",
    COMPILED_DELAYED: "#332288",
}
_KINDS = {FULL: "no padding", PADDED: "padded", SORTED: "padded, sorted by length"}


def read_results(path: Path) -> list[SideFigures]:
    """What an earlier run has written.

    Raises:
        ValueError: it is no file of `bench library`, or one of other columns.
    """
    try:
        content = parsed_json(read_file(path), unique=True)
        if content["benchmark"] == "library":
            return [_side(result) for result in content["results"]]
    except (OSError, *WRONG_ENTRIES):
        pass
    names = ", ".join(field.name for field in fields(SideFigures))
    raise ValueError(
        f"--also must be files that tools.bench library has written by --output, with the figures {names}. Got {path}."
    )


def _side(result: dict[str, Any]) -> SideFigures:
    operators = result.pop("operators")
    return SideFigures(**result, operators=operators and [Operator(*each) for each in operators])


def model_name(preset: str) -> str:
    """What a preset of `SideFigures` is called: "small" is BERT-small, "roberta-small" RoBERTa-small."""
    architecture, dash, size = preset.rpartition("-")
    names = {"roberta": "RoBERTa", "modernbert": "ModernBERT", "deberta-v2": "DeBERTa"}
    return f"{names[architecture] if dash else 'BERT'}-{size}"


def draw(results: Sequence[SideFigures]) -> Figure:
    """A row of panels for each preset, in it one for each kind of input: contenders beside one another, by precision.

    A contender has its colour in all of them; a number is its ratio to "transformers-masked".
    """
    presets = list(dict.fromkeys(side.preset for side in results))
    precisions = [name for name in LOSS_TOLERANCE if any(side.precision == name for side in results)]
    kinds = [kind for kind in _KINDS if any(side.inputs == kind for side in results)]
    figure = new_figure(1.0 + 4.2 * len(kinds), 1.0 + 3.2 * len(presets))
    panels = figure.subplots(len(presets), len(kinds), squeeze=False, sharey="row")
    for row, preset in zip(panels, presets, strict=True):
        first = True
        for axes, kind in zip(row, kinds, strict=True):
            sides = [side for side in results if (side.preset, side.inputs) == (preset, kind)]
            if not sides:
                axes.set_axis_off()
                continue
            _draw_panel(axes, precisions, sides)
            axes.set_title(f"{model_name(preset)}, {_KINDS[kind]}", fontsize=11, loc="left")
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
            # Lists: NumPy warns where matplotlib 3.10 takes an array of one for a number.
            yerr=[np.maximum(heights - low, 0).tolist(), np.maximum(high - heights, 0).tolist()],
            error_kw={"elinewidth": 1.0, "ecolor": "0.2"},
        )
        for place, top, side in zip(places, np.maximum(high, heights), bars, strict=True):
            axes.annotate(
                f"{side.ratio:.2f}", (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7.5
            )
    axes.set_xticks(range(len(precisions)), precisions)
    axes.set_xlim(-0.5, len(precisions) - 0.5)
    plain(axes, "y")

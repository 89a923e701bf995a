"""The figures of `bench library` and their table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.bench.library_data import Work
from tools.bench.library_operators import Operator
from tools.bench.library_sides import MASKED, Checked

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative difference of first losses that rounding can explain with a wide margin."""
NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
"""The same for norms of gradients."""
_MIB = 2**20


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
    contender: str
    steps: int
    seconds_median: float
    """Of a step."""
    seconds_quartiles: tuple[float, float]
    tokens_per_second: float
    """Real tokens of all timed steps over their seconds."""
    tokens_per_second_median: float
    """The same of each round; median."""
    tokens_per_second_range: tuple[float, float]
    """The lowest and the highest round."""
    sequences_per_second: float
    """Of all timed steps."""
    model_flops: float
    """FLOP/s of the model, of all timed steps: what these sequences need, whatever else was computed."""
    mfu: float
    """The same as a share of what products of matrices alone reach here, in this type."""
    ratio: float
    """Tokens/s over those of "transformers-masked", of all timed steps: above 1 is faster. Long steps count for more
    in it, and no round is left out of it, however few there are."""
    ratio_median: float
    """The same of each round; median."""
    ratio_range: tuple[float, float]
    """The lowest and the highest round."""
    fill: float
    """Share of the slots that hold a token, over all steps."""
    peak_tensor_bytes: int | None
    """The most tensor memory at once in a step, above weights and optimiser. None: not measured."""
    operators: Sequence[Operator] | None
    """The dearest of one more step, by their own time. None: not measured."""
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
    products: float,
    checked: Checked,
    peak: int | None = None,
    operators: Sequence[Operator] | None = None,
) -> SideFigures:
    """The figures of a contender.

    Args:
        place: preset, precision and kind of input.
        rounds: its steps, by round.
        base: those of the contender to compare with, in the same rounds.
        products: FLOP/s of products of matrices alone, in this type.
    """
    everything = [sample for turn in rounds for sample in turn]
    seconds, speed = [sample.seconds for sample in everything], _speed(everything)
    speeds = [_speed(turn) for turn in rounds]
    ratios = [mine / _speed(other) for mine, other in zip(speeds, base, strict=True)]
    low, median, high = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
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
        tokens_per_second_range=(min(speeds), max(speeds)),
        sequences_per_second=sum(sample.sequences for sample in everything) / whole,
        model_flops=flops / whole,
        mfu=flops / whole / products,
        ratio=speed / _speed([sample for turn in base for sample in turn]),
        ratio_median=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
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
    "median round",
    "by round",
    "step ms",
    "quartiles",
    "fill",
    "sequences/s",
    "model GFLOP/s",
    "MFU",
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
        f"{side.ratio_median:.3f}",
        "{:.3f}-{:.3f}".format(*side.ratio_range),
        f"{side.seconds_median * 1e3:,.0f}",
        "{:,.0f}-{:,.0f}".format(*(second * 1e3 for second in side.seconds_quartiles)),
        f"{side.fill:.2%}",
        f"{side.sequences_per_second:,.1f}",
        f"{side.model_flops / 1e9:,.0f}",
        f"{side.mfu:.1%}",
        "-" if peak is None else f"{peak / _MIB:,.0f}",
        f"{side.first_loss:.5f}",
    )

"""The figures of `bench compile`, made of what all ranks noted in all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensor3d import CubeShape
from tools.bench.compile_regions import RegionFacts
from tools.bench.compile_trial import SIDES, Case, Facts, Side, Type

# Relative, of first losses: what rounding explains with a wide margin.
_TOLERANCE: dict[Type, float] = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A step on one cube in one type. Seconds of a step are the mean over the ranks."""

    cube: str
    ranks: int
    device: str
    threads: int
    """Of each rank."""
    type: Type
    seconds: dict[Side, float]
    """Median of the steps."""
    ratio: float
    """Compiled over eager: the median of the ratios of the rounds."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of a round."""
    warmup: dict[Side, float]
    """Seconds of all steps before the timed ones, on the slowest rank: the compiled side compiles in them, unless it
    finds what an earlier run has left on the disk."""
    loss: dict[Side, float]
    """Of the weights at the start, without dropout."""
    saved: dict[Side, int]
    """Bytes kept by autograd for backward, on the rank that keeps most."""
    peak: dict[Side, int]
    """The most bytes of tensors at once in a step, above those that stay, on the rank that needs most."""
    rounds: dict[Side, list[list[float]]]
    """Seconds of every step, by round."""

    @property
    def loss_difference(self) -> float:
        return abs(self.loss["compiled"] / self.loss["eager"] - 1)


@dataclass(frozen=True, kw_only=True)
class RegionFigures:
    """One region, forward and backward, on one rank."""

    region: str
    type: Type
    elements: int
    """Of its largest input."""
    seconds: dict[Side, float]
    """Median of the calls."""
    ratio: float
    """Compiled over eager: the median of the ratios of the rounds."""
    ratio_range: tuple[float, float]
    first: dict[Side, float]
    """Seconds of the first call."""
    rounds: dict[Side, list[list[float]]]


def step_figures(
    shape: CubeShape,
    kind: Type,
    turns: Mapping[Case, Sequence[Sequence[Sequence[float]]]],
    facts: Sequence[Mapping[Case, Facts]],
) -> StepFigures:
    """The figures of one cube and type.

    Args:
        turns: seconds of steps by round, rank and step, of each case.
        facts: by rank.
    """
    rounds = {
        side: [[statistics.fmean(step) for step in zip(*turn, strict=True)] for turn in turns[kind, side]]
        for side in SIDES
    }
    ratios = _ratios(rounds)
    own = {side: [fact[kind, side] for fact in facts] for side in SIDES}
    return StepFigures(
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        ranks=shape.ranks,
        device=own["eager"][0].device,
        threads=own["eager"][0].threads,
        type=kind,
        seconds={side: _median(rounds[side]) for side in SIDES},
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        warmup={side: max(fact.warmup for fact in own[side]) for side in SIDES},
        loss={side: own[side][0].loss for side in SIDES},
        saved={side: max(fact.saved for fact in own[side]) for side in SIDES},
        peak={side: max(fact.peak for fact in own[side]) for side in SIDES},
        rounds=rounds,
    )


def region_figures(
    name: str,
    kind: Type,
    turns: Mapping[tuple[str, Case], Sequence[Sequence[float]]],
    facts: Mapping[tuple[str, Case], RegionFacts],
) -> RegionFigures:
    """The figures of one region and type; `turns` by round and call."""
    rounds = {side: [list(turn) for turn in turns[name, (kind, side)]] for side in SIDES}
    ratios = _ratios(rounds)
    return RegionFigures(
        region=name,
        type=kind,
        elements=facts[name, (kind, "eager")].elements,
        seconds={side: _median(rounds[side]) for side in SIDES},
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        first={side: facts[name, (kind, side)].first for side in SIDES},
        rounds=rounds,
    )


def _ratios(rounds: Mapping[Side, Sequence[Sequence[float]]]) -> list[float]:
    pairs = zip(rounds["compiled"], rounds["eager"], strict=True)
    return [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(second for turn in rounds for second in turn)


def faults(steps: Sequence[StepFigures]) -> list[str]:
    """What makes the figures wrong, in words."""
    return [
        f"cube {each.cube}, {each.type}: the losses of both sides differ by {each.loss_difference:.1e}, allowed is "
        f"{_TOLERANCE[each.type]:g}; their times are no comparison"
        for each in steps
        if not each.loss_difference <= _TOLERANCE[each.type]  # NaN too
    ]


HEADER = (
    "cube",
    "type",
    "threads",
    "eager ms",
    "compiled ms",
    "ratio",
    "by round",
    "warm-up s",
    "compiled s",
    "saved MiB",
    "compiled",
    "peak MiB",
    "compiled",
    "losses differ by",
)


def row(step: StepFigures) -> tuple[str, ...]:
    """What the table shows, under `HEADER`."""
    low, high = step.ratio_range
    return (
        step.cube,
        step.type,
        str(step.threads),
        *(f"{step.seconds[side] * 1e3:.1f}" for side in SIDES),
        f"{step.ratio:.3f}",
        f"{low:.2f}-{high:.2f}",
        *(f"{step.warmup[side]:.1f}" for side in SIDES),
        *(f"{step.saved[side] / 2**20:.2f}" for side in SIDES),
        *(f"{step.peak[side] / 2**20:.2f}" for side in SIDES),
        f"{step.loss_difference:.1e}",
    )


REGION_HEADER = ("region", "type", "elements", "eager M/s", "compiled M/s", "ratio", "by round", "first call s")


def region_row(region: RegionFigures) -> tuple[str, ...]:
    """What the table shows, under `REGION_HEADER`: millions of elements a second, forward and backward together."""
    low, high = region.ratio_range
    return (
        region.region,
        region.type,
        f"{region.elements:,}",
        *(f"{region.elements / region.seconds[side] / 1e6:.1f}" for side in SIDES),
        f"{region.ratio:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{region.first['compiled']:.1f}",
    )

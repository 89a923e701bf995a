"""The figures of `bench step`, made of what all ranks noted in all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensor3d import CubeShape
from tools.bench.trial import RankFacts, StepSample

Turn = list[list[StepSample]]
"""The samples of one turn, by rank and step."""
LOSS_TOLERANCE = 1e-4
"""Relative difference of first losses that fp32 can explain with a wide margin."""


@dataclass(frozen=True, kw_only=True)
class CubeFigures:
    """One cube. Seconds of a step are the mean over the ranks: their sum is then the time that passed."""

    cube: str
    """XxYxZ"""
    data_parallel: int
    ranks: int
    device: str
    threads: int
    """Of each rank."""
    steps: int
    seconds_median: float
    seconds_quartiles: tuple[float, float]
    ratio: float
    """Median of the steps over that of the first cube: above 1 is slower."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of the same ratio, taken in each round alone."""
    tokens_per_second: float
    """Real tokens, over all ranks; median of the steps."""
    flops_per_second: float
    """Of the model, over all ranks; median of the steps."""
    collectives: int
    """In a step, on the rank with the most."""
    collectives_closed_form: int
    """What that rank should issue by the formulas."""
    collectives_equal: bool
    """Whether count and formulas agree on every rank, in every step, for each axis and kind."""
    bytes_received: int
    """In a step, by the rank that receives most, in the ring model."""
    bytes_closed_form: int
    """What that rank should receive by the formulas."""
    traffic_equal: bool
    """Whether count and formulas agree to the byte on every rank, in every step, for each axis and kind."""
    first_loss: float
    """Of the very first step, nats."""
    peak_memory_bytes: int | None
    """Of the rank that needs most, above the process before the model was made."""
    held_bytes: int
    """Weights and the optimiser's state, counted, on the rank with the most."""
    held_closed_form: int
    """What that rank should hold by the formulas."""
    held_equal: bool
    """Whether count and formulas agree to the byte on every rank."""
    saved_bytes: int
    """What autograd keeps for the backward pass of a micro-batch, beside parameters, on the rank with the most."""
    saved_closed_form: int
    saved_equal: bool
    """On every rank, for every micro-batch of the step in which it was counted."""
    peak_tensor_bytes: int | None
    """The most tensor memory at once in that step, with what is held and its batches, on the rank with the most. None
    where it was not measured."""
    peak_closed_form: int
    """What the formulas expect of that rank: not to the byte."""
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""

    @property
    def name(self) -> str:
        return self.cube if self.data_parallel == 1 else f"{self.data_parallel}*({self.cube})"


def seconds_of(turn: Turn) -> list[float]:
    """Seconds of each step of a turn."""
    return [statistics.fmean(sample.seconds for sample in step) for step in zip(*turn, strict=True)]


def figures(shape: CubeShape, turns: Sequence[Turn], facts: Sequence[RankFacts], first: Sequence[Turn]) -> CubeFigures:
    """The figures of one cube.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of the cube to compare with, in the same rounds.
    """
    rounds = [seconds_of(turn) for turn in turns]
    base = [seconds_of(turn) for turn in first]
    steps = [second for seconds in rounds for second in seconds]
    low, median, high = (float(q) for q in np.quantile(steps, [0.25, 0.5, 0.75]))
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(rounds, base, strict=True)]
    tokens = [sample.tokens for turn in turns for sample in turn[0]]
    flops = [sample.flops for turn in turns for sample in turn[0]]
    samples = [(rank, sample) for turn in turns for rank, mine in enumerate(turn) for sample in mine]
    worst, busiest = max(samples, key=lambda pair: pair[1].received.total())
    chattiest, most = max(samples, key=lambda pair: pair[1].calls.total())
    resident = [fact.peak_memory for fact in facts if fact.peak_memory is not None]
    memory = [fact.memory for fact in facts]
    holds, saves, peaks = (
        max(memory, key=lambda of: of.held),
        max(memory, key=lambda of: of.saved),
        max(memory, key=lambda of: of.peak or 0),
    )
    return CubeFigures(
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        data_parallel=shape.data,
        ranks=shape.ranks,
        device=facts[0].device,
        threads=facts[0].threads,
        steps=len(steps),
        seconds_median=median,
        seconds_quartiles=(low, high),
        ratio=median / statistics.median(second for seconds in base for second in seconds),
        ratio_range=(min(ratios), max(ratios)),
        tokens_per_second=statistics.median(count / second for count, second in zip(tokens, steps, strict=True)),
        flops_per_second=statistics.median(count / second for count, second in zip(flops, steps, strict=True)),
        collectives=most.calls.total(),
        collectives_closed_form=facts[chattiest].calls_closed_form.total(),
        collectives_equal=all(sample.calls == facts[rank].calls_closed_form for rank, sample in samples),
        bytes_received=busiest.received.total(),
        bytes_closed_form=facts[worst].closed_form.total(),
        traffic_equal=all(sample.received == facts[rank].closed_form for rank, sample in samples),
        first_loss=facts[0].first_loss,
        peak_memory_bytes=max(resident) if len(resident) == len(facts) else None,
        held_bytes=holds.held,
        held_closed_form=holds.held_closed_form,
        held_equal=all(of.held == of.held_closed_form for of in memory),
        saved_bytes=saves.saved,
        saved_closed_form=saves.saved_closed_form,
        saved_equal=all(of.saved_equal for of in memory),
        peak_tensor_bytes=peaks.peak,
        peak_closed_form=peaks.peak_closed_form,
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def loss_difference(cubes: Sequence[CubeFigures]) -> float:
    """The largest relative difference between first losses."""
    losses = np.array([cube.first_loss for cube in cubes])
    # numpy's pass on a loss that is not a number; Python's may lose it.
    return float((losses.max() - losses.min()) / abs(losses.min()))


HEADER = (
    "cube",
    "ranks",
    "threads",
    "step ms",
    "quartiles",
    "ratio",
    "by round",
    "tokens/s",
    "collectives",
    "closed form",
    "MiB received",
    "closed form",
    "saved MiB",
    "closed form",
    "held MiB",
    "closed form",
    "peak MiB",
    "first loss",
)


def counted(number: int, closed_form: int, equal: bool) -> tuple[str, str]:
    """A count of bytes in MiB, and "equal" or what the formulas say, where they say something else on any rank."""
    return f"{number / 2**20:.2f}", "equal" if equal else f"{closed_form / 2**20:.2f}"


def row(cube: CubeFigures) -> tuple[str, ...]:
    """What the table shows of a cube, under `HEADER`."""
    low, high = cube.seconds_quartiles
    least, most = cube.ratio_range
    memory = cube.peak_memory_bytes
    return (
        cube.name,
        str(cube.ranks),
        str(cube.threads),
        f"{cube.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{cube.ratio:.2f}",
        f"{least:.2f}-{most:.2f}",
        f"{cube.tokens_per_second:,.0f}",
        str(cube.collectives),
        "equal" if cube.collectives_equal else str(cube.collectives_closed_form),
        *counted(cube.bytes_received, cube.bytes_closed_form, cube.traffic_equal),
        *counted(cube.saved_bytes, cube.saved_closed_form, cube.saved_equal),
        *counted(cube.held_bytes, cube.held_closed_form, cube.held_equal),
        "-" if memory is None else f"{memory / 2**20:.0f}",
        f"{cube.first_loss:.6f}",
    )

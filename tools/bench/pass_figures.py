"""The figures of `bench matmul` and `bench layer`, made of what all ranks noted in all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensor3d import CubeShape
from tools.bench.passes import PassFacts, PassSample

Turn = list[list[PassSample]]
"""The samples of one turn, by rank and pass."""


@dataclass(frozen=True, kw_only=True)
class PassFigures:
    """One cube. Seconds of a pass are the mean over the ranks: their sum is then the time that passed."""

    cube: str
    """XxYxZ"""
    data_parallel: int
    ranks: int
    device: str
    threads: int
    """Of each rank."""
    passes: int
    forward_seconds: float
    """Median of the passes."""
    backward_seconds: float
    seconds_median: float
    """Of both together."""
    seconds_quartiles: tuple[float, float]
    ratio: float
    """Median over that of the first cube: above 1 is slower."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of the same ratio, taken in each round alone."""
    flops_per_second: float
    """Floating-point operations of the job in a median pass, by closed form, over all ranks."""
    collectives: int
    """In a pass, on each rank."""
    bytes_received: int
    """In a pass, by the rank that receives most, in the ring model."""
    bytes_closed_form: int
    """What that rank should receive by the formulas."""
    traffic_equal: bool
    """Whether counts and formulas agree on every rank, for each axis and kind: bytes and collectives."""
    saved_bytes: int
    """Kept by autograd for backward, without parameters, on the rank that keeps most."""
    peak_bytes: int
    """The most bytes of tensors at once above inputs and parameters, on the rank that needs most."""
    squares: tuple[float, float, float]
    """Sums of squares of result, inputs' gradient and parameters' gradients: equal on all cubes but for rounding."""
    seconds: tuple[tuple[float, ...], ...]
    """Every pass, by round."""

    @property
    def name(self) -> str:
        return self.cube if self.data_parallel == 1 else f"{self.data_parallel}*({self.cube})"


def figures(
    shape: CubeShape, turns: Sequence[Turn], facts: Sequence[PassFacts], first: Sequence[Turn], flops: int
) -> PassFigures:
    """The figures of one cube.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of the cube to compare with, in the same rounds.
        flops: floating-point operations of one pass, of all ranks together.
    """
    rounds, base = [_totals(turn) for turn in turns], [_totals(turn) for turn in first]
    passes = [second for seconds in rounds for second in seconds]
    low, median, high = (float(q) for q in np.quantile(passes, [0.25, 0.5, 0.75]))
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(rounds, base, strict=True)]
    busiest = max(facts, key=lambda fact: fact.received.total())
    squares = np.sum([fact.squares for fact in facts], axis=0)
    return PassFigures(
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        data_parallel=shape.data,
        ranks=shape.ranks,
        device=facts[0].device,
        threads=facts[0].threads,
        passes=len(passes),
        forward_seconds=statistics.median(_means(turns, "forward")),
        backward_seconds=statistics.median(_means(turns, "backward")),
        seconds_median=median,
        seconds_quartiles=(low, high),
        ratio=median / statistics.median(second for seconds in base for second in seconds),
        ratio_range=(min(ratios), max(ratios)),
        flops_per_second=flops / median,
        collectives=max(fact.calls.total() for fact in facts),
        bytes_received=busiest.received.total(),
        bytes_closed_form=busiest.closed_form.total(),
        traffic_equal=all(fact.received == fact.closed_form and fact.calls == fact.closed_form_calls for fact in facts),
        saved_bytes=max(fact.saved for fact in facts),
        peak_bytes=max(fact.peak for fact in facts),
        squares=(float(squares[0]), float(squares[1]), float(squares[2])),
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def _means(turns: Sequence[Turn], part: str) -> list[float]:
    """Seconds of that part of each pass: the mean over the ranks."""
    return [
        statistics.fmean(getattr(sample, part) for sample in each) for turn in turns for each in zip(*turn, strict=True)
    ]


def _totals(turn: Turn) -> list[float]:
    return [
        forward + backward
        for forward, backward in zip(_means([turn], "forward"), _means([turn], "backward"), strict=True)
    ]


def difference(cubes: Sequence[PassFigures]) -> float:
    """The largest relative difference of a sum of squares from the first cube's; NaN where one of them is no number."""
    squares = np.array([cube.squares for cube in cubes])
    return float(np.max(np.abs(squares / squares[0] - 1)))


HEADER = (
    "cube",
    "ranks",
    "threads",
    "forward ms",
    "backward ms",
    "pass ms",
    "quartiles",
    "ratio",
    "by round",
    "GFLOP/s",
    "collectives",
    "MiB received",
    "closed form",
    "saved MiB",
    "peak MiB",
)


def row(cube: PassFigures) -> tuple[str, ...]:
    """What the table shows of a cube, under `HEADER`."""
    low, high = cube.seconds_quartiles
    least, most = cube.ratio_range
    return (
        cube.name,
        str(cube.ranks),
        str(cube.threads),
        f"{cube.forward_seconds * 1e3:.1f}",
        f"{cube.backward_seconds * 1e3:.1f}",
        f"{cube.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{cube.ratio:.2f}",
        f"{least:.2f}-{most:.2f}",
        f"{cube.flops_per_second / 1e9:.1f}",
        str(cube.collectives),
        f"{cube.bytes_received / 2**20:.2f}",
        "equal" if cube.traffic_equal else f"{cube.bytes_closed_form / 2**20:.2f}",
        f"{cube.saved_bytes / 2**20:.2f}",
        f"{cube.peak_bytes / 2**20:.2f}",
    )

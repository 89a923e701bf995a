"""The figures of `bench rivals`, made of what all ranks noted in all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.bench.rivals_trial import RankFacts

Turn = list[list[float]]
"""Seconds of the steps of one turn, by rank and step."""
LOSS_TOLERANCE = 1e-4
"""Relative difference that fp32 can explain with a wide margin."""


@dataclass(frozen=True, kw_only=True)
class RivalFigures:
    """One contender. Seconds of a step are the mean over the ranks: their sum is then the time that passed."""

    name: str
    """One of PyTorch's own, or a cube of ours as XxYxZ."""
    ours: bool
    steps: int
    seconds_median: float
    seconds_quartiles: tuple[float, float]
    ratio: float
    """Median of the steps over that of our first cube: above 1 is slower than ours."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of the same ratio, taken in each round alone."""
    tokens_per_second: float
    """Over all ranks, by the median."""
    bytes_received: int
    """In a step, by the rank that receives most, in the ring model."""
    received: dict[str, int]
    """The same, by kind of collective."""
    collectives: int
    """In a step, on the rank with the most."""
    calls: dict[str, int]
    """The same, by kind of collective."""
    counts_equal: bool | None
    """Whether the cube's own counter says the same on every rank. None: not a cube."""
    rest_bytes: int
    """Tensors between two steps (`RankFacts.rest`), on the rank with the most."""
    peak_bytes: int
    """The most tensors at once in a step (`RankFacts.peak`), on the rank with the most."""
    resident_growth: int | None
    """Of the process with the most (`RankFacts.resident`); None where the system does not tell."""
    losses: tuple[float, ...]
    """Of the first steps; of a layer, sums of squares of the gradient of its input."""
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""


def figures(
    name: str, ours: bool, turns: Sequence[Turn], facts: Sequence[RankFacts], first: Sequence[Turn], tokens: int
) -> RivalFigures:
    """The figures of one contender.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of our first cube, in the same rounds.
        tokens: of a step, over all ranks.
    """
    rounds, base = ([seconds_of(turn) for turn in each] for each in (turns, first))
    steps = [second for seconds in rounds for second in seconds]
    low, median, high = (float(q) for q in np.quantile(steps, [0.25, 0.5, 0.75]))
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(rounds, base, strict=True)]
    receives = max(facts, key=lambda fact: sum(fact.received.values()))
    calls = max(facts, key=lambda fact: sum(fact.calls.values()))
    resident = [fact.resident for fact in facts if fact.resident is not None]
    return RivalFigures(
        name=name,
        ours=ours,
        steps=len(steps),
        seconds_median=median,
        seconds_quartiles=(low, high),
        ratio=median / statistics.median(second for seconds in base for second in seconds),
        ratio_range=(min(ratios), max(ratios)),
        tokens_per_second=tokens / median,
        bytes_received=sum(receives.received.values()),
        received=receives.received,
        collectives=sum(calls.calls.values()),
        calls=calls.calls,
        counts_equal=all(sum(f.received.values()) == f.counted_by_cube for f in facts) if ours else None,
        rest_bytes=max(fact.rest for fact in facts),
        peak_bytes=max(fact.peak for fact in facts),
        resident_growth=max(resident) if len(resident) == len(facts) else None,
        losses=facts[0].losses,
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def seconds_of(turn: Turn) -> list[float]:
    """Seconds of each step of a turn."""
    return [statistics.fmean(step) for step in zip(*turn, strict=True)]


def loss_difference(contenders: Sequence[RivalFigures], step: int = 0) -> float:
    """The largest relative difference between the losses of one step. NaN if one of them is."""
    losses = np.array([contender.losses[step] for contender in contenders])
    return float((losses.max() - losses.min()) / abs(losses.min()))


def faults(contenders: Sequence[RivalFigures]) -> list[str]:
    """What makes the figures no comparison, in words."""
    miscounted = [contender.name for contender in contenders if contender.counts_equal is False]
    found = [f"{name}: bytes received are not those that the cube itself counts" for name in miscounted]
    for step in range(len(contenders[0].losses)):
        difference = loss_difference(contenders, step)
        if not difference <= LOSS_TOLERANCE:  # NaN too
            told = ", ".join(f"{c.name} {c.losses[step]:.6f}" for c in contenders)
            found.append(
                f"not all compute the same: their losses differ by {difference:.1e} in step {step + 1}, allowed is "
                f"{LOSS_TOLERANCE:g} ({told})"
            )
            break
    return found


HEADER = (
    "who",
    "step ms",
    "quartiles",
    "ratio",
    "by round",
    "tokens/s",
    "collectives",
    "MiB received",
    "rest MiB",
    "peak MiB",
    "first loss",
)


def row(contender: RivalFigures) -> tuple[str, ...]:
    """What the table shows of a contender, under `HEADER`."""
    low, high = contender.seconds_quartiles
    least, most = contender.ratio_range
    return (
        contender.name,
        f"{contender.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{contender.ratio:.2f}",
        f"{least:.2f}-{most:.2f}",
        f"{contender.tokens_per_second:,.0f}",
        str(contender.collectives),
        f"{contender.bytes_received / 2**20:.2f}",
        f"{contender.rest_bytes / 2**20:.2f}",
        f"{contender.peak_bytes / 2**20:.2f}",
        f"{contender.losses[0]:.6f}",
    )

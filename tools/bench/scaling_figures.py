"""The figures of `bench strong` and `bench weak`: those of a step on each box, and how it scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.figures import LOSS_TOLERANCE, CubeFigures, counted, loss_difference


@dataclass(frozen=True, kw_only=True)
class Point:
    """One box."""

    kinds: tuple[str, ...]
    """What it is called; with few ranks several kinds are the same box."""
    global_batch: int
    """As in the recipe of this point; and so the next."""
    hidden: int
    step: CubeFigures

    @property
    def flops_per_rank(self) -> float:
        """FLOP/s of the model."""
        return self.step.flops_per_second / self.step.ranks


def base_of(points: Sequence[Point]) -> Point:
    """What efficiency is measured by: of the boxes of the fewest ranks the fastest."""
    fewest = min(point.step.ranks for point in points)
    return max((point for point in points if point.step.ranks == fewest), key=lambda point: point.flops_per_rank)


def efficiency(point: Point, base: Point) -> float:
    """FLOP/s of the model a rank, over those of the base: 1 where nothing is lost to its being split further.

    At equal work a step, as in strong scaling, it is the usual T(base) P(base) / (T P); where the work grows with the
    ranks it is T(base) / T.
    """
    return point.flops_per_rank / base.flops_per_rank


def to_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """All figures of each point on one level."""
    base = base_of(points)
    return [
        {
            "kinds": list(point.kinds),
            "global_batch": point.global_batch,
            "hidden": point.hidden,
            "efficiency": efficiency(point, base),
            **dataclasses.asdict(point.step),
        }
        for point in points
    ]


def compute_the_same(groups: Sequence[Sequence[Point]]) -> bool:
    """Whether the first losses agree within each group of points, which have the same weights and packs."""
    return all(loss_difference([point.step for point in group]) <= LOSS_TOLERANCE for group in groups)


HEADER = (
    "box",
    "kind",
    "ranks",
    "packs",
    "hidden",
    "step ms",
    "quartiles",
    "tokens/s",
    "efficiency",
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


def row(point: Point, base: Point) -> tuple[str, ...]:
    """What the table shows of a point, under `HEADER`."""
    step = point.step
    low, high = step.seconds_quartiles
    return (
        step.name,
        ",".join(point.kinds),
        str(step.ranks),
        str(point.global_batch),
        str(point.hidden),
        f"{step.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{step.tokens_per_second:,.0f}",
        f"{efficiency(point, base):.2f}",
        str(step.collectives),
        "equal" if step.collectives_equal else str(step.collectives_closed_form),
        *counted(step.bytes_received, step.bytes_closed_form, step.traffic_equal),
        *counted(step.saved_bytes, step.saved_closed_form, step.saved_equal),
        *counted(step.held_bytes, step.held_closed_form, step.held_equal),
        "-" if step.peak_tensor_bytes is None else f"{step.peak_tensor_bytes / 2**20:.1f}",
        f"{step.first_loss:.6f}",
    )

"""`--check step.json`: predicted times of a step beside those that `bench step` has measured on the same machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr  # type: ignore[import-untyped]

from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.step_cost import StepOptions
from tensor3d.cost_model.step_time import Overlap, step_time
from tools.common.machine import format_table
from tools.training.config import SpeedConfig, TrainConfig, from_table
from tools.training.estimate import expect

CLEAR = 1.15
"""Medians that differ by more than this ratio are told apart."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One box."""

    shape: CubeShape
    measured: float
    """Seconds: the median of the steps."""
    predicted: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """One file."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured times."""
        return float(spearmanr([p.measured for p in self.pairs], [p.predicted for p in self.pairs]).statistic)

    @property
    def clear(self) -> tuple[int, int]:
        """Of all pairs of boxes whose measured times are told apart: how many are predicted in the right order, and how
        many there are."""
        apart = [
            (one, two)
            for one, two in combinations(sorted(self.pairs, key=lambda pair: pair.measured), 2)
            if two.measured > CLEAR * one.measured
        ]
        return sum(one.predicted < two.predicted for one, two in apart), len(apart)


def check(path: Path, cluster: Cluster) -> Check:
    """
    Raises:
        ValueError: no file of `bench step`, one of switches that the planner does not know, or boxes that the cluster
            does not have the ranks for.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        recipe, results = from_table(TrainConfig, content["recipe"]), content["results"]
        measured = [
            (CubeShape.parse(each["cube"], each["data_parallel"]), float(each["seconds_median"])) for each in results
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path} is no file that `bench step --output` has written: {problem}.") from None
    _check_known(recipe.speed, path)
    pairs = [
        Pair(shape=shape, measured=seconds, predicted=predicted(recipe, shape, cluster)) for shape, seconds in measured
    ]
    return Check(name=path.stem, pairs=tuple(pairs))


def _check_known(speed: SpeedConfig, path: Path) -> None:
    """Raises ValueError for steps that do other work than the planner counts."""
    for name in ("read_rows_only", "compile"):
        if getattr(speed, name):
            raise ValueError(
                f"{path} was measured with speed.{name} = true, and the planner counts what a step does without it: "
                "all rows of the last layer, each operator by itself. Measure without it, or check another file."
            )
    if speed.attention == "reference":
        raise ValueError(
            f"{path} was measured with speed.attention = 'reference', which computes all pairs of rows. Measure with "
            f"{SpeedConfig().attention!r}, or check another file."
        )


def predicted(recipe: TrainConfig, shape: CubeShape, cluster: Cluster) -> float:
    """Seconds of a step of the recipe."""
    expected = expect(recipe, shape)
    packs_of_a_plane = expected.packs // (shape.planes * expected.micro_batches)
    costs = BertCosts(
        config=expected.config,
        batch=Batch(
            packs=expected.packs,
            capacity=recipe.data.capacity,
            length=min(recipe.data.max_length, recipe.data.capacity),
            masked_per_pack=max(1, expected.load.masked // packs_of_a_plane),
        ),
        compute=recipe.precision.compute,
        reduce=recipe.precision.reduce,
        optimizer=recipe.optimizer.kind,
        device="cpu",
    )
    choice = StepOptions(
        micro_batches=expected.micro_batches,
        recompute=recipe.model.recompute,
        keep_gathered=not recipe.model.reshard_after_forward,
    )
    overlap: Overlap = "products" if recipe.speed.overlap else "none"
    return step_time(costs.cost(shape, choice), cluster, recipe.precision.compute, overlap).total


def report(checks: Sequence[Check]) -> list[str]:
    """A table of each, and how well the order is predicted."""
    lines = []
    for each in checks:
        rows = [
            (
                str(pair.shape),
                f"{pair.measured * 1e3:.1f}",
                f"{pair.predicted * 1e3:.1f}",
                f"{pair.predicted / pair.measured - 1:+.0%}",
            )
            for pair in sorted(each.pairs, key=lambda pair: pair.measured)
        ]
        right, apart = each.clear
        lines += [
            f"{each.name}:",
            *format_table(("box", "measured ms", "predicted ms", "error"), rows),
            f"Spearman's rank correlation {each.rank_correlation:.2f}; of {apart} pairs that differ by more than "
            f"{CLEAR - 1:.0%}, {right} in the right order",
            "",
        ]
    return lines[:-1]

"""What the formulas say beside what can be seen: times that `bench step` has measured on the same machine (`--check
step.json`), memory counted in dry steps of the real code, and a whole dry step beside what was said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr  # type: ignore[import-untyped]

from models.bert import BertConfig
from models.bert.cost_model.comm_volume import STEP_NUMBERS, scaled_weights, step_traffic
from models.bert.cost_model.memory import Device, MicroBatchShape, least_memory
from models.bert.cost_model.param_shapes import OptimizerName, held
from models.bert.cost_model.step_cost import BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.step_cost import Memory, StepOptions
from tensor3d.cost_model.step_time import Overlap, step_time
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.layers.attention import Recompute
from tools.common.files import WRONG_ENTRIES, parsed_json, read_file, what_is_wrong
from tools.common.machine import format_table
from tools.training.config import PrecisionConfig, SpeedConfig, TrainConfig, from_table
from tools.training.dry_step import counted_memory, counted_step
from tools.training.estimate import costs_of, expect
from tools.training.factory import TYPES

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
        content: dict[str, Any] = parsed_json(read_file(path), unique=True)
        recipe, results = from_table(TrainConfig, content["recipe"]), content["results"]
        measured = [
            (CubeShape.parse(each["cube"], each["data_parallel"]), float(each["seconds_median"])) for each in results
        ]
    except WRONG_ENTRIES as problem:
        raise ValueError(
            f"{path} is no file that `bench step --output` has written: {what_is_wrong(problem)}."
        ) from None
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
                "all rows of the last layer, and no regions of CPUs. Measure without it, or check another file."
            )
    if speed.attention == "reference":
        raise ValueError(
            f"{path} was measured with speed.attention = 'reference', which computes all pairs of rows. Measure with "
            f"{SpeedConfig().attention!r}, or check another file."
        )


def predicted(recipe: TrainConfig, shape: CubeShape, cluster: Cluster) -> float:
    """Seconds of a step of the recipe.

    Raises:
        ValueError: an objective that the planner has no costs of.
    """
    if recipe.replaced_tokens is not None:
        raise ValueError(
            f"the planner knows the costs of a BERT alone, and the recipe has data.objective = "
            f"{recipe.data.objective!r}, with a generator beside it. Compare runs of another objective."
        )
    costs, choice = costs_of(recipe, shape, expect(recipe, shape), "cpu")
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


# --- Counted in dry steps ---------------------------------------------------------------------------------------------


# --- Memory of a box --------------------------------------------------------------------------------------------------


def memory_counter(costs: BertCosts, show: Callable[[], object]) -> Callable[[CubeShape, StepOptions], Memory]:
    """Counts what a step of rank 0 needs, from dry steps of few layers. What a budget for gathered operands keeps is
    added, which the formula knows to the byte: at most as much more is held at once.

    Args:
        show: is called after each count.
    """

    def count(shape: CubeShape, choice: StepOptions) -> Memory:
        # Where its axes lie makes no difference to memory, and boxes are remembered.
        box = CubeShape(x=shape.x, y=shape.y, z=shape.z, data=shape.data)
        plain = replace(choice, keep_budget=0)
        found = counted_memory(costs.config, box, costs.batch.load(box, choice.micro_batches), **step_of(costs, plain))
        more = costs.memory(box, choice).saved - costs.memory(box, plain).saved
        show()
        return Memory(
            weights=found.weights,
            gradients=found.gradients,
            optimizer=found.optimizer,
            saved=found.saved + more,
            peak=found.peak + more,
            shadows=found.shadows,
            scales=found.scales,
            counted=True,
        )

    return count


def step_of(costs: BertCosts, choice: StepOptions) -> dict[str, Any]:
    """Arguments of `dry_step`."""
    return {
        "micro_batches": choice.micro_batches,
        "types": PrecisionConfig(
            compute=costs.compute,  # type: ignore[arg-type]
            reduce=costs.reduce,  # type: ignore[arg-type]
            fp8=costs.fp8 or "off",
            fp8_history=costs.fp8_history,
        ),
        "optimizer": costs.optimizer,
        "shard_over_data": costs.shard_over_data,
        "recompute": choice.recompute,
        "reshard_after_forward": choice.reshard_after_forward,
        "keep_budget": choice.keep_budget,
        "shadow_weights": costs.shadow_weights,
        "compile": costs.compile,
        "device": costs.device,
    }


# --- A dry step of all layers beside what was predicted of it ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a step, bytes unless it counts calls."""

    what: str
    predicted: int
    counted: int

    @property
    def ratio(self) -> float:
        """Predicted over counted; 1 where both are 0."""
        if self.predicted == self.counted:
            return 1.0
        return self.predicted / self.counted if self.counted else float("inf")


def dry_beside_prediction(
    config: BertConfig,
    shape: CubeShape,
    load: MicroBatchShape,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionConfig = PrecisionConfig(),  # noqa: B008  # frozen
    optimizer: OptimizerName = "adamw",
    shard_over_data: ShardOverData = False,
    recompute: Recompute = "none",
    reshard_after_forward: bool = True,
    keep_budget: int = 0,
    shadow_weights: bool = False,
    compile: bool = False,
    device: Device = "cpu",
) -> list[Comparison]:
    """Every figure of one step of `rank`, counted in a dry step and predicted without: traffic and what stays by
    formulas, the rest from dry steps of few layers. Args, Raises: see `dry_step`."""
    choice = StepOptions(
        micro_batches=micro_batches,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
        keep_budget=keep_budget,
    )
    step: dict[str, Any] = {
        **asdict(choice),
        "rank": rank,
        "types": types,
        "optimizer": optimizer,
        "shard_over_data": shard_over_data,
        "shadow_weights": shadow_weights,
        "compile": compile,
        "device": device,
    }
    dry = counted_step(config, shape, load, **step)
    shallow = counted_memory(config, shape, load, **step)
    wire = CommModel(
        shape=shape, rank=rank, compute=TYPES[types.compute].itemsize, gradient=TYPES[types.reduce].itemsize
    )
    scaled = scaled_weights(config, shape, None if types.fp8 == "off" else types.fp8)
    formula = least_memory(
        config,
        wire,
        load,
        choice,
        optimizer=optimizer,
        device=device,
        shard_over_data=shard_over_data,
        shadow_weights=shadow_weights,
        compile=compile,
        scaled=scaled,
        fp8_history=types.fp8_history,
    )
    received, calls = (
        step_traffic(
            config,
            each,
            load.rows,
            load.masked,
            load.first,
            micro_batches=micro_batches,
            norm=STEP_NUMBERS,
            reduce_loss=False,
            reshard_after_forward=reshard_after_forward,
            keep_budget=keep_budget,
            recompute=recompute,
            summed=held(config, shape, rank).summed(optimizer),
            scaled=scaled,
            shard_over_data=shard_over_data,
        )
        for each in (wire, replace(wire, unit="calls"))
    )
    memory = [
        Comparison(what=name, predicted=getattr(source, name), counted=getattr(dry.memory, name))
        for source, names in (
            (formula, ("weights", "gradients", "optimizer", "shadows", "scales")),
            (shallow, ("peak", "saved")),
        )
        for name in names
    ]
    return [*_traffic("bytes", received, dry.received), *_traffic("calls", calls, dry.calls), *memory]


def _traffic(unit: str, predicted: Bytes, counted: Bytes) -> Iterator[Comparison]:
    for axis, kind in sorted({*+predicted, *+counted}):
        yield Comparison(what=f"{unit} {axis} {kind}", predicted=predicted[axis, kind], counted=counted[axis, kind])

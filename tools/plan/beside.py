"""A dry step beside what the closed forms say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from models.bert import BertConfig
from models.bert.inventory import parameters
from models.bert.memory import StepMemory, step_memory
from models.bert.saved import Load
from models.bert.traffic import step_traffic
from tensor3d import CubeShape
from tensor3d.layers.attention import Recompute
from tensor3d.planning.traffic import Bytes, Wire
from tools.building import TYPES
from tools.plan.dry import Dry, dry_step
from tools.recipe_sections import PrecisionRecipe

_NORM = 3  # numbers in the norm's sum: the square, the ranks that want to stop, the losses that are not finite


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
    load: Load,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionRecipe = PrecisionRecipe(),  # noqa: B008  # frozen
    optimizer: Literal["adamw", "lamb"] = "adamw",
    recompute: Recompute = "none",
    keep_gathered: bool = False,
) -> list[Comparison]:
    """Every figure of one step of `rank`, counted in a dry step and predicted without. Args, Raises: see `dry_step`."""
    dry = dry_step(
        config,
        shape,
        load,
        rank=rank,
        micro_batches=micro_batches,
        types=types,
        optimizer=optimizer,
        recompute=recompute,
        keep_gathered=keep_gathered,
    )
    wire = Wire(shape=shape, rank=rank, compute=TYPES[types.compute].itemsize, gradient=TYPES[types.reduce].itemsize)
    memory = step_memory(
        config,
        wire,
        load,
        micro_batches=micro_batches,
        recompute=recompute,
        keep_gathered=keep_gathered,
        optimizer=optimizer,
    )
    received, calls = (
        step_traffic(
            config,
            each,
            load.rows,
            load.masked,
            load.first,
            micro_batches=micro_batches,
            norm=_NORM,
            keep_gathered=keep_gathered,
            recompute=recompute,
            lamb=sum(len(p.shape) > 1 for p in parameters(config)) if optimizer == "lamb" else 0,
        )
        for each in (wire, replace(wire, unit="calls"))
    )
    return [*_traffic("bytes", received, dry.received), *_traffic("calls", calls, dry.calls), *_memory(memory, dry)]


def _traffic(unit: str, predicted: Bytes, counted: Bytes) -> Iterator[Comparison]:
    for axis, kind in sorted({*+predicted, *+counted}):
        yield Comparison(what=f"{unit} {axis} {kind}", predicted=predicted[axis, kind], counted=counted[axis, kind])


def _memory(predicted: StepMemory, counted: Dry) -> Iterator[Comparison]:
    for name in ("weights", "gradients", "optimizer", "peak"):
        yield Comparison(what=name, predicted=getattr(predicted, name), counted=getattr(counted, name))
    yield Comparison(what="saved", predicted=predicted.saved.total, counted=counted.saved)

"""Memory of boxes, counted in dry steps of the real code; and a whole dry step beside what was said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from models.bert import BertConfig
from models.bert.cost_model.comm_volume import step_traffic
from models.bert.cost_model.memory import Device, MicroBatchShape, least_memory
from models.bert.cost_model.param_shapes import parameters
from models.bert.cost_model.step_cost import BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.cost_model.step_cost import Memory, StepOptions
from tensor3d.layers.attention import Recompute
from tools.training.config import PrecisionConfig
from tools.training.dry_step import counted_memory, counted_step
from tools.training.factory import TYPES

# --- Memory of a box --------------------------------------------------------------------------------------------------


def memory_counter(costs: BertCosts, show: Callable[[], object]) -> Callable[[CubeShape, StepOptions], Memory]:
    """Counts what a step of rank 0 needs, from dry steps of few layers.

    Args:
        show: is called after each count.
    """

    def count(shape: CubeShape, choice: StepOptions) -> Memory:
        # Where its axes lie makes no difference to memory, and boxes are remembered.
        box = CubeShape(x=shape.x, y=shape.y, z=shape.z, data=shape.data)
        found = counted_memory(costs.config, box, costs.batch.load(box, choice.micro_batches), **step_of(costs, choice))
        show()
        return Memory(
            weights=found.weights,
            gradients=found.gradients,
            optimizer=found.optimizer,
            saved=found.saved,
            peak=found.peak,
            counted=True,
        )

    return count


def step_of(costs: BertCosts, choice: StepOptions) -> dict[str, Any]:
    """Arguments of `dry_step`."""
    return {
        "micro_batches": choice.micro_batches,
        "types": PrecisionConfig(compute=costs.compute, reduce=costs.reduce),  # type: ignore[arg-type]
        "optimizer": costs.optimizer,
        "recompute": choice.recompute,
        "keep_gathered": choice.keep_gathered,
        "device": costs.device,
    }


# --- A dry step of all layers beside what was predicted of it ---------------------------------------------------------

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
    load: MicroBatchShape,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    types: PrecisionConfig = PrecisionConfig(),  # noqa: B008  # frozen
    optimizer: Literal["adamw", "lamb"] = "adamw",
    recompute: Recompute = "none",
    keep_gathered: bool = False,
    device: Device = "cpu",
) -> list[Comparison]:
    """Every figure of one step of `rank`, counted in a dry step and predicted without: traffic and what stays by
    formulas, the rest from dry steps of few layers. Args, Raises: see `dry_step`."""
    choice = StepOptions(micro_batches=micro_batches, recompute=recompute, keep_gathered=keep_gathered)
    step: dict[str, Any] = {**asdict(choice), "rank": rank, "types": types, "optimizer": optimizer, "device": device}
    dry = counted_step(config, shape, load, **step)
    shallow = counted_memory(config, shape, load, **step)
    wire = CommModel(
        shape=shape, rank=rank, compute=TYPES[types.compute].itemsize, gradient=TYPES[types.reduce].itemsize
    )
    formula = least_memory(config, wire, load, choice, optimizer=optimizer, device=device)
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
    memory = [
        Comparison(what=name, predicted=getattr(source, name), counted=getattr(dry.memory, name))
        for source, names in ((formula, ("weights", "gradients", "optimizer")), (shallow, ("peak", "saved")))
        for name in names
    ]
    return [*_traffic("bytes", received, dry.received), *_traffic("calls", calls, dry.calls), *memory]


def _traffic(unit: str, predicted: Bytes, counted: Bytes) -> Iterator[Comparison]:
    for axis, kind in sorted({*+predicted, *+counted}):
        yield Comparison(what=f"{unit} {axis} {kind}", predicted=predicted[axis, kind], counted=counted[axis, kind])

"""What a training step asks of one rank: the plain numbers between a model's closed forms and a cluster's seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from tensor3d.cost_model.comm_volume import Bytes, CommModel, Kept, ProductTraffic, Side, other, product_collectives
from tensor3d.distributed.cube_shape import CubeShape

Recompute = Literal["none", "attention", "layer"]
Fp8 = Literal["rowwise", "tensorwise", "delayed"]
"""As of `MixedPrecisionPolicy.fp8`."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of `tensor3d.sharding.matmul`, as often as a micro-batch does it."""

    rows: int
    """Of the plane."""
    k: int
    n: int
    face: Side = "z"
    times: int = 1
    kept: Kept = False
    """Which gathered operands stay for backward."""
    repeated: bool = False
    """Backward computes its forward again."""
    bias: bool = True
    together: bool = False
    """Its weight travels over x in one gather with those of its block."""
    fp8: Fp8 | None = None
    """How it multiplies in FP8; None: in the type of what it reads."""
    hands_on: bool = False
    """A residual has what it reads from it (`tensor3d.sharding.matmul.HandedOn`)."""

    def flops(self, shape: CubeShape) -> float:
        """Of one pass on a rank; there is one forward and two backward."""
        return 2 * self.rows * (self.k / shape.size(self.face)) * (self.n / shape.size(other(self.face)))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank. Weights, gradients and the optimiser's state are exact."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    """Kept for the backward pass of one micro-batch."""
    peak: int
    """The most at once."""
    shadows: int = 0
    """Copies of weights in the type of products, which stay (`ExecutionPolicy.shadow_weights`)."""
    scales: int = 0
    """Histories and scales of products in FP8 with delayed scaling, which stay."""
    counted: bool
    """Whether `saved` and `peak` were counted in a run of the step; else both are a formula's lower bounds."""

    @property
    def at_rest(self) -> int:
        """Between steps, where no gradients stay."""
        return self.weights + self.optimizer + self.shadows + self.scales


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is free once the box is chosen.

    Raises:
        ValueError: a budget below 0, or one beside reshard_after_forward=False, which keeps everything.
    """

    micro_batches: int = 1
    recompute: Recompute = "none"
    reshard_after_forward: bool = True
    keep_budget: int = 0
    """Bytes of a rank for gathered operands that stay for backward, as `tensor3d.keep_gathered` chooses them."""

    def __post_init__(self) -> None:
        check_keep_budget(self.keep_budget, self.reshard_after_forward)

    @property
    def words(self) -> str:
        """What memory is spent on, or saved by."""
        kept = f"{self.keep_budget // 2**20:,} MiB kept" if self.keep_budget else ""
        kept = kept or ("" if self.reshard_after_forward else "kept gathers")
        if self.recompute != "none":
            return f"recompute {self.recompute}{kept and ', '}{kept}"
        return kept or "shards alone"


def check_keep_budget(budget: int, reshard_after_forward: bool) -> None:
    """Raises ValueError for a budget below 0, and for one where everything is kept."""
    if budget < 0:
        raise ValueError(f"keep_budget must be at least 0. Got {budget}.")
    if budget and not reshard_after_forward:
        raise ValueError(
            f"keep_budget={budget} and reshard_after_forward=false exclude each other: the one keeps what fits in a "
            "budget, the other everything. Leave one of them out."
        )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of a whole step on the busiest rank."""

    wire: CommModel
    """The box, the rank and the sizes of what travels."""
    choice: StepOptions
    products: tuple[Product, ...]
    """Of a micro-batch."""
    micro: Bytes
    """Received in a micro-batch, products' share included."""
    micro_calls: Bytes
    once: Bytes
    """Received at the end of the step: sums of gradients, their norm, the optimiser's norms."""
    once_calls: Bytes
    attention_flops: float
    """Of a micro-batch, all passes."""
    touched: float
    """Bytes that memory-bound operators read and write in a micro-batch. An estimate."""
    operators: int
    """Started in a micro-batch. An estimate."""
    once_touched: float
    once_operators: int
    tokens: int
    """Of the step, over all ranks."""
    model_flops: float
    """Of the step, over all ranks, without what is computed again."""
    memory: Memory

    @cached_property
    def collectives(self) -> tuple[ProductTraffic, ...]:
        """Of each product, the bytes of each collective: the same wherever the axes lie."""
        return tuple(product_collectives(self.wire, each.rows, each.k, each.n, each.face) for each in self.products)

    @property
    def traffic(self) -> Bytes:
        """Bytes received in the step, by axis and kind."""
        return _summed(self.micro, self.choice.micro_batches, self.once)

    @property
    def calls(self) -> Bytes:
        """Collectives of the step, by axis and kind."""
        return _summed(self.micro_calls, self.choice.micro_batches, self.once_calls)


class PlannedModel(Protocol):
    """A model with its global batch, as the planner asks for it. `BertCosts` of models.bert.cost_model is one."""

    def refuse(self, shape: CubeShape) -> str | None:
        """Why the model or its batch does not lie on a box; None: it does."""

    def micro_batches(self, shape: CubeShape) -> list[int]:
        """Into how many micro-batches the step can be cut there, ascending."""

    def keepable(self, shape: CubeShape, choice: StepOptions) -> int:
        """Bytes of all operands that a micro-batch gathers and could keep: the largest budget that matters."""

    def smaller_budgets(self, shape: CubeShape, choice: StepOptions) -> list[range]:
        """Ranges below the choice's `keep_budget`, of each of which the largest that fits may be faster
        (`GatheredOperands.one_less`)."""

    def memory(self, shape: CubeShape, choice: StepOptions) -> Memory:
        """Of the fullest rank, by a formula that never says too much."""

    def cost(self, shape: CubeShape, choice: StepOptions) -> StepCost:
        """Of the busiest rank."""


def _summed(micro: Bytes, number: int, once: Bytes) -> Bytes:
    total: Bytes = Counter({key: number * count for key, count in micro.items()})
    total.update(once)
    return Counter({key: count for key, count in total.items() if count})

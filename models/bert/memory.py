"""The most memory that one rank needs for training a BERT: what stays, what a backward pass keeps, what comes and goes.

`saved` (models/bert/saved.py) and what stays are exact. What comes and goes is the largest of a few moments, each a sum
of the tensors that are alive in it; what the allocator, the communication library and Python need is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.bert.config import BertConfig
from models.bert.inventory import held_elements, parameters, replicated_elements
from models.bert.saved import Device, Load, Saved, saved
from tensor3d.layers.attention import Recompute
from tensor3d.planning.traffic import Side, Wire, chunk, other
from tensor3d.shape import AxisName


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    """Two moments an element."""
    saved: Saved
    """Kept for the backward pass of one micro-batch."""
    passing: int
    """Gathered operands, products and gradients on their way, at the worst moment of the step."""
    peak: int
    """All together at that moment: less than the sum of the parts, which do not all have their most at once."""


def step_memory(
    config: BertConfig,
    wire: Wire,
    load: Load,
    *,
    micro_batches: int = 1,
    recompute: Recompute = "none",
    keep_gathered: bool = False,
    optimizer: Literal["adamw", "lamb"] = "adamw",
    device: Device = "cpu",
) -> StepMemory:
    """Of training with AdamW or LAMB and `micro_batches` backward passes a step.

    Args:
        wire, load: the rank, the sizes of its types and what a micro-batch gives it. Rank 0 has the most weights.
        recompute, keep_gathered: as the model was made.
    """
    elements = held_elements(config, wire.shape, wire.rank)
    weights = gradients = elements * wire.parameter
    kept = saved(config, wire, load, recompute=recompute, keep_gathered=keep_gathered, device=device)
    again = 0
    if recompute != "none":
        again = saved(config, wire, load, keep_gathered=keep_gathered, device=device).layer - kept.layer
    work = _Work(config, wire, load, device)
    held_back = gradients if micro_batches > 1 else 0  # by the micro-batches before this one
    moments = [
        # the heads' backward, with everything still kept
        (kept.total + held_back, work.heads()),
        # the last layer's
        (kept.total - kept.heads + held_back, again + work.layer()),
        # the first layer's, when nearly all gradients are there
        (kept.embeddings + kept.layer + gradients + held_back, again + work.layer()),
        # the embedding's
        (gradients + held_back, work.embeddings()),
        # the sums over ranks: flat copies of what is summed
        (gradients + held_back, replicated_elements(config, wire.shape, wire.rank) * wire.parameter),
        # the optimiser's step: LAMB's update of what decays
        (gradients, _adapted(config, wire) * wire.parameter if optimizer == "lamb" else 0),
    ]
    stays = weights + 2 * elements * wire.parameter
    standing, passing = max(moments, key=sum)
    return StepMemory(
        weights=weights,
        gradients=gradients,
        optimizer=2 * elements * wire.parameter,
        saved=kept,
        passing=passing,
        peak=stays + standing + passing,
    )


def _adapted(config: BertConfig, wire: Wire) -> int:
    return sum(p.held(wire.shape, wire.rank) for p in parameters(config) if len(p.shape) > 1)


@dataclass(frozen=True)
class _Work:
    """Bytes that come and go, beside what was saved and the gradients of parameters; less what is freed by then."""

    config: BertConfig
    wire: Wire
    load: Load
    device: Device

    @property
    def state(self) -> int:
        """A hidden state's shard."""
        plane = self.wire.size("y") * self.wire.size("z")
        return self.load.rows * self.config.hidden // plane * self.wire.compute

    def layer(self) -> int:
        """The worst of a layer's backward, in which what was saved is freed step by step."""
        hidden, rows, state = self.config.hidden, self.load.rows, self.state
        modern = self.config.encoder == "modern"
        inner = state // hidden * self.config.inner_size
        wide = state // self.wire.compute * self.wire.statistic
        copied = 2 if self.wire.compute < self.wire.statistic else 0
        # Between its products the MLP frees GELU's input and output; or both factors, the gate and their product.
        between = 4 * inner if modern else 2 * inner
        into = 2 * self.config.inner_size if modern else self.config.inner_size
        freed = between + 2 * state  # by the MLP
        # Two gradients of hidden states go through all of it; with norms before the blocks, the stream's too.
        passing = 3 if self.config.pre_norm else 2
        return passing * state + max(
            (4 + copied) * wide,  # LayerNorm in fp32
            self.product(rows, self.config.inner_size, hidden, "y"),
            # GELU: two gradients, and its output is gone; or three, of the product and both factors
            2 * inner if modern else inner,
            self.product(rows, hidden, into, "z") - between,
            self.product(rows, hidden, hidden, "y") - freed,
            7 * state - freed,  # attention: gradients of q, k, v, and of QKV put together
            self.product(rows, hidden, 3 * hidden, "z") - freed - 4 * state,
        )

    def heads(self) -> int:
        """The projection to the vocabulary and the cross-entropy, forward and backward."""
        wire, slots, hidden, vocab = self.wire, self.load.masked, self.config.hidden, self.config.vocab
        logits = slots // wire.size("z") * chunk(vocab, wire.size("y"), wire.index("y"))
        copy = wire.statistic if wire.compute < wire.statistic else 0
        return max(
            logits * (wire.statistic + copy),
            self.product(slots, hidden, vocab, "z") - logits * wire.compute,  # they are not needed any more
        )

    def embeddings(self) -> int:
        """The gradient of all the plane's rows, and of the slab of the table that they are added into."""
        wire, columns = self.wire, self.config.hidden // self.wire.size("z")
        slab = chunk(self.config.vocab, wire.size("y"), wire.index("y")) * columns
        rows, wide = self.load.rows * columns, max(4, wire.compute)
        # The tied weight's other gradient, from the projection, is added at the end of the pass.
        tied = -(-slab // wire.size("x")) * wire.parameter
        converted = max(wide, wire.parameter) + wire.compute if wire.compute < wide else wide
        adding = self.gathered(rows, "y") * wire.compute + rows * (2 * wide if wire.compute < wide else wide)
        return tied + slab * converted + max(adding, self.scattered(slab, "x") * wire.gradient)

    def product(self, rows: int, k: int, n: int, face: Side) -> int:
        """Backward of a product of K and N features: dC and its gather, A', W', dA' and dW (see `tensor3d.matmul`)."""
        wire, a = self.wire, other(face)
        slab, columns = chunk(n, wire.size(a), wire.index(a)), k // wire.size(face)
        dc = rows // wire.size(face) * slab
        weight = slab * columns if wire.size("x") > 1 or wire.compute != wire.parameter else 0
        operands = dc + weight
        operands += rows * slab if wire.size(face) > 1 else 0
        operands += rows * columns if wire.size(a) > 1 else 0
        gathering = self.gathered(rows * slab, face) + self.gathered(rows * columns, a)
        da = rows * columns + self.scattered(rows * columns, a)
        dw = slab * columns * (wire.compute + (wire.gradient if wire.compute != wire.gradient else 0))
        uneven = slab * columns if slab % wire.size("x") else 0  # padded to travel, in a copy
        dw += (self.scattered(slab * columns, "x") + uneven) * wire.gradient
        return max((operands + gathering) * wire.compute, (operands + da) * wire.compute + dw)

    def gathered(self, elements: int, axis: AxisName) -> int:
        """What is alive beside the result while it is gathered: gloo has a buffer of the same size."""
        return elements if self.wire.size(axis) > 1 and self.device == "cpu" else 0

    def scattered(self, elements: int, axis: AxisName) -> int:
        """What is alive beside the summands while they are scattered: the result; gloo sums in a copy."""
        if self.wire.size(axis) == 1:
            return 0
        return elements // self.wire.size(axis) + (elements if self.device == "cpu" else 0)

"""What a rank surely needs for training a BERT: parameters exactly, and a lower bound of all together, by a formula.

H hidden size, I inner size, V vocabulary, h heads; P rows of a plane, R masked slots of it; A = P H / yz elements of a
hidden state on a rank

For the backward pass a layer keeps at least, in elements,

    its input, q k v, the projection's input                  1 + 3 + 1     A   (k and v of fewer heads: less; of
                                                                                 heads of another width: as wide)
    the first sum, the MLP's input                            1 + 1         A
    GELU's input and output; with gates two inputs more       2 or 4 I/H    A   (gates in regions: 3)
    the second sum                                            1             A
    with norms of q and k, both once more; with norms of what both parts give, this once more

and the masked-LM head the logits, R V / yz, and, where x is more than 1, its gathered weight, V H / yz. Where gathers
are kept, what was gathered counts, and the gathered weights; where a layer is recomputed, its input alone, and all of
it in the one layer whose turn it is. Of a budget for gathered operands what fits in it counts, product by product.

Not in it: statistics, masks, indices, embeddings, what attention's kernels keep, what comes and goes. All of that is
counted by running the step (`tools.training.dry_step`), which takes seconds a box; a planner that looks at thousands of
boxes leaves out by this bound those that cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.bert.config import BertConfig
from models.bert.cost_model.kept_operands import kept_products, layer_products
from models.bert.cost_model.param_shapes import OptimizerName, held
from tensor3d.cost_model.comm_volume import CommModel, Kept, Side, chunk, other
from tensor3d.cost_model.product_operators import scale_bytes
from tensor3d.cost_model.step_cost import Memory, StepOptions
from tensor3d.distributed.data_shares import ShardOverData

Device = Literal["cpu", "cuda"]
_MOMENTS, _STEPS = 2, 4  # of each element; bytes of each parameter's count of steps


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """A micro-batch, as one rank has to hold it."""

    rows: int
    """P: token slots of a plane."""
    masked: int
    """R: slots of a plane for masked positions."""
    first: int
    """C: slots of a plane for [CLS]."""
    lengths: tuple[int, ...]
    """Rows of each sequence on this rank's rows of face y; the unused tail of a pack is one."""


def least_memory(
    config: BertConfig,
    wire: CommModel,
    load: MicroBatchShape,
    choice: StepOptions,
    *,
    optimizer: OptimizerName,
    device: Device,
    shard_over_data: ShardOverData = False,
    keep_buckets: bool | None = None,
    shadow_weights: bool = False,
    compile: bool = False,
    scaled: int = 0,
    fp8_history: int = 16,
) -> Memory:
    """Weights, their copies, gradients and the optimiser's state exactly; `saved` and `peak` are lower bounds.

    Args:
        wire, load: the rank, the sizes of its types and what a micro-batch gives it. Rank 0 has the most weights.
        device: with dropout of its probabilities, attention on a CPU keeps them.
        shard_over_data: whether the optimiser's state is, and whether gradients are.
        keep_buckets, shadow_weights, compile: as of `ExecutionPolicy`. What compiled regions keep for backward is
            nothing less (statistics and masks apart, which are not in it) but of gates; the optimiser's step holds
            less.
        scaled: weights with delayed scales (`scaled_weights` of comm_volume.py).
        fp8_history: as of `MixedPrecisionPolicy`.
    """
    here = held(config, wire.shape, wire.rank)
    weights, state = held_bytes(config, wire, shard_over_data)
    gradients = here.gradients(wire.shape, shard_over_data) * wire.parameter
    shadows, scales = shadow_bytes(config, wire) if shadow_weights else 0, scale_bytes(scaled, fp8_history)
    gates = compile and device == "cuda"  # in regions, which keep their inputs alone
    layers, once_more, logits = _kept(config, wire, load, choice, device, shadow_weights, gates)
    # Gradients come as what is kept goes; those of earlier micro-batches are there from the start, or the memory of
    # those of the step before. A layer is computed again when the logits are gone.
    keeps = keep_buckets if keep_buckets is not None else device == "cpu" and not shard_over_data
    stay = kept_buckets(config, wire) if keeps and shard_over_data != "gradients" else 0
    backward = layers + max(once_more, logits) + (weights if choice.micro_batches > 1 else stay)
    update = gradients + here.updates(optimizer, shard_over_data, compiled=compile) * wire.parameter
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=state,
        saved=layers + logits,
        peak=weights + state + shadows + scales + max(backward, update),
        shadows=shadows,
        scales=scales,
        counted=False,
    )


def kept_buckets(config: BertConfig, wire: CommModel) -> int:
    """Bytes that stay of a step's gradients, with one micro-batch, where `ExecutionPolicy.keep_buckets` holds."""
    if wire.gradient != wire.parameter or wire.size("data") == 1:
        return 0
    sums = held(config, wire.shape, wire.rank).by_sum.items()
    return wire.parameter * sum(elements for axes, elements in sums if wire.named(axes) == "data")


def shadow_bytes(config: BertConfig, wire: CommModel) -> int:
    """Bytes of the copies of weights and biases in the type of products, with `ExecutionPolicy.shadow_weights`."""
    return 0 if wire.compute == wire.parameter else held(config, wire.shape, wire.rank).multiplied * wire.compute


def held_bytes(config: BertConfig, wire: CommModel, shard_over_data: ShardOverData = False) -> tuple[int, int]:
    """Of the weights, and of the optimiser's state: two moments of each element, or of each in this rank's shares over
    data, and a count of steps of each parameter."""
    here = held(config, wire.shape, wire.rank)
    moments = _MOMENTS * here.stepped(shard_over_data) * wire.parameter
    return here.total * wire.parameter, moments + _STEPS * here.tensors


def _kept(
    config: BertConfig,
    wire: CommModel,
    load: MicroBatchShape,
    choice: StepOptions,
    device: Device,
    shadow_weights: bool,
    gates: bool,
) -> tuple[int, int, int]:
    """Bytes: of all layers, of the one whose turn it is to be computed again beside its input, and of the logits with
    the projection's weight."""
    state = load.rows * config.hidden // (wire.size("y") * wire.size("z"))
    layer = _layer(config, wire, load, choice, device, shadow_weights, gates)
    first = 0 if config.has_attention_norm(0) else state
    slab = chunk(config.vocab, wire.size("y"), wire.index("y"))
    logits = load.masked // wire.size("z") * slab
    if wire.size("x") > 1:
        logits += slab * (config.embedding_size // wire.size("z"))
    if choice.recompute == "layer":
        found = (config.layers * state, layer - state - first, logits)
    else:
        found = (config.layers * layer - first, 0, logits)  # the first may have a norm less
    if choice.keep_budget:
        layers, heads = _within_budget(config, wire, load, choice)
        found = (found[0] + layers, found[1], found[2] + heads)
    return found[0] * wire.compute, found[1] * wire.compute, found[2] * wire.compute


def _within_budget(config: BertConfig, wire: CommModel, load: MicroBatchShape, choice: StepOptions) -> tuple[int, int]:
    """Elements that a budget keeps beside what is kept without one: before the heads, and in them."""
    kept = kept_products(
        config,
        wire.shape,
        load.rows,
        wire.compute,
        budget=choice.keep_budget,
        recompute=choice.recompute,
        weight_group_bytes=wire.weight_group_bytes,
    )

    def more(rows: int, k: int, n: int, face: Side, inputs: int, weights: int, *, shard_stays: bool = False) -> int:
        """Of products of one size, of which so many keep what they gather."""
        # What is gathered of an input stands in the place of this rank's shard, unless that is kept by others too.
        members, columns = wire.size(other(face)), k // wire.size(face)
        shard = 0 if shard_stays else rows // members
        return columns * (inputs * (rows - shard) + weights * chunk(n, members, wire.index(other(face))))

    def one(rows: int, k: int, n: int, of_it: Kept) -> int:
        return more(rows, k, n, "z", of_it in (True, "input"), of_it in (True, "weight"))

    hidden, columns, sizes = config.hidden, config.embedding_size, layer_products(config)
    relu = not config.has_gate and config.activation == "relu"  # which keeps its result
    layers = sum(
        more(load.rows, *size, count.inputs, count.weights, shard_stays=relu and size == sizes[-1])
        for size, count in zip(sizes, kept.layers, strict=True)
    )
    if config.product_beside_layers is not None:
        layers += one(load.rows, config.product_beside_layers, hidden, kept.projection)
    if wire.size("x") > 1:  # weights of heads stay, whatever the budget
        return layers, 0
    heads = 0 if config.traits.decoder_alone else one(load.masked, hidden, columns, kept.dense)
    if config.next_sentence:
        heads += one(load.first, hidden, hidden, kept.pooler)
    return layers, heads


def _layer(
    config: BertConfig,
    wire: CommModel,
    load: MicroBatchShape,
    choice: StepOptions,
    device: Device,
    shadow_weights: bool,
    gates: bool,
) -> int:
    """Elements that a layer keeps of which nothing is recomputed."""
    hidden, inner, gated = config.hidden, config.inner_size, config.has_gate
    y, z = wire.size("y"), wire.size("z")
    state, wide = load.rows * hidden // (y * z), load.rows * inner // (y * z)
    # A product's input lies on this rank in a share of what is gathered of it.
    over_y, over_z = (1, 1) if choice.reshard_after_forward else (y, z)
    mixed = state * config.mixed_size // hidden
    products = 2 * over_y * state + over_z * (mixed + wide)
    # Of ReLU the result alone, which is the next product's input; of gates both inputs, and the activation's result.
    between = (3 - gates if gated else 0 if config.activation == "relu" else 1) * wide
    kept = products + state * config.qkv_size // hidden + 2 * state + between
    if config.traits.qk_norm:
        kept += mixed * (config.heads + config.key_heads) // config.heads
    kept += 2 * state * config.traits.out_norms
    # Over an x of 1 nothing is gathered, and what is kept is what was converted: not where a copy stays anyway.
    converts = wire.compute != wire.parameter and not shadow_weights
    if not choice.reshard_after_forward and (wire.size("x") > 1 or converts):
        kept += hidden * (config.qkv_size + config.mixed_size + (3 if gated else 2) * inner) // (y * z)
    if device == "cpu" and config.attention_dropout and choice.recompute == "none":
        kept += config.heads // y * sum(length**2 for length in load.lengths)
    return kept

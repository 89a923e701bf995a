"""The bytes of one BERT pre-training step, in closed form. It must agree with the counter to the byte."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from models.bert.config import BertConfig
from models.bert.cost_model.kept_operands import KeptProducts, kept_products, layer_products
from models.bert.cost_model.param_shapes import held, layer_norms
from tensor3d.cost_model.comm_volume import (
    Bytes,
    CommModel,
    Kept,
    Side,
    block_products,
    cross_entropy,
    embedding,
    layer_norm,
    narrow_head,
    product,
    relative_table,
    replicated_gradients,
    rms_norm,
    select,
    times,
    together,
    transformer_layer,
    turn,
    unfold_rows,
    vocab_projection,
)
from tensor3d.cost_model.product_operators import suits_fp8
from tensor3d.cost_model.step_cost import Fp8
from tensor3d.distributed.cube_shape import AxisName, CubeShape
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.layers.attention import Recompute
from tensor3d.sharding.param_layout import matrix, replicated, vector


def micro_batch_traffic(
    config: BertConfig,
    wire: CommModel,
    rows: int,
    masked: int,
    first: int,
    *,
    reshard_after_forward: bool = True,
    keep_budget: int = 0,
    recompute: Recompute = "none",
    read: int | None = None,
    reduce_loss: bool = True,
) -> Bytes:
    """One forward and backward pass, without what the ledger sums. Shared: not to be changed.

    Args:
        rows: tokens of a plane; masked, first: slots of a plane for masked positions and for [CLS].
        reshard_after_forward, recompute: as the model was made.
        keep_budget: bytes, as `keep_gathered` was given for micro-batches of so many rows. 0: it was not called.
        read: slots of a plane for the rows that the last layer computes. None: all rows.
        reduce_loss: as of `BertForPreTraining.forward`.
    """
    kept = kept_products(
        config,
        wire.shape,
        rows,
        wire.compute,
        reshard_after_forward=reshard_after_forward,
        budget=keep_budget,
        recompute=recompute,
        weight_group_bytes=wire.weight_group_bytes,
    )
    return _micro_batch(config, wire, rows, masked, first, kept, recompute == "layer", read, reduce_loss)


@lru_cache(256)  # of a search: what recomputes attention sends what nothing recomputed sends
def _micro_batch(
    config: BertConfig,
    wire: CommModel,
    rows: int,
    masked: int,
    first: int,
    kept: KeptProducts,
    recomputed: bool,
    read: int | None,
    reduce_loss: bool,
) -> Bytes:
    hidden, vocab, columns = config.hidden, config.vocab, config.embedding_size
    dense, kept_of = _dense_of_heads(config, masked, first), {"masked_lm": kept.dense, "pooler": kept.pooler}
    parts = [
        embedding(wire, rows, vocab, columns, planes_alike=True),
        *([layer_norm(wire, rows)] if config.traits.embedding_norm else []),
        _layers(config, wire, rows, kept, recomputed, read),
        # masked-LM head
        select(wire, masked, hidden),
        block_products(wire, list(dense.values()), kept=[kept_of[name] for name in dense]),
        *([] if config.traits.decoder_alone else [layer_norm(wire, masked, "y"), turn(wire, masked, columns)]),
        vocab_projection(wire, masked, columns, vocab),
        cross_entropy(wire, masked),
        # both losses and both counts of right answers
        wire.summed(("data", "x", "z"), 4 if reduce_loss else 0, wire.statistic),
    ]
    if config.next_sentence:
        parts += [
            select(wire, first, hidden),
            narrow_head(wire, first, 2, "y"),
        ]
    if config.product_beside_layers is not None:
        read_columns = config.product_beside_layers
        parts += [product(wire, rows, read_columns, hidden, "z", kept=kept.projection), turn(wire, rows, hidden)]
    if config.conv_kernel is not None:
        parts += [unfold_rows(wire, hidden, config.conv_kernel), layer_norm(wire, rows)]
    if config.pre_norm:
        parts.append((rms_norm if config.traits.rms_norm else layer_norm)(wire, rows if read is None else read))
    if config.distance_buckets is not None:
        parts.append(layer_norm(wire, config.distance_buckets.rows // wire.size("x")))
        one = relative_table(wire, config.distance_buckets.rows, hidden, recomputed=recomputed)
        parts.append(times(one, config.layers))
    return together(parts)


def _dense_of_heads(config: BertConfig, masked: int, first: int) -> dict[str, tuple[int, int, int, Side]]:
    """Of the masked-LM head, and of the pooler."""
    found: dict[str, tuple[int, int, int, Side]] = {}
    if not config.traits.decoder_alone:
        found["masked_lm"] = (masked, config.hidden, config.embedding_size, "z")
    if config.next_sentence:
        found["pooler"] = (first, config.hidden, config.hidden, "z")
    return found


def ledger_traffic(config: BertConfig, wire: CommModel, *, shares: bool = False) -> Bytes:
    """The sums of gradients that ranks hold copies of, once a step; `shares`: those over data alone in shares of it."""
    here = held(config, wire.shape, wire.rank)
    return replicated_gradients(
        wire,
        *(here.by_sum.get(each.sum_over, 0) for each in (vector("y"), vector("z"), matrix("z"))),
        everywhere=here.by_sum.get(replicated().sum_over, 0),
        shares=here.scattered(wire.shape)[2] if shares else None,
    )


STEP_NUMBERS = 8
"""Of the last sum of a training step (`tools.training.step`): the square of the gradients' norm, the ranks that a
signal has asked to stop, those whose loss is not finite, and the five numbers of `PreTrainingOutput`."""


def step_traffic(
    config: BertConfig,
    wire: CommModel,
    rows: int,
    masked: int,
    first: int,
    *,
    micro_batches: int = 1,
    norm: int = 1,
    reshard_after_forward: bool = True,
    keep_budget: int = 0,
    recompute: Recompute = "none",
    read: int | None = None,
    summed: int = 0,
    scaled: int = 0,
    shard_over_data: ShardOverData = False,
    reduce_loss: bool = True,
) -> Bytes:
    """One optimiser step: its micro-batches, the ledger's sums, the gradient norm, and what the optimiser sends.

    Args:
        keep_budget, read, reduce_loss: as of `micro_batch_traffic`.
        norm: numbers in the sum of the gradient norm and what goes along with it, over all ranks; 1: nothing does, and
            copies over data have no need of one another; 0: gradients are not clipped.
        summed: numbers that the optimiser sums over all ranks (`ParamMemory.summed`).
        scaled: weights whose products have delayed scales in FP8 (`scaled_weights`).
        shard_over_data: whether its state is sharded over data, so that weights are gathered after the step, and
            whether gradients are, which are then reduce-scattered.
    """
    one = micro_batch_traffic(
        config,
        wire,
        rows,
        masked,
        first,
        reshard_after_forward=reshard_after_forward,
        keep_budget=keep_budget,
        recompute=recompute,
        read=read,
        reduce_loss=reduce_loss,
    )
    return times(one, micro_batches) + end_of_step_traffic(
        config, wire, norm=norm, summed=summed, scaled=scaled, shard_over_data=shard_over_data
    )


def scaled_weights(config: BertConfig, shape: CubeShape, fp8: Fp8 | None) -> int:
    """Of linear layers whose products have delayed scales: of other scaling none."""
    if fp8 != "delayed":
        return 0
    hidden = config.hidden
    layers: list[tuple[int, int, Side]] = config.layers * layer_products(config)
    dense = [(k, n, face) for _, k, n, face in _dense_of_heads(config, 0, 0).values()]
    beside = config.product_beside_layers
    entry: list[tuple[int, int, Side]] = [] if beside is None else [(beside, hidden, "z")]
    return sum(suits_fp8(shape, *sizes) for sizes in (*layers, *dense, *entry))


@lru_cache(256)  # the same for all choices of a box
def end_of_step_traffic(
    config: BertConfig,
    wire: CommModel,
    *,
    norm: int = 1,
    summed: int = 0,
    scaled: int = 0,
    shard_over_data: ShardOverData = False,
) -> Bytes:
    """What comes once a step: the ledger's sums, the gradient norm and what the optimiser sends; arguments as
    `step_traffic`. Shared: not to be changed."""
    everyone: tuple[AxisName, ...] = ("data", "x", "y", "z")
    size = max(4, wire.parameter)
    shares = shard_over_data == "gradients" and wire.size("data") > 1
    of_norm = everyone if norm > 1 or shares else ("x", "y", "z")
    norms = [wire.summed(of_norm, norm, size), wire.summed(everyone, summed, size)]
    # Hosts see that they speak of the same, and then the largest magnitudes of A', W' and dC' travel.
    norms += [wire.summed(everyone, 2, 8), wire.summed(everyone, 3 * scaled, 4)] if scaled else []
    ledger = ledger_traffic(config, wire, shares=shares)
    return together([ledger, *norms, *([_gathered(config, wire)] if shard_over_data else [])])


def _gathered(config: BertConfig, wire: CommModel) -> Bytes:
    """The weights that the other ranks along data have stepped (`tensor3d.optim.data_shards`)."""
    return wire.gathered_in_buckets("data", held(config, wire.shape, wire.rank).gathered)


def _layers(
    config: BertConfig, wire: CommModel, rows: int, kept: KeptProducts, recomputed: bool, read: int | None
) -> Bytes:
    """Layers with as many norms that keep the same send the same: a planner asks thousands of times for models of a
    hundred layers."""
    kinds, last = Counter[tuple[int, tuple[Kept, ...], int | None]](), config.layers - 1
    for layers_alike, of_products in kept.runs(config.layers):
        # The first and the last layer may differ from the others.
        alone = {layers_alike[0], layers_alike[-1]}
        for number, layers in (*((each, 1) for each in alone), (layers_alike[0] + 1, len(layers_alike) - len(alone))):
            if layers:
                kinds[layer_norms(config, number), of_products, read if number == last else None] += layers
    total: Bytes = Counter()
    for (norms, of_products, chosen), layers in kinds.items():
        one = transformer_layer(
            wire,
            rows,
            config.hidden,
            config.inner_size,
            qkv=config.qkv_size,
            mixed=config.mixed_size,
            gated=config.has_gate,
            norms=norms,
            rms=config.traits.rms_norm,
            pre_norm=config.pre_norm,
            kept=of_products,
            recomputed=recomputed,
            chosen=chosen,
        )
        total += times(one, layers)
    return total


def read_slots(packs: int, budget: int, wire: CommModel) -> int:
    """U: slots of a plane of `packs` packs for rows that heads read, `budget` a pack (`tensor3d.data.packed_batch`)."""
    y, z = wire.size("y"), wire.size("z")
    return -(-(packs // z) * budget // y) * y * z

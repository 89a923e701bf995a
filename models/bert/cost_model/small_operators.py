"""What a BERT asks for beside products and attention: operators, and the bytes that they read and write.

No formula says how many operators LayerNorm, GELU, dropout and sums are: these numbers were counted in the real code as
on a GPU (`tools.bench operators`), and tests/models/bert/cost_model/test_small_operators.py counts them again. What
takes a few per cent is left out: statistics of rows, vectors, ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from models.bert.config import BertConfig
from models.bert.cost_model.memory import MicroBatchShape
from tensor3d.attention.relative import LogBuckets
from tensor3d.cost_model.comm_volume import CommModel, chunk
from tensor3d.cost_model.product_operators import Work
from tensor3d.distributed.cube_shape import CubeShape


class Count(NamedTuple):
    """On one device; how many more where y is above 1; and where z is. Both add up, and how long they are makes no
    difference, nor does x (but by `product_operators.end_to_end`)."""

    alone: int
    y: int = 0
    z: int = 0

    def on(self, shape: CubeShape) -> int:
        return self.alone + self.y * (shape.y > 1) + self.z * (shape.z > 1)


class LayerCounts(NamedTuple):
    """Of a layer, forward and backward, with dropout of both of its results."""

    operators: Count
    state: Count
    """Bytes that are read and written, for each element of the hidden state."""
    inner: Count
    """And for each of the MLP's inner state."""


class RestCounts(NamedTuple):
    """Of embeddings, heads and loss, forward and backward."""

    operators: Count
    state: Count
    """Bytes for each element of the hidden state."""
    masked: Count
    """For each of the masked rows' hidden states."""
    logits: Count
    """For each of this rank's logits."""


Form = Literal["post", "pre", "modern", "rms"]
"""Of a layer: the classic one with LayerNorm after its residuals or before its parts, the modern one, or that with
RMSNorm, without norm of the embeddings and with a masked-LM head of a projection alone."""
_Kind = tuple[Form, bool, bool]
"""Form, whether products are in 16 bits, whether regions are compiled."""
LAYER: Mapping[_Kind, LayerCounts] = MappingProxyType(
    {
        ("post", False, False): LayerCounts(Count(35, 4, 74), Count(168, 40, 289), Count(24, 0, 8)),
        ("post", False, True): LayerCounts(Count(24, 4, 5), Count(112, 40, 48), Count(20)),
        ("post", True, False): LayerCounts(Count(37, 4, 82), Count(158, 20, 297), Count(12, 0, 4)),
        ("post", True, True): LayerCounts(Count(24, 4, 5), Count(58, 20, 24), Count(10)),
        ("pre", False, False): LayerCounts(Count(37, 2, 74), Count(192, 16, 289), Count(24, 0, 8)),
        ("pre", False, True): LayerCounts(Count(30, 2, 5), Count(152, 16, 48), Count(20)),
        ("pre", True, False): LayerCounts(Count(41, 2, 80), Count(166, 8, 301), Count(12, 0, 4)),
        ("pre", True, True): LayerCounts(Count(30, 2, 5), Count(78, 8, 24), Count(10)),
        ("modern", False, False): LayerCounts(Count(106, 0, 68), Count(324, 0, 241), Count(72)),
        ("modern", False, True): LayerCounts(Count(36, 0, 4), Count(156, 0, 24), Count(32)),
        ("modern", True, False): LayerCounts(Count(114, 0, 74), Count(312, 0, 265), Count(36)),
        ("modern", True, True): LayerCounts(Count(36, 0, 4), Count(80, 0, 12), Count(16)),
        ("rms", False, False): LayerCounts(Count(130), Count(444), Count(72)),
        ("rms", False, True): LayerCounts(Count(36, 0, 4), Count(156, 0, 24), Count(32)),
        ("rms", True, False): LayerCounts(Count(144), Count(456), Count(36)),
        ("rms", True, True): LayerCounts(Count(36, 0, 4), Count(80, 0, 12), Count(16)),
    }
)
REST: Mapping[_Kind, RestCounts] = MappingProxyType(
    {
        ("post", False, False): RestCounts(
            Count(70, 65, 47), Count(132, 18, 120), Count(100, 202, 40), Count(52, 0, 8)
        ),
        ("post", False, True): RestCounts(Count(50, 13, 13), Count(108, 18, -1), Count(88, 81, 40), Count(16, 0, 8)),
        ("post", True, False): RestCounts(Count(82, 69, 51), Count(158, 14, 130), Count(92, 188, 20), Count(42, 0, 4)),
        ("post", True, True): RestCounts(Count(58, 13, 13), Count(110, 14, -7), Count(52, 49, 20), Count(8, 0, 4)),
        ("pre", False, False): RestCounts(Count(74, 65, 83), Count(164, 18, 252), Count(100, 202, 40), Count(52, 0, 8)),
        ("pre", False, True): RestCounts(Count(52, 13, 15), Count(128, 18, 11), Count(88, 81, 40), Count(16, 0, 8)),
        ("pre", True, False): RestCounts(Count(88, 69, 90), Count(208, 14, 275), Count(92, 188, 20), Count(42, 0, 4)),
        ("pre", True, True): RestCounts(Count(60, 13, 15), Count(120, 14, -1), Count(52, 49, 20), Count(8, 0, 4)),
        ("modern", False, False): RestCounts(
            Count(67, 62, 42), Count(110, 12, 109), Count(96, 190, 32), Count(52, 0, 8)
        ),
        ("modern", False, True): RestCounts(Count(48, 12, 10), Count(94, 12, 0), Count(84, 81, 32), Count(16, 0, 8)),
        ("modern", True, False): RestCounts(Count(74, 66, 46), Count(130, 8, 119), Count(90, 176, 16), Count(42, 0, 4)),
        ("modern", True, True): RestCounts(Count(51, 12, 10), Count(86, 8, -6), Count(50, 49, 16), Count(8, 0, 4)),
        ("rms", False, False): RestCounts(Count(66, 20), Count(150, 12, -12), Count(36, 37), Count(48)),
        ("rms", False, True): RestCounts(Count(38, 2, 2), Count(78, 12), Count(36, 37), Count(12)),
        ("rms", True, False): RestCounts(Count(73, 21), Count(174, 8, -12), Count(26, 27), Count(40)),
        ("rms", True, True): RestCounts(Count(39, 2, 2), Count(62, 8, -6), Count(26, 27), Count(6)),
    }
)
EMBEDDING_NORM: Mapping[tuple[bool, bool], tuple[Count, Count]] = MappingProxyType(
    {
        (False, False): (Count(3, 0, 36), Count(32, 0, 133)),
        (False, True): (Count(-1, 0, 2), Count(8, 0, 12)),
        (True, False): (Count(4, 0, 40), Count(52, 0, 143)),
        (True, True): (Count(-1, 0, 2), Count(4, 0, 6)),
    }
)
"""By 16 bits and regions: operators, and bytes for each element of the hidden state, that the rest of XLM-RoBERTa-XL
has less, whose embeddings have no norm. A region adds and norms in one."""
_UNEVEN, _UNEVEN_ALONE = 3, 2
"""Operators of a sum and its LayerNorm more in 16 bits, eager, where one rank has all columns and they are no power of
two (tensor3d/layers/norm.py); one less without a sum, and then bytes for each element more."""
_NEXT_SENTENCE, _CHOSEN = 27, 16
"""Operators of a pooler with its head and loss, and bytes for each element of the hidden state: the gradient of the
rows that it reads is one of all rows, which is added to that of the others."""
_OVER_BOTH = 12
"""Bytes of the rest more for each element of the hidden state where y and z are above 1: the lookup's."""
_OVER_X = 24
"""Operators of the rest more where x alone is above 1: the lookup's, and those of several ranks, which `RestCounts` has
for y and z."""
_ROTARY, _ROTARY_COMPILED = 88, 28
"""Bytes of a layer of the modern encoder, for each row on face y and each column of a head: angles have no heads."""
_TURNED: Mapping[tuple[bool, bool], tuple[int, int]] = MappingProxyType(
    {(False, False): (69, 152), (False, True): (9, 24), (True, False): (73, 156), (True, True): (9, 12)}
)
"""By 16 bits and regions: operators of a classic layer with rotary positions more, and bytes for each element of the
hidden state, beside those of angles."""
_GATES: Mapping[bool, Count] = MappingProxyType({False: Count(3, 0, -1), True: Count(0)})
"""By regions: operators of a classic layer whose MLP has a gate more; for each element inside it, its bytes are the
modern encoder's."""
_BIASES = Count(3, 2, 1), Count(5, 4, 6)
"""Of QKV and of the products behind attention and MLP, where a layer has none: operators, and elements that are read or
written for each of the hidden state, less. They are added alone where products are summed over several ranks."""
_GROUPED: Mapping[tuple[bool, bool], tuple[int, int, int]] = MappingProxyType(
    {
        (False, False): (4, 32, 52),
        (False, True): (4, 32, 24),
        (True, False): (1, 4, 44),
        (True, True): (0, 0, 8),
    }
)
"""Of a layer with fewer heads of keys than of queries, by the last two of its kind: operators, and bytes for each
element of the hidden state, more; and bytes less for each element of QKV that is not there. In fp32 keys and values are
repeated. Nearly, where a rank has one head of keys."""
_OF_WIDTH: Mapping[tuple[bool, bool], tuple[int, int]] = MappingProxyType(
    {(False, False): (19, 51), (False, True): (-24, 8), (True, False): (35, 39), (True, True): (0, 0)}
)
"""Where all heads together are narrower than the hidden state, further bytes less for each element that is not there,
beside those of QKV: with as many heads of keys as of queries, and with fewer."""
_OF_OUTPUTS: Mapping[tuple[bool, bool], tuple[Count, Count]] = MappingProxyType(
    {
        (False, False): (Count(32), Count(184)),
        (False, True): (Count(4, 0, 4), Count(40, 0, 24)),
        (True, False): (Count(42), Count(244)),
        (True, True): (Count(4, 0, 4), Count(20, 0, 12)),
    }
)
"""By 16 bits and regions: operators of a layer's RMSNorms of what attention and MLP give, and bytes for each element of
the hidden state."""
_OF_HEADS: Mapping[bool, tuple[int, int]] = MappingProxyType({False: (30, 105), True: (40, 135)})
"""By 16 bits, eager: operators of the norms of queries and keys, and bytes for each of their elements. In regions they
are operators of no more, which read QKV once more."""
_ZERO_CENTERED = 2
"""Operators of a norm that adds 1 to its weight: in both passes."""
_SCALED = 2
"""Of embeddings that are multiplied: operators, and how often each element is read and written by either."""
_TABLE, _TABLE_OVER_X, _TABLE_ALONE = 12, 10, 4
"""Bytes for each element of the vocabulary's table on a plane: its gradient, where y or z is above 1 (alone, rows are
added to that of the projection); where x is; and where the projection has a weight of its own."""
_DISTANCES = Count(36, 0, 1)
"""Operators of a layer whose scores hang on distances, more."""
_CONVOLUTION: Mapping[tuple[bool, bool], tuple[int, int]] = MappingProxyType(
    {(False, False): (35, 176), (False, True): (36, 184), (True, False): (37, 120), (True, True): (38, 124)}
)
"""By 16 bits and regions: operators of a convolution of 3 tokens, and bytes for each element of the hidden state,
beside its norm's, of which `EMBEDDING_NORM` has as many, and its dropout's."""
_WIDER: Mapping[bool, tuple[int, int]] = MappingProxyType({False: (11, 72), True: (11, 52)})
"""By 16 bits: for each token more to both sides."""
_CONVOLVED_OVER = 5, 8, 3
"""Operators more where y or z is above 1, and for each of them."""
_WITHOUT_TABLES: Mapping[tuple[bool, bool], Count] = MappingProxyType(
    {
        (False, False): Count(-38, -3, 7),
        (False, True): Count(-27, -3),
        (True, False): Count(-47, -3, 8),
        (True, True): Count(-44, -3),
    }
)
"""By 16 bits and regions: bytes for each element of the hidden state that DeBERTa's rest has less, whose embeddings add
up no tables; its table by distance has a norm, and as many operators."""
_WITHOUT_TABLE: Mapping[tuple[bool, bool], tuple[int, int]] = MappingProxyType(
    {(False, False): (3, 20), (False, True): (2, 12), (True, False): (5, 26), (True, True): (4, 22)}
)
"""By 16 bits and regions: operators, and bytes for each element of the hidden state, that the rest of a classic encoder
without token types, or without a table of positions, has less."""
_WITHOUT_PLACES = Count(2, 5)
"""Bytes for each element of the hidden state that it has less beside, without a table of positions: of their lookup's
gradient."""
_BIAS: Mapping[bool, tuple[int, int]] = MappingProxyType({False: (8, 12), True: (10, 22)})
"""By 16 bits: operators of a layer with a bias by distance more, and bytes for each of its scores, of which all
sequences of one length share one."""
_FEWER_TABLES = 4
"""Operators less where several ranks sum the gradients of tables."""
AGAIN = 4 / 3
"""Of both passes, where backward computes a layer's forward pass again: within 15 % in all of `LAYER`."""


def form_of(config: BertConfig) -> Form:
    return "rms" if config.traits.rms_norm else "modern" if config.encoder == "modern" else config.norm


def small_operators(config: BertConfig, wire: CommModel, load: MicroBatchShape, *, compiled: bool, again: bool) -> Work:
    """Of a micro-batch, beside products, attention, and what follows from products.

    Args:
        compiled: whether chains of them are regions (`ExecutionPolicy.compile`), of which each is one operator that
            reads what it is given and writes what it returns.
        again: whether backward computes layers again.
    """
    shape = wire.shape
    kind = (form_of(config), wire.compute == 2, compiled)
    layer, rest, repeated = LAYER[kind], REST[kind], AGAIN if again else 1.0
    known = config.traits.embedding_norm or kind[0] == "rms"  # whose counts are without one
    bare = (Count(0), Count(0)) if known else EMBEDDING_NORM[kind[1:]]
    state, inner, masked = (
        rows * columns // (shape.y * shape.z)
        for rows, columns in (
            (load.rows, config.hidden),
            (load.rows, config.inner_size),
            (load.masked, config.hidden),
        )
    )
    slab = chunk(config.vocab, shape.y, wire.index("y"))
    of_inner = LAYER["modern", kind[1], kind[2]].inner if config.has_gate else layer.inner
    touched = layer.state.on(shape) * state + of_inner.on(shape) * inner
    if config.has_rotary:
        angles = _ROTARY_COMPILED if compiled else _ROTARY
        touched += angles * (load.rows // shape.z) * config.head_size
    turned = _turned(config, wire, compiled, state, inner) if kind[0] == "post" else Work()
    more, always, spared = _GROUPED[kind[1:]]
    spared = spared * (3 * config.hidden - config.qkv_size) // config.hidden
    is_grouped = config.key_heads < config.heads
    narrower = _OF_WIDTH[kind[1:]][is_grouped] * (config.hidden - config.mixed_size) // config.hidden
    grouped = Work(operators=more * is_grouped, touched=always * is_grouped - spared - narrower)
    further = _further_norms(config, wire, compiled, state)
    scaled = _SCALED * config.traits.scaled_embeddings
    distances, of_tables, convolved = Work(), Work(), Work()
    if config.distance_buckets is not None:
        distances = _of_distances(config, config.distance_buckets, wire, load)
        norm = EMBEDDING_NORM[kind[1:]][0]
        if config.conv_kernel is not None:
            convolved = _of_convolution(config.conv_kernel, config.dropout, wire, kind[1:], state)
        of_tables = Work(
            operators=norm.on(shape) - norm.alone - _FEWER_TABLES * (shape.ranks > 1),
            touched=_WITHOUT_TABLES[kind[1:]].on(shape) * state,
        )
    elif config.traits.relative_bias:
        distances = _of_bias(config, wire, load)
    if config.encoder == "classic" and config.distance_buckets is None:
        absent = (not config.position_rows) + (not config.types)
        fewer, spared = _WITHOUT_TABLE[kind[1:]]
        of_both = _WITHOUT_TABLES[kind[1:]].on(shape)
        of_places = 0 if config.position_rows else _WITHOUT_PLACES.on(shape)
        of_tables = Work(operators=-fewer * absent, touched=((0, -spared, of_both)[absent] - of_places) * state)
    absent, without = (config.mlp_dropout == 0) + (config.out_dropout == 0), int(config.dropout == 0)
    operators, dropped = _dropout(wire, compiled, config.pre_norm)
    operators_of_rest, dropped_of_rest = _dropout(wire, False, config.pre_norm)  # behind the embeddings, in no region
    layers = repeated * config.layers
    norms, norms_of_rest = _uneven_norms(config, wire, compiled)
    of_table = _TABLE * (shape.y * shape.z > 1) + _TABLE_OVER_X * (shape.x > 1) + _TABLE_ALONE * (not config.tied)
    return Work(
        operators=round(layers * (layer.operators.on(shape) + norms.operators + grouped.operators - absent * operators))
        + round(layers * (distances.operators + turned.operators + further.operators))
        + scaled
        + _ZERO_CENTERED * config.traits.zero_centered_norms  # at the end
        + of_tables.operators
        + convolved.operators
        + rest.operators.on(shape)
        - bare[0].on(shape)
        + norms_of_rest
        - without * operators_of_rest
        + _NEXT_SENTENCE * config.next_sentence
        + _OVER_X * (shape.x > 1 and shape.y * shape.z == 1),
        touched=round(
            layers * (distances.touched + turned.touched + further.touched)
            + 2 * scaled * wire.compute * state
            + of_tables.touched
            + convolved.touched
            + layers * (touched + (norms.touched + grouped.touched - absent * dropped) * state)
            + (rest.state.on(shape) - bare[1].on(shape) - without * dropped_of_rest) * state
            + (_CHOSEN * config.next_sentence + _OVER_BOTH * (shape.y > 1 and shape.z > 1)) * state
            + rest.masked.on(shape) * masked
            + rest.logits.on(shape) * (load.masked // shape.z * slab)
            + of_table * slab * (config.embedding_size // shape.z)
        ),
    )


def _turned(config: BertConfig, wire: CommModel, compiled: bool, state: int, inner: int) -> Work:
    """Of a classic layer, what rotary positions, a gate and its dropout are more, and biases that are not there less;
    the gate's bytes are not in it."""
    operators, touched, shape = 0, 0, wire.shape
    if config.has_rotary:
        operators, of_state = _TURNED[wire.compute == 2, compiled]
        touched += of_state * state
    if config.has_gate:
        operators += _GATES[compiled].on(shape)
    if config.gate_dropout:
        own, dropped = _dropout(wire, False, False)
        operators, touched = operators + own, touched + dropped * inner
    if not any(config.layer_biases):
        fewer, spared = (each.on(shape) for each in _BIASES)
        operators, touched = operators - fewer, touched - spared * wire.compute * state
    return Work(operators=operators, touched=touched)


def _further_norms(config: BertConfig, wire: CommModel, compiled: bool, state: int) -> Work:
    """Of a layer, the norms of heads and of what its parts give, and all that is more of norms around 1."""
    narrow, traits = wire.compute == 2, config.traits
    operators = touched = 0
    if traits.out_norms:
        operators, touched = (each.on(wire.shape) for each in _OF_OUTPUTS[narrow, compiled])
        touched *= state
    if traits.qk_norm and compiled:
        touched += wire.compute * state * config.qkv_size // config.hidden
    elif traits.qk_norm:
        more, of_each = _OF_HEADS[narrow]
        columns = (config.heads + config.key_heads) * config.head_size
        operators, touched = operators + more, touched + of_each * state * columns // config.hidden
    if traits.zero_centered_norms:
        norms = 2 + 2 * traits.out_norms + 2 * traits.qk_norm
        operators += _ZERO_CENTERED * norms
    return Work(operators=operators, touched=touched)


def _of_distances(config: BertConfig, buckets: LogBuckets, wire: CommModel, load: MicroBatchShape) -> Work:
    """Of a layer, beside products: products of tokens with distances are cut to pairs, added up and spread again; keys
    and queries by distance are chosen, scaled and summed up; and the weight's gradient is added to that of tokens."""
    element, heads = wire.compute, config.heads // wire.size("y")
    occurring = {length: len(np.unique(buckets.of(np.arange(1 - length, length)))) for length in set(load.lengths)}
    own, columns = buckets.rows * config.hidden, config.hidden // wire.size("y")
    touched = 21 * element * own // wire.size("y") + 36 * config.hidden**2 // (
        wire.shape.x * wire.size("y") * wire.size("z")
    )
    for length, used in occurring.items():
        rows = length * load.lengths.count(length)
        pairs, met = heads * rows * length, heads * rows * used
        touched += element * (7 * pairs + 2 * min(pairs, met) + 6 * met + (6 * rows + 14 * used) * columns)
        touched += 4 * 8 * length**2  # which bucket each pair has
    undropped, spared = (0, 0) if config.dropout else _dropout(wire, False, False)
    touched -= spared * (own // (wire.shape.x * wire.size("y") * wire.size("z")))
    return Work(operators=_DISTANCES.on(wire.shape) - undropped, touched=touched)


def _of_convolution(kernel: int, dropout: float, wire: CommModel, kind: tuple[bool, bool], state: int) -> Work:
    """Beside its product: rows of a sequence side by side, the turn behind it, dropout, activation and norm."""
    shape, further = wire.shape, kernel // 2 - 1
    (operators, touched), (wider, farther) = _CONVOLUTION[kind], _WIDER[kind[0]]
    norm_operators, norm_touched = (each.on(shape) for each in EMBEDDING_NORM[kind])
    drops, dropped = _dropout(wire, False, False) if dropout else (0, 0)
    either, over_y, over_z = _CONVOLVED_OVER
    operators += either * (shape.y * shape.z > 1) + over_y * (shape.y > 1) + over_z * (shape.z > 1)
    touched += wire.compute * (8 * (shape.y * shape.z > 1) + 2 * (shape.z > 1 and shape.y != shape.z))
    return Work(
        operators=operators + wider * further + norm_operators + drops,
        touched=(touched + farther * further + norm_touched + dropped) * state,
    )


def _of_bias(config: BertConfig, wire: CommModel, load: MicroBatchShape) -> Work:
    """Of a layer: a bias is chosen for each pair, and its gradients are summed over sequences of one length."""
    heads, (operators, of_score) = config.heads // wire.size("y"), _BIAS[wire.compute == 2]
    touched = 0
    for length in set(load.lengths):
        pairs = heads * length**2
        touched += (wire.compute * load.lengths.count(length) + of_score) * pairs + 2 * 8 * length**2
    return Work(operators=operators, touched=touched)


def _uneven_norms(config: BertConfig, wire: CommModel, compiled: bool) -> tuple[Work, int]:
    """Of a layer's two norms beyond those in the tables, bytes for each element; and operators of the embeddings' and
    the masked-LM head's."""
    if compiled or wire.compute != 2 or config.traits.rms_norm:
        return Work(), 0
    here = [wire.size("z") == 1, wire.size("z") == 1, wire.size("y") == 1]
    hidden, embeddings, head = (
        columns & (columns - 1) > 0 and alone
        for columns, alone in zip((config.hidden, config.embedding_size, config.embedding_size), here, strict=True)
    )
    one = Work(operators=_UNEVEN - config.pre_norm, touched=_UNEVEN_ALONE * config.pre_norm)
    norms = (embeddings and config.traits.embedding_norm) + (hidden and config.conv_kernel is not None)
    return one.times(2 * hidden), _UNEVEN * norms + (_UNEVEN - 1) * head


def _dropout(wire: CommModel, compiled: bool, pre_norm: bool) -> tuple[int, int]:
    """Operators of one, and bytes for each element: it reads and writes both ways, and a mask of a byte; in a region of
    a sum and its norm the mask alone, and a gradient beside the residual's. Before a norm stands a region of the sum,
    without dropout an operator, and its backward pass is a region, without it nothing."""
    if not compiled:
        return 2, 2 * (2 * wire.compute + 1)
    return (1, 2 * wire.compute + 2) if pre_norm else (0, wire.compute + 2)

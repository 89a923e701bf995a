"""What a BERT asks for beside products and attention: operators, and the bytes that they read and write.

No formula says how many operators LayerNorm, GELU, dropout and sums are: these numbers were counted in the real code as
on a GPU (`tools.bench operators`), and tests/models/bert/cost_model/test_small_operators.py counts them again. What
takes a few per cent is left out: statistics of rows, vectors, ids, regions of `norm="pre"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from models.bert.config import BertConfig, Encoder
from models.bert.cost_model.memory import MicroBatchShape
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
    logits: int
    """For each of this rank's logits."""


_Kind = tuple[Encoder, bool, bool]
"""Encoder, whether products are in 16 bits, whether regions are compiled."""
LAYER: Mapping[_Kind, LayerCounts] = MappingProxyType(
    {
        ("classic", False, False): LayerCounts(Count(35, 4, 74), Count(168, 24, 188), Count(24, 0, 4)),
        ("classic", False, True): LayerCounts(Count(24, 4, 5), Count(112, 24, 36), Count(20)),
        ("classic", True, False): LayerCounts(Count(37, 4, 82), Count(158, 12, 202), Count(12, 0, 2)),
        ("classic", True, True): LayerCounts(Count(24, 4, 5), Count(58, 12, 18), Count(10)),
        ("modern", False, False): LayerCounts(Count(106, 0, 68), Count(324, 0, 160), Count(72)),
        ("modern", False, True): LayerCounts(Count(100, 0, 4), Count(284, 0, 24), Count(72)),
        ("modern", True, False): LayerCounts(Count(114, 0, 74), Count(312, 0, 184), Count(36)),
        ("modern", True, True): LayerCounts(Count(104, 0, 4), Count(224, 0, 12), Count(36)),
    }
)
REST: Mapping[_Kind, RestCounts] = MappingProxyType(
    {
        ("classic", False, False): RestCounts(Count(70, 65, 47), Count(145, 22, 89), Count(88, 144, 36), 48),
        ("classic", False, True): RestCounts(Count(50, 13, 13), Count(121, 22, 13), Count(76, 68, 36), 16),
        ("classic", True, False): RestCounts(Count(82, 69, 51), Count(171, 22, 99), Count(82, 132, 18), 40),
        ("classic", True, True): RestCounts(Count(58, 13, 13), Count(123, 22, 7), Count(42, 38, 18), 8),
        ("modern", False, False): RestCounts(Count(67, 62, 42), Count(102, 20, 80), Count(84, 136, 32), 48),
        ("modern", False, True): RestCounts(Count(48, 12, 10), Count(86, 20, 12), Count(72, 68, 32), 16),
        ("modern", True, False): RestCounts(Count(74, 66, 46), Count(124, 20, 90), Count(80, 124, 16), 40),
        ("modern", True, True): RestCounts(Count(51, 12, 10), Count(80, 20, 6), Count(40, 38, 16), 8),
    }
)
_UNEVEN = 3
"""Operators of a sum and its LayerNorm more in 16 bits, eager, where one rank has all columns and they are no power of
two (tensor3d/layers/norm.py); one less without a sum."""
_NEXT_SENTENCE = 27
"""Operators of a pooler with its head and loss."""
_OVER_X = 24
"""Operators of the rest more where x alone is above 1: the lookup's, and those of several ranks, which `RestCounts` has
for y and z."""
_ROTARY = 88
"""Bytes of a layer of the modern encoder, for each row on face y and each column of a head: angles have no heads."""
_TABLE, _TABLE_OVER_X = 8, 12
"""Bytes for each element of the vocabulary's table on a plane: its gradient; and where x is above 1."""
AGAIN = 4 / 3
"""Of both passes, where backward computes a layer's forward pass again: within 15 % in all of `LAYER`."""


def small_operators(config: BertConfig, wire: CommModel, load: MicroBatchShape, *, compiled: bool, again: bool) -> Work:
    """Of a micro-batch, beside products, attention, and what follows from products.

    Args:
        compiled: whether chains of them are regions (`ExecutionPolicy.compile`), of which each is one operator that
            reads what it is given and writes what it returns.
        again: whether backward computes layers again.
    """
    shape = wire.shape
    kind = (config.encoder, wire.compute == 2, compiled)
    layer, rest, repeated = LAYER[kind], REST[kind], AGAIN if again else 1.0
    state, inner, masked = (
        rows * columns // (shape.y * shape.z)
        for rows, columns in (
            (load.rows, config.hidden),
            (load.rows, config.inner_size),
            (load.masked, config.hidden),
        )
    )
    slab = chunk(config.vocab, shape.y, wire.index("y"))
    touched = layer.state.on(shape) * state + layer.inner.on(shape) * inner
    if config.encoder == "modern":
        touched += _ROTARY * (load.rows // shape.z) * (config.hidden // config.heads)
    absent, without = (config.dropout == 0) + (config.out_dropout == 0), int(config.dropout == 0)
    operators, dropped = _dropout(wire, compiled)
    operators_of_rest, dropped_of_rest = _dropout(wire, False)  # behind the embeddings, in no region
    layers = repeated * config.layers
    norms, norms_of_rest = _uneven_norms(config, wire, compiled)
    of_table = _TABLE + _TABLE_OVER_X * (shape.x > 1)
    return Work(
        operators=round(layers * (layer.operators.on(shape) + norms - absent * operators))
        + rest.operators.on(shape)
        + norms_of_rest
        - without * operators_of_rest
        + _NEXT_SENTENCE * config.next_sentence
        + _OVER_X * (shape.x > 1 and shape.y * shape.z == 1),
        touched=round(
            layers * (touched - absent * dropped * state)
            + (rest.state.on(shape) - without * dropped_of_rest) * state
            + rest.masked.on(shape) * masked
            + rest.logits * (load.masked // shape.z * slab)
            + of_table * slab * (config.embedding_size // shape.z)
        ),
    )


def _uneven_norms(config: BertConfig, wire: CommModel, compiled: bool) -> tuple[int, int]:
    """Operators of a layer's two norms, and of the embeddings' and the masked-LM head's, beyond those in the tables."""
    if compiled or wire.compute != 2:
        return 0, 0
    here = [wire.size("z") == 1, wire.size("z") == 1, wire.size("y") == 1]
    hidden, embeddings, head = (
        columns & (columns - 1) > 0 and alone
        for columns, alone in zip((config.hidden, config.embedding_size, config.embedding_size), here, strict=True)
    )
    return 2 * (_UNEVEN - config.pre_norm) * hidden, _UNEVEN * embeddings + (_UNEVEN - 1) * head


def _dropout(wire: CommModel, compiled: bool) -> tuple[int, int]:
    """Operators of one, and bytes for each element: it reads and writes both ways, and a mask of a byte; in a region
    the mask alone, and a gradient beside the residual's."""
    return (0, wire.compute + 2) if compiled else (2, 2 * (2 * wire.compute + 1))

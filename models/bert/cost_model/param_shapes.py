"""The parameters of a BERT for pre-training and what a rank holds of them, without making any."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from models.bert.config import BertConfig
from tensor3d.attention.relative import BiasBuckets
from tensor3d.distributed.cube_shape import MESH_AXES, AxisName, CubeShape, chunk_bounds
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.sharding.param_layout import Layout, copies, matrix, narrow, replicated, table, vector

OptimizerName = Literal["adamw", "lamb", "stable_adamw"]
_NEXT_SENTENCE = 2  # classes


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter of a model that need not exist."""

    name: str
    """As in `BertForPreTraining.named_parameters()`."""
    shape: tuple[int, ...]
    """Of the logical tensor."""
    layout: Layout
    multiplies: bool = False
    """Whether a product uses it, as its weight or as its bias (`tensor3d.sharding.matmul`)."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, shape: CubeShape, rank: int) -> tuple[int, ...]:
        """Of the block on a rank: nested chunks, as `Layout.slices` has them. The blocks of rank 0 are the largest."""
        return self._block(shape, shape.coordinate(rank))

    def held(self, shape: CubeShape, rank: int) -> int:
        """Elements of the block on a rank."""
        return math.prod(self.local_shape(shape, rank))

    def _block(self, shape: CubeShape, place: dict[AxisName, int]) -> tuple[int, ...]:
        sizes = list(self.shape)
        for axis in MESH_AXES:
            dim = self.layout.dim_cut_by(axis)
            if dim is not None:
                first, last = chunk_bounds(sizes[dim], shape.size(axis), place[axis])
                sizes[dim] = last - first
        return tuple(sizes)


@dataclass(frozen=True, kw_only=True)
class ParamMemory:
    """Elements of a rank's blocks."""

    tensors: int
    """Parameters, each of which the rank has a block of."""
    adapted_tensors: int
    """Those with several dims: what LAMB takes the norms of."""
    total: int
    replicated: int
    """Whose gradients are summed over several ranks at the end of a step."""
    adapted: int
    """In tensors with several dims."""
    multiplied: int
    """In what products use: weights and biases."""
    by_sum: dict[tuple[AxisName, ...], int]
    """By the axes over which their gradients are summed."""
    share: int
    """Of this rank's shares over data of the blocks, where the optimiser's state is sharded over it."""
    adapted_share: int
    """In tensors with several dims."""
    gathered: int
    """Of the largest shares of the blocks, which all are padded to when they travel."""
    rows_of_blocks: tuple[int, int]
    rows_of_shares: tuple[int, int]
    """See `in_regions`."""
    shares_by_sum: dict[tuple[AxisName, ...], tuple[int, int]]
    """Of `share` and of `gathered`, by the axes over which gradients are summed."""

    def scattered(self, shape: CubeShape) -> tuple[int, int, int]:
        """Of the gradients that are summed over data alone, which may lie in shares: in all, of this rank's shares, and
        of the largest ones."""
        alone = [axes for axes in self.by_sum if [axis for axis in axes if shape.size(axis) > 1] == ["data"]]
        own, largest = (sum(self.shares_by_sum[axes][place] for axes in alone) for place in (0, 1))
        return sum(self.by_sum[axes] for axes in alone), own, largest

    def gradients(self, shape: CubeShape, shard_over_data: ShardOverData) -> int:
        """Elements of `.grad` at rest."""
        whole, own, _ = self.scattered(shape)
        return self.total - (whole - own if shard_over_data == "gradients" else 0)

    def stepped(self, shard_over_data: ShardOverData) -> int:
        """Elements that the optimiser steps on this rank, and has moments of."""
        return self.share if shard_over_data else self.total

    def in_regions(self, shard_over_data: ShardOverData = False) -> tuple[int, int]:
        """Blocks with rows, more than one, and their elements: those that an optimiser steps by compiled regions, if it
        has any (`tensor3d.optim.tensorwise`)."""
        return self.rows_of_shares if shard_over_data else self.rows_of_blocks

    def updates(
        self, optimizer: OptimizerName, shard_over_data: ShardOverData = False, *, compiled: bool = False
    ) -> int:
        """Elements that are held beside the state in the middle of a step, until sums over tensors are known: the steps
        of the blocks, first those that decay, but not of those in regions. StableAdamW has as many beside while it
        takes the means of either."""
        matrices = self.adapted_share if shard_over_data else self.adapted
        first, vectors = (
            matrices - self.in_regions(shard_over_data)[1] * compiled,
            self.stepped(shard_over_data) - matrices,
        )
        return {"adamw": 0, "lamb": first, "stable_adamw": first + max(first, 2 * vectors)}[optimizer]

    def summed(self, optimizer: OptimizerName) -> int:
        """Numbers that the optimiser sums over all ranks in a step: two norms a tensor, or one mean."""
        return {"adamw": 0, "lamb": 2 * self.adapted_tensors, "stable_adamw": self.tensors}[optimizer]


@lru_cache(maxsize=1024)  # a planner asks for the memory of each box many times, and each time it depends on this
def held(config: BertConfig, shape: CubeShape, rank: int = 0) -> ParamMemory:
    """What a rank holds of all parameters; rank 0 holds the most. Equal layers are looked at once."""
    place, by_sum = shape.coordinate(rank), dict[tuple[AxisName, ...], int]()
    shares_by_sum: dict[tuple[AxisName, ...], tuple[int, int]] = {}
    tensors = adapted_tensors = adapted = multiplied = share = adapted_share = gathered = 0
    with_rows = {False: [0, 0], True: [0, 0]}
    for parameter, number in _kinds(config):
        tensors += number
        rows, *others = parameter._block(shape, place)
        columns = number * math.prod(others)
        first, last = chunk_bounds(rows, shape.data, place["data"])
        elements, own = rows * columns, (last - first) * columns
        largest, axes = -(-rows // shape.data) * columns, parameter.layout.sum_over
        share, gathered = share + own, gathered + largest
        by_sum[axes] = by_sum.get(axes, 0) + elements
        before = shares_by_sum.get(axes, (0, 0))
        shares_by_sum[axes] = before[0] + own, before[1] + largest
        multiplied += elements if parameter.multiplies else 0
        if len(parameter.shape) > 1:
            adapted_tensors, adapted, adapted_share = adapted_tensors + number, adapted + elements, adapted_share + own
            for shared, height, count in ((False, rows, elements), (True, last - first, own)):
                if height > 1:
                    with_rows[shared][0] += number
                    with_rows[shared][1] += count
    return ParamMemory(
        tensors=tensors,
        adapted_tensors=adapted_tensors,
        total=sum(by_sum.values()),
        replicated=sum(count for axes, count in by_sum.items() if any(shape.size(axis) > 1 for axis in axes)),
        adapted=adapted,
        multiplied=multiplied,
        by_sum=by_sum,
        share=share,
        adapted_share=adapted_share,
        gathered=gathered,
        rows_of_blocks=(with_rows[False][0], with_rows[False][1]),
        rows_of_shares=(with_rows[True][0], with_rows[True][1]),
        shares_by_sum=shares_by_sum,
    )


def parameters(config: BertConfig) -> list[ParamSpec]:
    """All of them, in the model's order. A tied weight comes once."""
    before = [*embeddings(config), *distances(config), *convolution(config)]
    return [*before, *layers("bert.layers", config), *after_encoder(config)]


def layers(name: str, config: BertConfig) -> list[ParamSpec]:
    """Those of all layers; `name` stands before a layer's number."""
    return [parameter for number in range(config.layers) for parameter in _layer(f"{name}.{number}", config, number)]


def linear(name: str, inputs: int, outputs: int | None = None) -> list[ParamSpec]:
    """Those of a linear layer from face z, with a bias. Default of `outputs`: as many."""
    return list(_linear(name, inputs, inputs if outputs is None else outputs, True))


def norm(name: str, hidden: int) -> list[ParamSpec]:
    """Those of a LayerNorm on face z."""
    return list(_norm(name, hidden, True))


def _kinds(config: BertConfig) -> Iterator[tuple[ParamSpec, int]]:
    """All parameters, those of equal layers once, with the number of these."""
    for parameter in (*embeddings(config), *distances(config), *convolution(config), *after_encoder(config)):
        yield parameter, 1
    first = {layer_norms(config, number): number for number in reversed(range(config.layers))}
    for norms, number in first.items():
        layers = sum(layer_norms(config, each) == norms for each in range(config.layers))
        for parameter in _layer("", config, number):
            yield parameter, layers


def embeddings(config: BertConfig) -> list[ParamSpec]:
    """Those in front of the layers."""
    columns = config.embedding_size
    tokens = _matrix("bert.embeddings.tokens.weight", config.vocab, columns, matrix("z"))
    found = [replace(tokens, multiplies=config.tied)]
    for name, rows in (("positions", config.position_rows), ("types", config.types)):
        if rows:
            found.append(_matrix(f"bert.embeddings.{name}.weight", rows, columns, table("z")))
    if config.traits.embedding_norm:
        found += _norm("bert.embeddings.norm", columns, config.norm_bias)
    if config.traits.relative_bias:
        found.append(_matrix("bert.relative_bias.weight", BiasBuckets().rows, config.heads, table("y")))
    return [
        *found,
        *(_linear("bert.embeddings.projection", columns, config.hidden, True) if config.has_projection else ()),
    ]


def distances(config: BertConfig) -> list[ParamSpec]:
    """Those of what attention adds to its scores by distance, for all layers."""
    if config.distance_buckets is None:
        return []
    table_of = _matrix("bert.relative.table.weight", config.distance_buckets.rows, config.hidden, table("z"))
    return [table_of, *_norm("bert.relative.norm", config.hidden, True)]


def convolution(config: BertConfig) -> list[ParamSpec]:
    """Those beside the first layer."""
    if config.conv_kernel is None:
        return []
    conv = _linear("bert.convolution.conv", config.conv_kernel * config.hidden, config.hidden, True)
    return [*conv, *_norm("bert.convolution.norm", config.hidden, True)]


def after_encoder(config: BertConfig) -> list[ParamSpec]:
    """Those behind the layers: the last norm and the heads."""
    hidden, vocab, decoder = config.hidden, config.vocab, "masked_lm.projection"
    found: list[ParamSpec] = []
    if config.pre_norm:
        found += _norm("bert.final_norm", hidden, config.norm_bias)
    if not config.traits.decoder_alone:
        found += _linear("masked_lm.dense", hidden, config.embedding_size, config.head_bias)
        found += _norm("masked_lm.norm", config.embedding_size, config.norm_bias, on_y=True)
    if not config.tied:
        found.append(_multiplied(f"{decoder}.weight", vocab, config.embedding_size, matrix("z")))
    if not config.traits.decoder_alone:
        found.append(ParamSpec(name=f"{decoder}.bias", shape=(vocab,), layout=vector("y"), multiplies=True))
    if not config.next_sentence:
        return found
    return [
        *found,
        *_linear("pooler.dense", hidden, hidden, config.has_pooler_bias),
        _matrix("next_sentence.weight", _NEXT_SENTENCE, hidden, narrow("y")),
        ParamSpec(name="next_sentence.bias", shape=(_NEXT_SENTENCE,), layout=copies("y")),
    ]


def layer_norms(config: BertConfig, number: int) -> int:
    """Norms of hidden states in layer `number`, counted from 0."""
    return 1 + config.has_attention_norm(number) + 2 * config.traits.out_norms


def held_elements(config: BertConfig, shape: CubeShape, rank: int = 0) -> int:
    """Elements of all parameters on a rank; those of rank 0 are the most."""
    return held(config, shape, rank).total


def replicated_elements(config: BertConfig, shape: CubeShape, rank: int = 0) -> int:
    """Elements on a rank whose gradients are summed over several ranks at the end of a step."""
    return held(config, shape, rank).replicated


def _matrix(name: str, rows: int, columns: int, layout: Layout) -> ParamSpec:
    return ParamSpec(name=name, shape=(rows, columns), layout=layout)


def _multiplied(name: str, rows: int, columns: int, layout: Layout) -> ParamSpec:
    return replace(_matrix(name, rows, columns, layout), multiplies=True)


def _linear(name: str, inputs: int, outputs: int, bias: bool, *, from_y: bool = False) -> Iterator[ParamSpec]:
    yield _multiplied(f"{name}.weight", outputs, inputs, matrix("y" if from_y else "z"))
    if bias:
        yield ParamSpec(name=f"{name}.bias", shape=(outputs,), layout=vector("z" if from_y else "y"), multiplies=True)


def _norm(name: str, hidden: int, bias: bool, *, on_y: bool = False) -> Iterator[ParamSpec]:
    for part in ("weight", "bias") if bias else ("weight",):
        yield ParamSpec(name=f"{name}.{part}", shape=(hidden,), layout=vector("y" if on_y else "z"))


def _layer(name: str, config: BertConfig, number: int) -> Iterator[ParamSpec]:
    hidden, inner = config.hidden, config.inner_size
    of_qkv, of_out, of_up, of_down = config.layer_biases
    up, into = ("gate_up", 2 * inner) if config.has_gate else ("up", inner)
    yield from _linear(f"{name}.attention.qkv", hidden, config.qkv_size, of_qkv)
    yield from _linear(f"{name}.attention.out", config.mixed_size, hidden, of_out, from_y=True)
    if config.traits.qk_norm:
        for part in ("q_norm", "k_norm"):
            yield ParamSpec(name=f"{name}.attention.{part}.weight", shape=(config.head_size,), layout=replicated())
    if config.has_attention_norm(number):
        yield from _norm(f"{name}.attention_norm", hidden, config.norm_bias)
    yield from _linear(f"{name}.mlp.{up}", hidden, into, of_up)
    yield from _linear(f"{name}.mlp.down", inner, hidden, of_down, from_y=True)
    for part in ("mlp_norm", *(("attention_out_norm", "mlp_out_norm") if config.traits.out_norms else ())):
        yield from _norm(f"{name}.{part}", hidden, config.norm_bias)

"""The bytes that autograd keeps on one rank for the backward pass of a micro-batch, in closed form.

H hidden size, I inner size, V vocabulary, h heads; P rows of a plane, R masked and C [CLS] slots of it, T = P/z rows on
face y; A = P H / yz elements of a hidden state on this rank; c bytes of the compute type; s = max(4, c)

A layer keeps, beside three numbers a row in each LayerNorm:

    its input, q k v, attention's output, the projection's input     1 + 3 + 1 + 1     A c
    the first sum, the MLP's input, GELU's input and output          1 + 1 + 2 I/H     A c
    the second sum                                                   1                 A c
    two dropout masks, if there is dropout                           2                 A (c on a CPU, 1 on a GPU)

The modern encoder's layers keep gate and up, GELU's output and the product of it with up, 4 I/H instead of 2 I/H; the
first one has a LayerNorm less. Windows have masks, one number for each pair of places.

Parameters are kept too, but they are there anyway and not counted. Attention pads sequences to the longest of their
group, so that q, k, v and its output may have more slots than rows. With dropout in it the CPU has no fused kernel and
keeps the probabilities, three times, in fp32. All of it is checked to the byte on CPUs; what is said of GPUs is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from models.bert.config import BertConfig
from models.bert.inventory import layer_norms
from tensor3d.grouping import Grouping, LengthGroup, group_by_length
from tensor3d.layers.attention import Recompute
from tensor3d.planning.traffic import Side, Wire, chunk, other

Device = Literal["cpu", "cuda"]
_INDEX = 8  # bytes of an int64


@dataclass(frozen=True, kw_only=True)
class Load:
    """A micro-batch, as one rank has to hold it."""

    rows: int
    """P: token slots of a plane."""
    masked: int
    """R: slots of a plane for masked positions."""
    first: int
    """C: slots of a plane for [CLS]."""
    lengths: tuple[int, ...]
    """Rows of each sequence on this rank's rows of face y; the unused tail of a pack is one."""

    @cached_property
    def grouping(self) -> Grouping:
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return group_by_length(self.lengths, starts, torch.device("cpu"))

    @property
    def slots(self) -> int:
        """Slots that attention works on: rows, and what groups are padded with."""
        return sum(group.slots for group in self.grouping.groups)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes, by part of the model."""

    embeddings: int
    layer: int
    """Of the layer that keeps the most."""
    layers: int
    """Of all of them, and what they share."""
    heads: int

    @property
    def total(self) -> int:
        return self.embeddings + self.layers + self.heads


def saved(
    config: BertConfig,
    wire: Wire,
    load: Load,
    *,
    recompute: Recompute = "none",
    keep_gathered: bool = False,
    device: Device = "cpu",
) -> Saved:
    """What one forward pass of `BertForPreTraining`, in training, leaves on `wire.rank`, without parameters.

    Args:
        wire: the cube, the rank, and the sizes of the types.
        recompute, keep_gathered: as the model was made.
        device: they keep different masks of dropout, and different things of attention with dropout.
    """
    part = _Parts(config, wire, load, device)
    layers = [part.layer(number, recompute, keep_gathered) for number in range(config.layers)]
    final = part.norm(load.rows, "z") if config.pre_norm else 0
    return Saved(
        embeddings=part.embeddings(),
        layer=max(layers),
        layers=sum(layers) + (part.shared() if recompute == "none" else 0),
        heads=final + part.masked_lm() + part.next_sentence(),
    )


@dataclass(frozen=True)
class _Parts:
    config: BertConfig
    wire: Wire
    load: Load
    device: Device

    def hidden(self, rows: int) -> int:
        """Bytes of a hidden state of so many rows of the plane: its shard has the same size on both faces."""
        return rows * self.config.hidden // (self.wire.size("y") * self.wire.size("z")) * self.wire.compute

    def norm(self, rows: int, face: Side) -> int:
        """The input; the members' statistics, of which the first mean is a view; the mean's offset and 1/deviation."""
        own = rows // self.wire.size(other(face))
        return self.hidden(rows) + (3 * self.wire.size(face) + 2) * own * self.wire.statistic

    def mask(self, probability: float) -> int:
        """Of dropout of a hidden state."""
        size = 1 if self.device == "cuda" else self.wire.compute
        return self.hidden(self.load.rows) // self.wire.compute * size if probability else 0

    def embeddings(self) -> int:
        rows = self.load.rows
        lookups = (_INDEX + 1 + _INDEX) * rows  # own ids and which are owned; types
        lookups += _INDEX * rows if self.config.encoder == "classic" else 0  # positions
        return lookups + self.norm(rows, "z") + self.mask(self.config.dropout)

    def shared(self) -> int:
        """What all layers have in common: the way to groups of sequences and back, and the places of rotary."""
        rows = sum(self.load.lengths)
        ways = 0 if self.load.grouping.gather is None else self.load.slots + rows
        return _INDEX * (ways + (rows if self.config.encoder == "modern" else 0))

    def layer(self, number: int, recompute: Recompute, keep_gathered: bool) -> int:
        config, rows = self.config, self.load.rows
        hidden, inner = config.hidden, config.inner_size
        state, modern = self.hidden(rows), config.encoder == "modern"
        if recompute == "layer":
            return state
        products: list[tuple[int, int, Side]] = [
            (hidden, 3 * hidden, "z"),
            (hidden, hidden, "y"),
            (hidden, 2 * inner if modern else inner, "z"),
            (inner, hidden, "y"),
        ]
        operands = sum(self.operands(k, n, face, keep_gathered) for k, n, face in products)
        qkv = 3 * state if recompute == "attention" else self.attention(config.window_of(number))
        # The input of GELU; or gate and up, of which GELU takes one, and its output, which the other one multiplies.
        # ReLU keeps its output, which the next product keeps anyway, unless that one keeps a gathered copy.
        copied = keep_gathered and self.wire.size("z") > 1
        of_classic = 0 if config.activation == "relu" and not copied else 1
        gelu = state // hidden * inner * (3 if modern else of_classic)
        # "post": each LayerNorm keeps the sum before it; "pre": each keeps the residual stream.
        norms = layer_norms(config, number) * self.norm(rows, "z")
        return operands + qkv + gelu + norms + 2 * self.mask(config.dropout)

    def operands(self, k: int, n: int, face: Side, kept: bool) -> int:
        """What a product of K and N features keeps: its input's shard; or gathered, with the gathered weight."""
        wire, rows = self.wire, self.load.rows
        a, c = wire.size(other(face)), wire.size(face)
        if not kept:
            return rows // a * (k // c) * wire.compute
        slab = chunk(n, a, wire.index(other(face)))
        padded = -(-slab // wire.size("x")) * wire.size("x")
        copied = wire.size("x") > 1 or wire.compute != wire.parameter
        return (rows * (k // c) + (padded * (k // c) if copied else 0)) * wire.compute

    def attention(self, window: int | None) -> int:
        """q, k, v, the result before it goes back to its rows, and what the kernel keeps of the probabilities."""
        config, y, grouping = self.config, self.wire.size("y"), self.load.grouping
        slots, columns, heads = self.load.slots, config.hidden // y, config.heads // y
        if self.device == "cpu" and config.attention_dropout:
            squares = sum(len(group.members) * group.length**2 for group in grouping.groups)
            kept = 3 * (slots * columns + heads * squares)
            # Where batch and heads fold into one dim without a copy, v is a view of what all of it lies in.
            views = sum(group.slots for group in grouping.groups if len(group.members) == 1 or heads == 1)
            if views and self.wire.compute == self.wire.statistic:
                whole = slots if grouping.gather is not None else 3 * slots  # QKV
                kept += (whole - views) * columns
            return kept * self.wire.statistic
        # Turned queries and keys are tensors of their own, beside QKV, of which v may be a view.
        turned = 2 * slots if config.encoder == "modern" and grouping.gather is None else 0
        masks = sum(_mask_elements(group, window) for group in grouping.groups)
        return ((4 * slots + turned) * columns + masks) * self.wire.compute + slots * heads * self.wire.statistic

    def masked_lm(self) -> int:
        """Selection, dense, GELU, LayerNorm, projection, cross-entropy."""
        wire, slots = self.wire, self.load.masked
        own = slots // wire.size("z")
        logits = own * chunk(self.config.vocab, wire.size("y"), wire.index("y")) * wire.compute
        return (
            (_INDEX + 1) * slots
            # Inputs of dense, GELU and projection; ReLU keeps its output, which is LayerNorm's input.
            + (2 if self.config.activation == "relu" else 3) * self.hidden(slots)
            + self.norm(slots, "y")
            + logits
            + own * (wire.statistic + _INDEX + 2)
        )

    def next_sentence(self) -> int:
        """Selection, dense, tanh, the narrow head in fp32, cross-entropy over two classes."""
        wire, slots = self.wire, self.load.first
        own = slots // wire.size("z")
        pooled = 2 * self.hidden(slots)
        wide = self.hidden(slots) // wire.compute * wire.statistic if wire.compute < wire.statistic else 0
        return (_INDEX + 1) * slots + pooled + wide + own * 2 * wire.statistic + _INDEX * slots + wire.statistic


def _mask_elements(group: LengthGroup, window: int | None) -> int:
    """Of the mask of a group's attention, which hides padding and what is not in the window."""
    if window is None or window >= group.length:
        return 0 if group.mask is None else group.slots
    return group.length**2 * (1 if group.mask is None else len(group.members))

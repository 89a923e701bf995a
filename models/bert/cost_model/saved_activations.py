"""The bytes that autograd keeps on one rank for the backward pass of a micro-batch, in closed form.

H hidden size, I inner size, V vocabulary, h heads; P rows of a plane, R masked and C [CLS] slots of it, T = P/z rows on
face y; A = P H / yz elements of a hidden state on this rank; c bytes of the compute type; s = max(4, c)

A layer keeps, beside three numbers a row in each LayerNorm:

    its input, q k v, attention's output, the projection's input     1 + 3 + 1 + 1     A c
    the first sum, the MLP's input, GELU's input and output          1 + 1 + 2 I/H     A c
    the second sum                                                   1                 A c
    two dropout masks, if there is dropout                           2                 A

The modern encoder's layers keep gate and up, GELU's output and the product of it with up, 4 I/H instead of 2 I/H; the
first one has a LayerNorm less. Windows have masks, one number for each pair of places.

Parameters are kept too, but they are there anyway and not counted. Attention pads sequences to the longest of their
group, so that q, k, v and its output may have more slots than rows. Where a CPU takes sequences as they lie, without
dropout or a window, its output is the projection's input. With dropout in it a CPU keeps probabilities, and a byte for
each, instead of its output. All of it is checked to the byte on CPUs; what is said of GPUs is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch

from models.bert.config import BertConfig
from models.bert.cost_model.param_shapes import layer_norms
from tensor3d.batches.length_groups import LengthGroups, group_by_length
from tensor3d.cost_model.comm_volume import CommModel, Side, chunk, other
from tensor3d.layers.attention import Recompute

Device = Literal["cpu", "cuda"]
_INDEX = 8  # bytes of an int64


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

    @cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """What attention works on, one batch each."""
        if len(set(self.lengths)) == 1:  # as planners have it, and grouping thousands of rows takes its time
            return (AttentionGroup(members=len(self.lengths), length=self.lengths[0], padded=False),)
        return tuple(
            AttentionGroup(members=len(group.members), length=group.length, padded=group.mask is not None)
            for group in self._grouping.groups
        )

    @cached_property
    def reordered(self) -> bool:
        """Whether attention takes its rows in another order than they come in, and pads some."""
        return len(set(self.lengths)) > 1 and self._grouping.gather is not None

    @cached_property
    def slots(self) -> int:
        """Slots that attention works on: rows, and what groups are padded with."""
        return sum(group.slots for group in self.groups)

    @cached_property
    def _grouping(self) -> LengthGroups:
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return group_by_length(self.lengths, starts, torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Sequences that attend in one batch."""

    members: int
    length: int
    """Slots of each member."""
    padded: bool
    """Whether some members are shorter, so that a mask hides the rest."""

    @property
    def slots(self) -> int:
        return self.members * self.length

    @property
    def squares(self) -> int:
        """Pairs of places, over all members."""
        return self.members * self.length**2

    def mask(self, window: int | None) -> int:
        """Elements of the mask, which hides padding and what is not in the window."""
        if window is None or window >= self.length:
            return self.slots if self.padded else 0
        return self.squares if self.padded else self.length**2


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
    wire: CommModel,
    load: MicroBatchShape,
    *,
    recompute: Recompute = "none",
    keep_gathered: bool = False,
    device: Device = "cpu",
) -> Saved:
    """What one forward pass of `BertForPreTraining`, in training, leaves on `wire.rank`, without parameters.

    Args:
        wire: the cube, the rank, and the sizes of the types.
        recompute, keep_gathered: as the model was made.
        device: they keep different things of attention.
    """
    kept = Kept(config, wire, load, device, keep_gathered)
    kinds, order = layer_kinds(config)
    layers = [kept.layer(kind).of(recompute) for kind in kinds]
    shared = kept.shared() if recompute == "none" else 0
    final = kept.norm(load.rows, "z") if config.pre_norm else 0
    return Saved(
        embeddings=kept.embeddings(),
        layer=max(layers),
        layers=shared + sum(size * order.count(number) for number, size in enumerate(layers)),
        heads=final + kept.masked_lm() + kept.next_sentence(),
    )


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """In what layers of an encoder differ."""

    norms: int
    window: int | None


@lru_cache(maxsize=64)
def layer_kinds(config: BertConfig) -> tuple[list[LayerKind], list[int]]:
    """The kinds, of which there are few however many layers; and of which of them each layer is."""
    kinds: list[LayerKind] = []
    order = []
    for number in range(config.layers):
        kind = LayerKind(norms=layer_norms(config, number), window=config.window_of(number))
        if kind not in kinds:
            kinds.append(kind)
        order.append(kinds.index(kind))
    return kinds, order


@dataclass(frozen=True, kw_only=True)
class LayerKept:
    """Bytes that a layer keeps if nothing is computed again, in the order of the forward pass."""

    rows: int
    """P."""
    state: int
    """Its input."""
    qkv: int
    """What the product for q, k and v keeps; the other products likewise."""
    attention: int
    out: int
    norm: int
    """Each LayerNorm."""
    norms: int
    """How many there are."""
    up: int
    between: int
    """Between the MLP's products."""
    down: int
    mask: int
    """Each of the two dropouts."""

    def of(self, recompute: Recompute) -> int:
        if recompute == "layer":
            return self.state
        # q, k and v as the product has made them, or all that attention keeps
        mixing = 3 * self.state if recompute == "attention" else self.attention
        rest = self.qkv + self.out + self.norms * self.norm + self.up + self.between + self.down + 2 * self.mask
        return mixing + rest


@dataclass(frozen=True)
class Kept:
    """Bytes that each part of the model keeps."""

    config: BertConfig
    wire: CommModel
    load: MicroBatchShape
    device: Device
    keep_gathered: bool

    def hidden(self, rows: int) -> int:
        """Bytes of a hidden state of so many rows of the plane: its shard has the same size on both faces."""
        return rows * self.config.hidden // (self.wire.size("y") * self.wire.size("z")) * self.wire.compute

    def norm(self, rows: int, face: Side) -> int:
        """The input; the members' statistics, of which the first mean is a view; the mean's offset and 1/deviation.

        Of one member alone: the mean and 1/deviation.
        """
        own, members = rows // self.wire.size(other(face)), self.wire.size(face)
        numbers = 3 * members + 2 if members > 1 else 2
        return self.hidden(rows) + numbers * own * self.wire.statistic

    def mask(self, probability: float) -> int:
        """Of dropout of a hidden state."""
        return self.hidden(self.load.rows) // self.wire.compute if probability else 0

    def embeddings(self) -> int:
        rows = self.load.rows
        lookups = (_INDEX + 1 + _INDEX) * rows  # own ids and which are owned; types
        lookups += _INDEX * rows if self.config.encoder == "classic" else 0  # positions
        return lookups + self.norm(rows, "z") + self.mask(self.config.dropout)

    def shared(self) -> int:
        """What all layers have in common: the way to groups of sequences and back, and the places of rotary."""
        rows = sum(self.load.lengths)
        ways = self.load.slots + rows if self.load.reordered else 0
        return _INDEX * (ways + (rows if self.config.encoder == "modern" else 0))

    def layer(self, kind: LayerKind) -> LayerKept:
        config, rows = self.config, self.load.rows
        hidden, inner = config.hidden, config.inner_size
        state, modern = self.hidden(rows), config.encoder == "modern"
        # The input of GELU; or gate and up, of which GELU takes one, and its output, which the other one multiplies.
        # ReLU keeps its output, which the next product keeps anyway, unless that one keeps a gathered copy.
        copied = self.keep_gathered and self.wire.size("z") > 1
        of_classic = 0 if config.activation == "relu" and not copied else 1
        return LayerKept(
            rows=rows,
            state=state,
            qkv=self.operands(hidden, 3 * hidden, "z"),
            attention=self.attention(kind.window),
            out=self.operands(hidden, hidden, "y"),
            # "post": each LayerNorm keeps the sum before it; "pre": each keeps the residual stream.
            norm=self.norm(rows, "z"),
            norms=kind.norms,
            up=self.operands(hidden, 2 * inner if modern else inner, "z"),
            between=state // hidden * inner * (3 if modern else of_classic),
            down=self.operands(inner, hidden, "y"),
            mask=self.mask(config.dropout),
        )

    def operands(self, k: int, n: int, face: Side) -> int:
        """What a product of K and N features keeps: its input's shard; or gathered, with the gathered weight."""
        wire, rows = self.wire, self.load.rows
        a, c = wire.size(other(face)), wire.size(face)
        if not self.keep_gathered:
            return rows // a * (k // c) * wire.compute
        slab = chunk(n, a, wire.index(other(face)))
        padded = -(-slab // wire.size("x")) * wire.size("x")
        copied = wire.size("x") > 1 or wire.compute != wire.parameter
        return (rows * (k // c) + (padded * (k // c) if copied else 0)) * wire.compute

    def attention(self, window: int | None) -> int:
        """q, k, v, the result before it goes back to its rows, and what the kernel keeps of the probabilities."""
        config, load, y = self.config, self.load, self.wire.size("y")
        slots, columns, heads = load.slots, config.hidden // y, config.heads // y
        if self.device == "cpu" and config.attention_dropout:
            squares = heads * sum(group.squares for group in load.groups)
            return (3 * slots * columns + squares) * self.wire.compute + squares
        masks = sum(group.mask(window) for group in load.groups)
        # A CPU writes results to their rows at once, where no mask is needed: what follows keeps them.
        in_place = self.device == "cpu" and not load.reordered and (window is None or window >= max(load.lengths))
        states = 3 if in_place else 4
        return (states * slots * columns + masks) * self.wire.compute + slots * heads * self.wire.statistic

    def masked_lm(self) -> int:
        """Selection, dense, GELU, LayerNorm, projection, cross-entropy."""
        wire, slots = self.wire, self.load.masked
        own = slots // wire.size("z")
        return (
            (_INDEX + 1) * slots
            # Inputs of dense, GELU and projection; ReLU keeps its output, which is LayerNorm's input.
            + (2 if self.config.activation == "relu" else 3) * self.hidden(slots)
            + self.norm(slots, "y")
            + self.logits()
            + own * (wire.statistic + _INDEX + 2)
        )

    def logits(self) -> int:
        own = self.load.masked // self.wire.size("z")
        return own * chunk(self.config.vocab, self.wire.size("y"), self.wire.index("y")) * self.wire.compute

    def next_sentence(self) -> int:
        """Selection, dense, tanh, the narrow head in fp32, cross-entropy over two classes."""
        wire, slots = self.wire, self.load.first
        own = slots // wire.size("z")
        pooled = 2 * self.hidden(slots)
        wide = self.hidden(slots) // wire.compute * wire.statistic if wire.compute < wire.statistic else 0
        return (_INDEX + 1) * slots + pooled + wide + own * 2 * wire.statistic + _INDEX * slots + wire.statistic

"""The most memory that one rank needs for training a BERT: what stays, what a backward pass keeps, what comes and goes.

What stays and `saved` (saved_activations.py) are exact. The peak is that of the moment in which most is alive: the
backward pass is followed from the loss to the embeddings, with what is kept growing less and gradients growing more,
and beside them what comes and goes. The weight that is gathered ahead of its product from the second pass on
(tensor3d/distributed/weight_prefetch.py) is not in it: at most one gathered weight more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from models.bert.config import BertConfig
from models.bert.cost_model.param_shapes import ParamSpec, held, parameters
from models.bert.cost_model.saved_activations import (
    AttentionGroup,
    Device,
    Kept,
    LayerKept,
    MicroBatchShape,
    Saved,
    layer_kinds,
    saved,
)
from tensor3d.attention.cpu import SHORT, at_once, in_products
from tensor3d.cost_model.comm_volume import CommModel, Side, chunk, other
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.layers.attention import Recompute
from tensor3d.ops.row_chunks import chunk_rows

# ----------------------------------------------------------------------------------------------------------------------
# Bytes that come and go in the backward pass of a BERT: at each moment, what is alive beside what stays and is kept.
#
# Each method follows the code of the same name line by line, and gives the moments in which most is alive. What the
# allocator, the communication library and kernels need inside of themselves is not in it; gloo's buffers can be.
#
# S bytes of a hidden state's shard; A' and W' gathered operands, C a product's result (see `tensor3d.sharding.matmul`)


@dataclass(frozen=True)
class TransientMemory:
    config: BertConfig
    wire: CommModel
    load: MicroBatchShape
    device: Device
    keep_gathered: bool
    wire_buffers: bool

    @property
    def mixed(self) -> bool:
        """Whether statistics are wider than activations."""
        return self.wire.compute < self.wire.statistic

    @property
    def drops(self) -> bool:
        """Whether attention is `tensor3d.attention.cpu`, probabilities and all."""
        return self.device == "cpu" and self.config.attention_dropout > 0

    @property
    def results(self) -> int:
        """Attention's results, of all groups in one, beside what it keeps."""
        result = self.load.slots * self.config.hidden // self.wire.size("y") * self.wire.compute
        return result * (2 if self.drops else 1)

    def state(self, rows: int) -> int:
        """S: of a hidden state of so many rows of the plane."""
        return rows * self.config.hidden // (self.wire.size("y") * self.wire.size("z")) * self.wire.compute

    def wide(self, rows: int) -> int:
        """The same in the type of statistics."""
        return self.state(rows) // self.wire.compute * self.wire.statistic

    def slab(self, n: int, k: int, face: Side) -> int:
        """Elements of W': this rank's rows of a weight of N and K features, over all members of x."""
        rows = other(face)
        return chunk(n, self.wire.size(rows), self.wire.index(rows)) * (k // self.wire.size(face))

    def block(self, n: int, k: int, face: Side) -> int:
        """Elements of the share of x in it, padded to be even."""
        rows, x = other(face), self.wire.size("x")
        slab = chunk(n, self.wire.size(rows), self.wire.index(rows))
        return -(-slab // x) * (k // self.wire.size(face))

    def sending(self, n: int, k: int, face: Side) -> int:
        """A weight's gradient on its way over x. It stays until the next weight's is handed in."""
        x = self.wire.size("x")
        return self.block(n, k, face) * x * self.wire.gradient if x > 1 else 0

    def product(self, rows: int, k: int, n: int, face: Side, *, kept: bool | None = None) -> int:
        """Backward of a product, beside dC, its saved operands and what the product before is still sending."""
        wire, a, c = self.wire, other(face), face
        kept = self.keep_gathered if kept is None else kept
        slab, block, columns = self.slab(n, k, face), self.block(n, k, face), k // wire.size(c)
        even = block * wire.size("x")
        dc = rows * (slab // columns) if wire.size(c) > 1 else 0
        a_full = rows * columns if wire.size(a) > 1 and not kept else 0
        converted = block if wire.compute != wire.parameter and not kept else 0
        w_full = 0 if kept else even if wire.size("x") > 1 else converted
        gathered = (dc + a_full + w_full) * wire.compute
        gathering = (
            (converted * wire.compute if wire.size("x") > 1 else 0)
            + self.gathering(dc, c)
            + self.gathering(a_full, a)
            + self.gathering(0 if kept else even, "x")
        )
        da = rows * columns + (rows * columns // wire.size(a) if wire.size(a) > 1 else 0)
        da = da * wire.compute + self.scattering(rows * columns, a, wire.compute)
        return gathered + max(gathering, da + self.weight_gradient(n, k, face))

    def product_forward(self, rows: int, k: int, n: int, face: Side) -> int:
        """Forward of a product that keeps its shards alone: gathered operands, the members' part of C, and C."""
        wire, a, c = self.wire, other(face), face
        slab, columns = self.slab(n, k, face), k // wire.size(c)
        elements = rows * columns if wire.size(a) > 1 else 0
        if wire.size("x") > 1 or wire.compute != wire.parameter:
            elements += self.block(n, k, face) * wire.size("x")
        result = rows * (slab // columns)
        elements += result + (result // wire.size(c) if wire.size(c) > 1 else 0)
        return elements * wire.compute

    def weight_gradient(self, n: int, k: int, face: Side, size: int | None = None) -> int:
        """dW' as it was computed, in elements of `size` bytes, then as it travels, and this rank's share of its sum."""
        wire, slab = self.wire, self.slab(n, k, face)
        size = wire.compute if size is None else size
        even = self.block(n, k, face) * wire.size("x")
        if wire.size("x") == 1:
            return slab * (size + (wire.parameter if size != wire.parameter else 0))
        travelling = slab * wire.gradient if size != wire.gradient else 0
        travelling += even * wire.gradient if even != slab else 0
        return (
            slab * size
            + travelling
            + even // wire.size("x") * wire.gradient
            + self.scattering(even, "x", wire.gradient)
        )

    def gathering(self, elements: int, axis: AxisName) -> int:
        """What a library needs beside the result while it gathers: gloo has a buffer of the same size."""
        return elements * self.wire.compute if self.wire_buffers and self.wire.size(axis) > 1 else 0

    def scattering(self, elements: int, axis: AxisName, size: int) -> int:
        """The same while it sums and scatters: gloo sums in a copy."""
        return elements * size if self.wire_buffers and self.wire.size(axis) > 1 else 0

    def norm(self, rows: int, face: Side = "z") -> int:
        """Backward of a LayerNorm, beside its input and both gradients: in the type of statistics.

        The normalised input, its product with the gradient, and the result; in narrow types also the gradient. One
        member with all columns has the input less its mean instead of the first two; on a CPU, in narrow types, all
        but the result of a few rows only.
        """
        if self.mixed and self.wire.size(face) == 1 and self.device == "cpu":
            columns = self.config.hidden
            return self.state(rows) + 3 * min(self.wide(rows), chunk_rows(columns) * columns * self.wire.statistic)
        wides = (3 if self.wire.size(face) > 1 else 2) + self.mixed
        return wides * self.wide(rows) + (self.state(rows) if self.mixed else 0)

    def attention(self, kept: int) -> list[int]:
        """Backward from the projection's input to q, k and v, beside the residual stream's gradient.

        What is freed on the way counts against it, so that all of it is beside all that attention keeps.
        """
        config, load, c = self.config, self.load, self.wire.compute
        columns, heads = config.hidden // self.wire.size("y"), config.heads // self.wire.size("y")
        state, slots = self.state(load.rows), load.slots * columns * c
        moments, made, freed = [], 0, 0
        if load.reordered:
            moments.append(state + slots)  # from rows to the groups' slots
        for group in reversed(load.groups):
            own, squares = group.slots * columns * c, group.squares * heads
            if self.drops:
                moments.append(slots + made - freed + 3 * own + self.in_products(group, 0, c))
                freed += squares * (c + 1)
            elif self.device == "cpu" and not load.reordered:
                # The result stays until the end, and all gradients are there from the start.
                moments.append(5 * slots + self.in_place(group))
                continue
            else:
                moments.append(slots + made - freed + 3 * own)
                freed += own + group.slots * heads * self.wire.statistic
            made += 3 * own
        moments.append(4 * slots - kept)  # the groups' gradients are put together
        if config.encoder == "modern":  # turning one back: halves and the whole, in the type of statistics
            moments.append(3 * state + (4 if self.mixed else 2) * state - kept)
        moments.append(6 * state - kept)  # q, k and v are put together
        return moments

    def in_place(self, group: AttentionGroup) -> int:
        """Beside the gradients, where attention takes a group as it lies."""
        elements = group.slots * self.config.hidden // self.wire.size("y")
        if self.mixed and in_products(torch.bfloat16, group.length):
            return self.in_products(group, 2 * self.wire.statistic, 0)
        if self.mixed and group.length < SHORT:  # all of it in fp32
            return 8 * elements * self.wire.statistic
        return 3 * elements * self.wire.compute

    def in_products(self, group: AttentionGroup, again: int, once: int) -> int:
        """The most of a backward pass in whole products: scores made `again` and the softmax over them, bytes of both;
        or gradients of probabilities and of scores, of `once` bytes each; and matrices of the heads in hand."""
        members, heads = at_once(self.config.heads // self.wire.size("y"), group.length**2)
        rows = min(members, group.members) * heads * group.length
        matrix, squares = rows * (self.config.hidden // self.config.heads) * self.wire.compute, rows * group.length
        copies = 3 if min(members, group.members) > 1 else 0  # of q, k and v, where members do not lie together
        if again:
            return (copies + (copies > 0)) * matrix + squares * again
        # The scaled gradient and v's; then q's and k's, too, beside the scores' alone.
        return (copies + 2) * matrix + squares * once + max(squares * once, 2 * matrix)

    def logits_at_once(self, logits: int) -> int:
        """Of so many bytes of logits what the loss works on at a time, in fp32 at least: on a CPU a few rows."""
        whole = logits // self.wire.compute * self.wire.statistic
        columns = chunk(self.config.vocab, self.wire.size("y"), self.wire.index("y"))
        return min(whole, chunk_rows(columns) * columns * self.wire.statistic) if self.device == "cpu" else whole

    def loss(self, logits: int) -> int:
        """Backward of the loss, beside so many bytes of logits: their gradient, wide, then in their type."""
        wide, at_once = logits // self.wire.compute * self.wire.statistic, self.logits_at_once(logits)
        if at_once < wide:
            return logits + at_once * (2 if self.mixed else 1)
        return wide + max(wide, logits) * self.mixed

    def lookup(self, table: int, rows: int, columns: int, *, returned: bool = True) -> int:
        """Backward of a lookup of `rows` rows, beside its gradient: sums by row, in fp32 at least.

        Args:
            returned: whether the sums go on as a gradient, in the activations' type; else they go to the ledger as
                they are.
        """
        wire, wide = self.wire, self.wire.statistic
        full = rows * columns * wire.compute if wire.size("y") > 1 else 0
        sums = table * columns * wide
        chosen = rows * columns * wide * (2 if self.mixed else 1)
        return full + sums + max(chosen, table * columns * wire.compute if self.mixed and returned else 0)


# --- The most memory that one rank needs for training a BERT ----------------------------------------------------------

_INDEX, _OFFSET, _STEPS = 8, 4, 4  # bytes of an int64, of a sequence's first row, of a parameter's count of steps


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    """Two moments an element, and a count of steps a parameter."""
    batch: int
    """Ids, labels and places of a micro-batch."""
    saved: Saved
    """Kept for the backward pass of one micro-batch."""
    passing: int
    """Gathered operands, products and gradients on their way, at the worst moment of the step."""
    peak: int
    """All together at that moment: less than the sum of the parts, which do not all have their most at once."""
    moment: str
    """Which one it is, in words."""


def step_memory(
    config: BertConfig,
    wire: CommModel,
    load: MicroBatchShape,
    *,
    micro_batches: int = 1,
    recompute: Recompute = "none",
    keep_gathered: bool = False,
    optimizer: Literal["adamw", "lamb"] = "adamw",
    device: Device = "cpu",
    wire_buffers: bool = False,
) -> StepMemory:
    """Of training with AdamW or LAMB and `micro_batches` backward passes a step.

    Args:
        wire, load: the rank, the sizes of its types and what a micro-batch gives it. Rank 0 has the most weights.
        recompute, keep_gathered: as the model was made.
        device: see `saved`.
        wire_buffers: also count what gloo needs while it sends: a copy of what is gathered or summed.
    """
    on_rank = _held(config, wire)
    kept = saved(config, wire, load, recompute=recompute, keep_gathered=keep_gathered, device=device)
    ways = Kept(config, wire, load, device, keep_gathered).shared()
    batch = _INDEX * (3 * load.rows + 2 * load.masked + 2 * load.first) + _OFFSET * (len(load.lengths) + 1) + ways
    walk = _BackwardWalk(
        config=config,
        held=on_rank,
        kept=Kept(config, wire, load, device, keep_gathered),
        saved=kept,
        passing=TransientMemory(config, wire, load, device, keep_gathered, wire_buffers),
        recompute=recompute,
        earlier=on_rank.everything if micro_batches > 1 else 0,
        lamb=optimizer == "lamb",
    )
    optimizer_state = 2 * on_rank.everything + _STEPS * on_rank.parameters
    moment, standing, most = max(walk.moments(), key=lambda found: found[1] + found[2])
    return StepMemory(
        weights=on_rank.everything,
        gradients=on_rank.everything,
        optimizer=optimizer_state,
        batch=batch,
        saved=kept,
        passing=most,
        peak=on_rank.everything + optimizer_state + batch + standing + most,
        moment=moment,
    )


Moment = tuple[str, int, int]
"""In words; bytes of what is kept and of gradients; bytes of what comes and goes."""


@dataclass(frozen=True, kw_only=True)
class _BackwardWalk:
    """Through one backward pass, the last of its step."""

    config: BertConfig
    held: _Held
    kept: Kept
    saved: Saved
    passing: TransientMemory
    recompute: Recompute
    earlier: int
    """Gradients of the micro-batches before this one."""
    lamb: bool

    def moments(self) -> Iterator[Moment]:
        yield from self._heads()
        yield from self._layers()
        yield from self._embeddings()
        yield from self._sums()

    def _heads(self) -> Iterator[Moment]:
        config, passing, load, wire = self.config, self.passing, self.kept.load, self.kept.wire
        hidden, vocab, slots = config.hidden, config.vocab, load.masked
        state, few = passing.state(load.rows), passing.state(slots)
        logits = self.kept.logits()
        body = self._resident(self.saved.embeddings + self.saved.layers)
        pair, masked = self.kept.next_sentence(), self.kept.masked_lm()
        final = self.kept.norm(load.rows, "z") if config.pre_norm else 0
        now = body + final + masked
        yield "the loss, forward", now + self.earlier, passing.logits_at_once(logits) * (2 if passing.mixed else 1)

        # The pooler's way back comes first.
        dense = passing.product(load.first, hidden, hidden, "z", kept=False)
        yield "the pooler", now + self.earlier + pair, passing.state(load.first) + dense
        grown = self.earlier + self.held.dense
        table = -(-load.rows // wire.size("y"))
        sums = passing.lookup(table, load.first, hidden // wire.size("z"))
        yield "the pooler's selection", now + grown, passing.sending(hidden, hidden, "z") + sums

        # The gradient of the hidden state from the pooler stays for all that follows.
        yield "the loss, backward", now + grown, state + passing.loss(logits)
        sent = passing.sending(hidden, hidden, "z")
        projection = passing.product(slots, hidden, vocab, "z", kept=False)
        yield "the projection to the vocabulary", now + grown, state + sent + projection
        now -= logits + few
        grown, sent = grown + self.held.table, passing.sending(vocab, hidden, "z")
        yield "the masked-LM head's norm", now + grown, state + sent + few + passing.norm(slots, "y")
        dense = passing.product(slots, hidden, hidden, "z", kept=False)
        yield "the masked-LM head's dense layer", now + grown, state + sent + few + dense
        grown, sent = grown + self.held.dense, passing.sending(hidden, hidden, "z")
        sums = passing.lookup(table, slots, hidden // wire.size("z"))
        yield "the selection of masked rows", body + final + grown, state + sent + few + sums
        if final:
            yield "the last norm", body + final + grown, sent + state + passing.norm(load.rows)

    def _layers(self) -> Iterator[Moment]:
        standing = self._resident(self.saved.embeddings + self.saved.layers)
        grown = self.earlier + self.held.heads + self.held.table
        kinds, order = layer_kinds(self.config)
        kept = [self.kept.layer(kind) for kind in kinds]
        sizes = [layer.of(self.recompute) for layer in kept]
        most = [max(self._layer(layer)) for layer in kept]
        for number in range(self.config.layers - 1, -1, -1):
            standing -= sizes[order[number]]
            yield f"layer {number}", standing + grown, most[order[number]]
            grown += self.held.layer

    def _layer(self, kept: LayerKept) -> Iterator[int]:
        """Most alive of what the layer keeps or has computed again, its gradients, and what comes and goes."""
        config, passing = self.config, self.passing
        hidden, inner, rows = config.hidden, config.inner_size, kept.rows
        modern, state, size = config.encoder == "modern", kept.state, self.kept.wire.parameter
        wide, into = state // hidden * inner, (2 if modern else 1) * inner
        norm, around = passing.norm(rows), state if config.pre_norm else 0
        dropped = state if kept.mask else 0

        left = kept.of("attention" if self.recompute == "attention" else "none")
        if self.recompute == "layer" and self.kept.keep_gathered and not config.pre_norm:
            left += state  # the input, beside what is gathered of it
        if self.recompute == "layer" and config.pre_norm:
            # The first that asks for what is computed again is the product down, when its dC' is already gathered.
            waiting = rows * hidden // self.kept.wire.size("z") * self.kept.wire.compute
            waiting *= self.kept.wire.size("y") > 1
            again = 0 if self.kept.keep_gathered else passing.product_forward(rows, inner, hidden, "y")
            yield left - kept.mask + state + waiting + again + passing.sending(3 * hidden, hidden, "z")
        sent = passing.sending(3 * hidden, hidden, "z")  # by the layer above; by the heads' dense layer, nearly
        if not config.pre_norm:
            yield left + state + norm + sent
            left -= kept.norm
        yield left + state + dropped + sent
        left -= kept.mask
        yield left + state + dropped + sent + passing.product(rows, inner, hidden, "y")
        left -= kept.down
        gradients, sent = passing.block(hidden, inner, "y") * size, passing.sending(hidden, inner, "y")
        yield left + gradients + state + sent + (3 if modern else 2) * wide
        left -= kept.between
        if modern:
            yield left + gradients + state + sent + 4 * wide
        coming = into * (state // hidden)
        yield left + gradients + state + coming + sent + passing.product(rows, hidden, into, "z")
        left -= kept.up
        gradients, sent = gradients + passing.block(into, hidden, "z") * size, passing.sending(into, hidden, "z")
        if kept.norms == 2 or config.pre_norm:
            yield left + gradients + state + around + norm + sent
            left -= kept.norm
        yield left + gradients + 2 * state + sent  # of both ways, put together
        yield left + gradients + state + dropped + sent
        left -= kept.mask
        yield left + gradients + state + dropped + sent + passing.product(rows, hidden, hidden, "y")
        left -= kept.out
        gradients, sent = gradients + passing.block(hidden, hidden, "y") * size, passing.sending(hidden, hidden, "y")
        if self.recompute == "attention":
            # It starts from q, k and v in one, of which attention may work on copies. All results are put together.
            left += kept.attention - (0 if self.kept.load.reordered else 3 * state)
            yield left + gradients + 2 * state + sent + passing.results
        for moment in passing.attention(kept.attention):
            yield left + gradients + state + sent + moment
        left -= 3 * state if self.recompute == "attention" and self.kept.load.reordered else 0
        left -= kept.attention
        yield left + gradients + 4 * state + sent + passing.product(rows, hidden, 3 * hidden, "z")
        left -= kept.qkv
        if config.pre_norm and kept.norms == 2:
            gradients += passing.block(3 * hidden, hidden, "z") * size
            yield left + gradients + 2 * state + norm + passing.sending(3 * hidden, hidden, "z")

    def _embeddings(self) -> Iterator[Moment]:
        config, passing, load, wire = self.config, self.passing, self.kept.load, self.kept.wire
        state, columns, vocab = passing.state(load.rows), config.hidden // wire.size("z"), config.vocab
        sent = passing.sending(3 * config.hidden, config.hidden, "z")
        grown = self.earlier + self.held.everything
        resident = self._resident(self.saved.embeddings)
        yield "the embeddings' norm", resident + grown, sent + state + passing.norm(load.rows)
        slab = passing.slab(vocab, config.hidden, "z")
        resident -= self.kept.norm(load.rows, "z") + self.kept.mask(config.dropout)
        looked_up = passing.lookup(slab // columns, load.rows, columns, returned=False)
        yield "the lookup of tokens", resident + grown, sent + state + looked_up
        summed = passing.weight_gradient(vocab, config.hidden, "z", wire.statistic)
        yield "the table's gradient", resident + grown, sent + state + summed

    def _sums(self) -> Iterator[Moment]:
        """At the end of the pass: uses of one weight are added, then gradients summed over ranks in flat copies."""
        held, narrow = self.held, self.kept.wire.gradient != self.kept.wire.parameter
        yield "the ledger", held.everything + self.earlier, held.table
        flat = held.replicated + (held.replicated // self.kept.wire.parameter * self.kept.wire.gradient) * narrow
        earlier = held.everything - held.replicated if self.earlier else 0
        yield "sums over ranks", held.everything + earlier, flat
        yield "the optimiser", held.everything, held.adapted if self.lamb else 0

    def _resident(self, kept: int) -> int:
        """What of it is not also counted with the batch: places, types and the way to groups of sequences."""
        load, config = self.kept.load, self.config
        batch = _INDEX * load.rows * (2 if config.encoder == "classic" else 1)
        return kept - batch


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Bytes of parameters on a rank."""

    everything: int
    parameters: int
    """How many there are."""
    replicated: int
    """Those whose gradients are summed over ranks at the end of a step."""
    adapted: int
    """Those that LAMB scales."""
    table: int
    """Of the tokens, tied."""
    layer: int
    """Of a layer that is not the first."""
    heads: int
    """Of both heads, without the table."""
    dense: int
    """Of the dense layer in each head."""


@lru_cache(maxsize=64)
def _parts(config: BertConfig) -> tuple[ParamSpec, list[ParamSpec], list[ParamSpec]]:
    """The table of tokens; the parameters of the last layer; those of the heads."""
    every, last, body = parameters(config), f"bert.layers.{config.layers - 1}.", ("bert.embeddings.", "bert.layers.")
    return every[0], [p for p in every if p.name.startswith(last)], [p for p in every if not p.name.startswith(body)]


def _held(config: BertConfig, wire: CommModel) -> _Held:
    shape, size, place = wire.shape, wire.parameter, wire.shape.coordinate(wire.rank)
    (table, layer, heads), all_of_it = _parts(config), held(config, shape, wire.rank)
    of_heads = {parameter.name: parameter.held_at(shape, place) * size for parameter in heads}
    return _Held(
        everything=all_of_it.total * size,
        parameters=all_of_it.tensors,
        replicated=all_of_it.replicated * size,
        adapted=all_of_it.adapted * size,
        table=table.held_at(shape, place) * size,
        layer=sum(parameter.held_at(shape, place) for parameter in layer) * size,
        heads=sum(of_heads.values()),
        dense=of_heads["masked_lm.dense.weight"],
    )

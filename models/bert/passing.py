"""Bytes that come and go in the backward pass of a BERT: at each moment, what is alive beside what stays and is kept.

Each method follows the code of the same name line by line, and gives the moments in which most is alive. What the
allocator, the communication library and kernels need inside of themselves is not in it; gloo's buffers can be.

S bytes of a hidden state's shard; A' and W' gathered operands, C a product's result (see `tensor3d.matmul`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.bert.config import BertConfig
from models.bert.saved import Device, Group, Load
from tensor3d.attention.in_place import SHORT, in_products
from tensor3d.attention.products import at_once
from tensor3d.in_parts import rows_at_once
from tensor3d.planning.traffic import Side, Wire, chunk, other
from tensor3d.shape import AxisName


@dataclass(frozen=True)
class Passing:
    config: BertConfig
    wire: Wire
    load: Load
    device: Device
    keep_gathered: bool
    wire_buffers: bool

    @property
    def mixed(self) -> bool:
        """Whether statistics are wider than activations."""
        return self.wire.compute < self.wire.statistic

    @property
    def drops(self) -> bool:
        """Whether attention is `tensor3d.attention.dropped`, probabilities and all."""
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
            return self.state(rows) + 3 * min(self.wide(rows), rows_at_once(columns) * columns * self.wire.statistic)
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

    def in_place(self, group: Group) -> int:
        """Beside the gradients, where attention takes a group as it lies."""
        elements = group.slots * self.config.hidden // self.wire.size("y")
        if self.mixed and in_products(torch.bfloat16, group.length):
            return self.in_products(group, 2 * self.wire.statistic, 0)
        if self.mixed and group.length < SHORT:  # all of it in fp32
            return 8 * elements * self.wire.statistic
        return 3 * elements * self.wire.compute

    def in_products(self, group: Group, again: int, once: int) -> int:
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
        return min(whole, rows_at_once(columns) * columns * self.wire.statistic) if self.device == "cpu" else whole

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

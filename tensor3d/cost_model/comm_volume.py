"""Bytes that one rank receives, in closed form, by axis and kind: what the counter (comm_stats.py) must show.

The same formulas count collectives with `CommModel(unit="calls")`.

    R rows of a plane (R = M/x for one box of M tokens), K input and N output features, H hidden size, V vocabulary

All sums are for one forward and backward pass in the ring model. `CommModel` holds what every formula needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

from tensor3d.distributed.comm_stats import Key, Kind, bucket_elements, summed_elements
from tensor3d.distributed.cube_shape import AXES, AxisName, CubeShape, travel_together

Bytes = Counter[Key]
Side = Literal["y", "z"]
Kept = bool | Literal["input", "weight"]
"""Which gathered operands of a product stay for backward: both, none, or the one that is named."""


@dataclass(frozen=True, kw_only=True)
class CommModel:
    """A cube's shape, the place of the rank that is asked about, and the sizes of what travels."""

    shape: CubeShape
    rank: int = 0
    compute: int = 4
    """Bytes of an element of activations and gathered weights."""
    gradient: int = 4
    """Bytes of an element of the gradients of parameters, while they travel."""
    parameter: int = 4
    """Bytes of an element of the parameters: fp32 unless the model is fp64."""
    unit: Literal["bytes", "calls"] = "bytes"
    """What is counted: bytes received by the rank, or collectives that it issues."""
    weight_group_bytes: int | None = None
    """As of `ExecutionPolicy`."""

    @property
    def statistic(self) -> int:
        """Bytes of a number in statistics and losses: at least fp32, and at least the type of the activations."""
        return max(4, self.compute)

    def size(self, axis: AxisName) -> int:
        return self._sizes[axis]

    def index(self, axis: AxisName) -> int:
        return self._place[axis]

    # Formulas ask for both dozens of times.

    @cached_property
    def _sizes(self) -> dict[AxisName, int]:
        return {axis: self.shape.size(axis) for axis in AXES}

    @cached_property
    def _place(self) -> dict[AxisName, int]:
        return self.shape.coordinate(self.rank)

    def moved(self, axis: AxisName, kind: Kind, shard: int, size: int) -> Bytes:
        """An all-gather or reduce-scatter whose shard on each member has `shard` elements of `size` bytes."""
        members = self.size(axis)
        return self._counted(axis, kind, (members - 1) * shard * size) if members > 1 else Counter()

    def summed(self, axes: tuple[AxisName, ...], elements: int, size: int) -> Bytes:
        """An all-reduce of `elements` over several axes taken together."""
        members = self.members(axes)
        if members == 1 or elements == 0:
            return Counter()
        return self._counted(self.named(axes), "all-reduce", summed_elements(members, elements) * size)

    def summed_in_buckets(self, axes: tuple[AxisName, ...], elements: int) -> Bytes:
        """The ledger's sum of gradients that are held by the same ranks: any number of all-reduces."""
        whole = self.summed(axes, elements, self.gradient)
        if self.unit == "bytes":
            return whole
        buckets = -(-elements // bucket_elements(self.members(axes), self.parameter, elements))
        return Counter(dict.fromkeys(whole, buckets))

    def scattered_in_buckets(self, axis: AxisName, shard: int) -> Bytes:
        """The ledger's sums of which each member gets its shares alone, `shard` elements: any number of
        reduce-scatters."""
        return self._in_buckets(self.moved(axis, "reduce-scatter", shard, self.gradient), axis, shard)

    def gathered_in_buckets(self, axis: AxisName, shard: int) -> Bytes:
        """Weights whose shard on each member has `shard` elements, gathered after a step: any number of all-gathers."""
        return self._in_buckets(self.moved(axis, "all-gather", shard, self.parameter), axis, shard)

    def _in_buckets(self, whole: Bytes, axis: AxisName, shard: int) -> Bytes:
        members = self.size(axis)
        if self.unit == "bytes" or not whole:
            return whole
        buckets = -(-shard // (bucket_elements(members, self.parameter, members * shard) // members))
        return Counter(dict.fromkeys(whole, buckets))

    def exchanged(self, axes: tuple[AxisName, ...], elements: int, size: int) -> Bytes:
        """An all-to-all in which this rank receives `elements` of `size` bytes from others."""
        return self._counted(self.named(axes), "all-to-all", elements * size)

    def over(self, axes: tuple[AxisName, ...], kind: Kind, received: int) -> Bytes:
        """A collective over several axes taken together, in which this rank receives so many bytes."""
        return self._counted(self.named(axes), kind, received) if self.members(axes) > 1 else Counter()

    def members(self, axes: tuple[AxisName, ...]) -> int:
        return math.prod(self.size(axis) for axis in axes)

    def named(self, axes: tuple[AxisName, ...]) -> str:
        """As the counter names several axes taken together."""
        return "+".join(axis for axis in AXES if axis in axes and self.size(axis) > 1)

    def _counted(self, name: str, kind: Kind, received: int) -> Bytes:
        found: Bytes = Counter()  # `Counter` looks long at what it is given
        found[name, kind] = received if self.unit == "bytes" else 1
        return found


def times(count: Bytes, number: int) -> Bytes:
    return Counter({key: number * each for key, each in count.items()})


def together(parts: Iterable[Bytes]) -> Bytes:
    """The sum, without the copy that `Counter` makes at every `+`: a search over many boxes adds a million counts."""
    total: dict[Key, int] = {}
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    return Counter(total)


def other(face: Side) -> Side:
    return "y" if face == "z" else "z"


def chunk(size: int, parts: int, index: int) -> int:
    """Elements of chunk `index` when `size` is cut into `parts`, as DTensor cuts."""
    step = -(-size // parts)
    return max(0, min(step, size - index * step))


@dataclass(frozen=True, kw_only=True)
class ProductTraffic:
    """Each collective of a matrix product, once."""

    gather_a: Bytes
    gather_w: Bytes
    scatter_c: Bytes
    gather_dc: Bytes
    scatter_da: Bytes
    scatter_dw: Bytes


@lru_cache(256)  # a search asks thousands of times for products of the same sizes
def product_collectives(wire: CommModel, rows: int, k: int, n: int, face: Side = "z") -> ProductTraffic:
    """Of one product of `tensor3d.sharding.matmul` (Bian et al. 2021, §3.1). Shared: not to be changed."""
    a, c = other(face), face
    slab = chunk(n, wire.size(a), wire.index(a))  # output features of this rank's slice
    columns = k // wire.size(c)
    own_a, own_c = rows // wire.size(a) * columns, rows // wire.size(c) * slab
    own_w = -(-slab // wire.size("x")) * columns
    return ProductTraffic(
        gather_a=wire.moved(a, "all-gather", own_a, wire.compute),
        gather_w=wire.moved("x", "all-gather", own_w, wire.compute),
        scatter_c=wire.moved(c, "reduce-scatter", own_c, wire.compute),
        gather_dc=wire.moved(c, "all-gather", own_c, wire.compute),
        scatter_da=wire.moved(a, "reduce-scatter", own_a, wire.compute),
        scatter_dw=wire.moved("x", "reduce-scatter", own_w, wire.gradient),
    )


@lru_cache(256)
def product(
    wire: CommModel,
    rows: int,
    k: int,
    n: int,
    face: Side = "z",
    *,
    input_gradient: bool = True,
    kept: Kept = False,
    forward_only: bool = False,
) -> Bytes:
    """One matrix product: three collectives forward, five backward. Shared: not to be changed.

    Args:
        kept: of `reshard_after_forward=False` both, of "input" the weight, of "weight" the input.
    """
    each = product_collectives(wire, rows, k, n, face)
    forward = [each.gather_a, each.gather_w, each.scatter_c]
    if forward_only:
        return together(forward)
    backward = [each.gather_dc, each.scatter_dw]
    if kept in (False, "weight"):
        backward.append(each.gather_a)
    if input_gradient:
        backward.append(each.scatter_da)
        backward += [each.gather_w] if kept in (False, "input") else []
    return together([*forward, *backward])


def block_products(
    wire: CommModel,
    products: Sequence[tuple[int, int, int, Side]],
    *,
    kept: Kept | Sequence[Kept] = False,
    forward_only: bool = False,
) -> Bytes:
    """Products of (rows, K, N, face) that follow one another in a block, in which each weight is used once: theirs may
    travel together.

    Args:
        kept: of all of them alike, or of each.
    """
    each_kept = [kept] * len(products) if isinstance(kept, (bool, str)) else kept
    total = together(
        product(wire, rows, k, n, face, kept=of_it, forward_only=forward_only)
        for (rows, k, n, face), of_it in zip(products, each_kept, strict=True)
    )
    if wire.unit == "calls" and weights_together(wire, [each[1:] for each in products]):
        stay = forward_only or all(of_it in (True, "weight") for of_it in each_kept)
        total["x", "all-gather"] = 1 if stay else 2
        if not forward_only:
            total["x", "reduce-scatter"] = 1
    return total


def weights_together(wire: CommModel, products: Sequence[tuple[int, int, Side]]) -> bool:
    """Whether the weights of a block's products of (K, N, face) travel over x in one gather."""
    x = wire.size("x")
    shards = (
        -(-chunk(n, wire.size(other(face)), wire.index(other(face))) // x) * (k // wire.size(face))
        for k, n, face in products
    )
    gathered = x * sum(shards) * wire.compute
    return len(products) > 1 and travel_together(wire.shape, gathered, wire.weight_group_bytes)


def layer_norm(wire: CommModel, rows: int, face: Side = "z", *, forward_only: bool = False) -> Bytes:
    """Three numbers a row forward, two back."""
    own = rows // wire.size(other(face))
    forward = wire.moved(face, "all-gather", 3 * own, wire.statistic)
    return forward if forward_only else together([forward, wire.summed((face,), 2 * own, wire.statistic)])


def rms_norm(wire: CommModel, rows: int, face: Side = "z", *, forward_only: bool = False) -> Bytes:
    """One number a row each way."""
    one_way = wire.summed((face,), rows // wire.size(other(face)), wire.statistic)
    return one_way if forward_only else one_way + one_way


def select(wire: CommModel, rows: int, hidden: int, *, forward_only: bool = False) -> Bytes:
    """`rows` selected of a plane on face z: a reduce-scatter forward, an all-gather back."""
    shard = rows // wire.size("y") * (hidden // wire.size("z"))
    forward = wire.moved("y", "reduce-scatter", shard, wire.compute)
    return forward if forward_only else forward + wire.moved("y", "all-gather", shard, wire.compute)


def unfold_rows(wire: CommModel, hidden: int, kernel: int, face: Side = "z") -> Bytes:
    """The first and last rows of each rank, for a convolution along sequences: an all-gather each way."""
    edges = 2 * (kernel // 2) * (hidden // wire.size(face))
    return times(wire.moved(other(face), "all-gather", edges, wire.compute), 2)


def vocab_projection(wire: CommModel, rows: int, hidden: int, vocab: int) -> Bytes:
    """`Projection3D`: a product whose gathered weight stays for backward."""
    return product(wire, rows, hidden, vocab, "z", kept="weight")


LookupWay = Literal["table", "columns", "rows"]
"""What travels over x in a lookup: rows of the table to each plane, its columns and what is found in them, or what is
found alone (layers/embedding.py)."""
_ID = 4  # bytes


@lru_cache(4096)
def lookup_way(shape: CubeShape, rows: int, vocab: int, hidden: int, compute: int, gradient: int) -> LookupWay:
    """The way in which rank 0, which holds the largest blocks, receives the least forward and backward; of equal ones
    the first. By the sizes alone, so that all ranks choose alike.

    Args:
        rows: of the fullest plane.
        compute, gradient: bytes of an element, as of `CommModel`.
    """
    if shape.x == 1:
        return "table"
    wire = CommModel(shape=shape, compute=compute, gradient=gradient)
    return min(get_args(LookupWay), key=lambda way: _lookup(wire, way, rows, vocab, hidden).total())


def embedding(wire: CommModel, rows: int, vocab: int, hidden: int, *, planes_alike: bool = False) -> Bytes:
    """A lookup of all rows of the plane, in the way of `lookup_way`; before it, where x is more than 1 and nobody has
    vouched that the planes are alike, they agree on the number of rows."""
    way = lookup_way(wire.shape, rows, vocab, hidden, wire.compute, wire.gradient)
    found = _lookup(wire, way, rows, vocab, hidden)
    return found if planes_alike else together([wire.summed(("x",), 1, 8), found])


def _lookup(wire: CommModel, way: LookupWay, rows: int, vocab: int, hidden: int) -> Bytes:
    x, columns = wire.size("x"), hidden // wire.size("z")
    slab = chunk(vocab, wire.size("y"), wire.index("y"))
    if way == "table":
        shard = -(-slab // x) * columns
        gather = wire.moved("x", "all-gather", shard, wire.compute)
        return together([gather, wire.moved("x", "reduce-scatter", shard, wire.gradient), select(wire, rows, hidden)])
    own = rows // wire.size("y")
    ids = wire.moved("x", "all-gather", rows, _ID)
    if way == "rows":
        there = wire.moved("x", "reduce-scatter", own * columns, wire.compute)
        back = wire.moved("x", "all-gather", own * columns, wire.compute)
        return together([ids, select(wire, x * rows, hidden), there, back])
    height, width = chunk(slab, x, wire.index("x")), chunk(columns, x, wire.index("x"))
    found = x * own * width
    return together(
        [
            ids,
            wire.exchanged(("x",), (slab - height) * width, wire.compute),
            wire.moved("y", "reduce-scatter", found, wire.compute),
            wire.exchanged(("x",), own * (columns - width), wire.compute),
            wire.exchanged(("x",), found - own * width, wire.compute),
            wire.moved("y", "all-gather", found, wire.compute),
            wire.exchanged(("x",), height * (columns - width), wire.gradient),
        ]
    )


def turn(wire: CommModel, rows: int, columns: int) -> Bytes:
    """Face y to face z and back: each time the new shard less what this rank already held of it."""
    y, z = wire.size("y"), wire.size("z")
    if y * z == 1:
        return Counter()
    shard = rows * columns // (y * z)
    kept = _common(rows, (y, wire.index("y")), (z, wire.index("z"))) * _common(
        columns, (z, wire.index("z")), (y, wire.index("y"))
    )
    once = wire.exchanged(("y", "z"), shard - kept, wire.compute)
    return once + once


def _common(length: int, first: tuple[int, int], second: tuple[int, int]) -> int:
    """How much slice i of n and slice j of m of the same length have in common."""
    (n, i), (m, j) = first, second
    return max(0, min((i + 1) * (length // n), (j + 1) * (length // m)) - max(i * (length // n), j * (length // m)))


def cross_entropy(wire: CommModel, rows: int) -> Bytes:
    """Four numbers a row of face y, forward only."""
    return wire.moved("y", "all-gather", 4 * (rows // wire.size("z")), wire.statistic)


def narrow_head(wire: CommModel, rows: int, classes: int, face: Side = "y") -> Bytes:
    """The logits, summed over the columns axis, forward only."""
    return wire.summed((face,), rows // wire.size(other(face)) * classes, wire.statistic)


def transformer_layer(
    wire: CommModel,
    rows: int,
    hidden: int,
    inner: int,
    *,
    qkv: int | None = None,
    mixed: int | None = None,
    gated: bool = False,
    norms: int = 2,
    rms: bool = False,
    pre_norm: bool = False,
    kept: Kept | Sequence[Kept] = False,
    recomputed: bool = False,
    chosen: int | None = None,
) -> Bytes:
    """QKV, output, up, down and the norms; attention itself sends nothing.

    Args:
        qkv: columns of queries, keys and values. Default: three times the hidden ones.
        mixed: columns of what the heads give together. Default: as many as the hidden ones.
        gated: up is the product of a `GatedMLP3D`, with the gate.
        norms: how many the layer has; the modern encoder's first has one. Four: also of what both parts give.
        rms: they are RMSNorms.
        pre_norm: whether they stand before the blocks. It matters for chosen rows alone.
        kept: which gathered operands stay for backward: of all four products alike, or of QKV, output, up and down.
        recomputed: backward repeats the whole forward first.
        chosen: rows of the plane for which alone the layer goes on after attention. None: all.
    """
    few = rows if chosen is None else chosen
    products: list[tuple[int, int, int, Side]] = [
        (rows, hidden, 3 * hidden if qkv is None else qkv, "z"),
        (few, hidden if mixed is None else mixed, hidden, "y"),
        (few, hidden, 2 * inner if gated else inner, "z"),
        (few, inner, hidden, "y"),
    ]
    normed = [few] * norms
    if pre_norm and norms in (2, 4):
        normed[0] = rows
    parts = [block_products(wire, products, kept=kept)]
    norm = rms_norm if rms else layer_norm
    parts += [norm(wire, m) for m in normed]
    parts += [] if chosen is None else [select(wire, chosen, hidden)]
    if recomputed:
        parts.append(block_products(wire, products, forward_only=True))
        parts += [norm(wire, m, forward_only=True) for m in normed]
        parts += [] if chosen is None else [select(wire, chosen, hidden, forward_only=True)]
    return together(parts)


def relative_table(wire: CommModel, rows: int, hidden: int, *, recomputed: bool = False) -> Bytes:
    """Keys and queries of a layer by distance, of hidden states by distance: a product with the weight of QKV, and a
    gather of its rows over x and z.

    Args:
        rows: of the table, of all planes.
        recomputed: backward repeats the whole forward first.
    """
    axes: tuple[AxisName, ...] = ("x", "z")
    shard = rows // wire.members(axes) * (3 * hidden // wire.size("y"))
    received = (wire.members(axes) - 1) * shard * wire.compute
    parts = [product(wire, rows // wire.size("x"), hidden, 3 * hidden)]
    parts += [wire.over(axes, "all-gather", received), wire.over(axes, "reduce-scatter", received)]
    if recomputed:
        parts.append(product(wire, rows // wire.size("x"), hidden, 3 * hidden, forward_only=True))
        parts.append(wire.over(axes, "all-gather", received))
    return together(parts)


def replicated_gradients(
    wire: CommModel, on_y: int, on_z: int, matrices: int, *, everywhere: int = 0, shares: int | None = None
) -> Bytes:
    """The ledger's sums at the end of a backward pass (once a step under accumulation), and before them two numbers of
    8 bytes, by which all ranks know that they have used the same parameters.

    Args:
        on_y, on_z: local elements of vectors, tables and narrow heads on each face.
        matrices: local elements of weights, which are copies over data alone.
        everywhere: elements of what all ranks hold copies of, as gains of heads.
        shares: elements of the largest shares over data of what is summed over data alone, where each rank gets the
            sums of its share alone (ZeRO stage 2).
    """
    # Sums over the same ranks share a bucket: with x = y = z = 1, all are over data.
    buckets: Counter[tuple[AxisName, ...]] = Counter()
    sums: list[tuple[int, tuple[AxisName, ...]]] = [
        (on_y, ("data", "x", "z")),
        (on_z, ("data", "x", "y")),
        (matrices, ("data",)),
        (everywhere, ("data", "x", "y", "z")),
    ]
    for elements, axes in sums:
        buckets[tuple(axis for axis in axes if wire.size(axis) > 1)] += elements
    if shares is not None:
        buckets.pop(("data",), None)
    sent = [wire.summed_in_buckets(axes, elements) for axes, elements in buckets.items()]
    sent += [wire.scattered_in_buckets("data", shares)] if shares else []
    return together([wire.summed(AXES, 2, 8), *sent])

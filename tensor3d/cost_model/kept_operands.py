"""Which gathered operands of products stay for backward, within a budget of memory, by sizes alone.

A model on ranks (`layers/kept_operands.py`) and the closed forms of what it sends and holds both ask here, so that they
choose alike.

M tokens of the cube, K input features, N output features
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tensor3d.cost_model.comm_volume import Kept, Side, other
from tensor3d.distributed.cube_shape import CubeShape, travel_together


@dataclass(frozen=True, kw_only=True)
class GatheringProduct:
    """A product of `tensor3d.sharding.matmul`, or all of one size in a model."""

    k: int
    n: int
    face: Side = "z"
    element: int
    """Bytes, of what is gathered."""
    places: range
    """Where each stands among the products of the model."""
    block: int | None = None
    """The block in which it follows on others, or the blocks, one for each place: weights of one block may travel over
    x together, and stay together then."""


@dataclass(frozen=True, kw_only=True)
class KeptCount:
    """Of the products of one size, the last so many keep something."""

    inputs: int = 0
    weights: int = 0

    def of(self, number: int, products: int) -> Kept:
        """What product `number` of so many, counted from 0, keeps."""
        behind = products - number
        keeps_input, keeps_weight = behind <= self.inputs, behind <= self.weights
        if keeps_input == keeps_weight:
            return keeps_input
        return "input" if keeps_input else "weight"

    def runs(self, number: int) -> Iterator[tuple[Kept, int]]:
        """What the products keep, of `number` of them, with how many keep it."""
        for kept, products in groupby(self.of(place, number) for place in range(number)):
            yield kept, sum(1 for _ in products)


@dataclass(frozen=True, kw_only=True)
class KeptChoice:
    """What fits. All figures are of one rank, forward and backward of one micro-batch."""

    counts: tuple[KeptCount, ...]
    """Of each `GatheringProduct`."""
    held_bytes: int
    """Of what is kept, at most the budget."""
    spared_bytes: int
    """Received less, if every product has all rows."""
    spared_collectives: int


@dataclass(frozen=True, kw_only=True)
class _Operand:
    """What products of one size, or those of a block together, gather from `members`, as it is then."""

    products: tuple[int, ...]
    is_weight: bool
    members: int
    bytes: int

    @property
    def order(self) -> tuple[int, int]:
        """Most is spared for a byte where many members take part; small ones spare as many collectives."""
        return -self.members, self.bytes


def choose_kept(
    products: Sequence[GatheringProduct],
    shape: CubeShape,
    rows: int,
    budget: int,
    weight_group_bytes: int | None = None,
) -> KeptChoice:
    """Of all gathered operands those that spare most for a byte, then the smallest, then the last in the model, as
    long as they fit. The memory of a step is fullest where its backward pass begins: what the first layers gather again
    is gathered when the last ones have let go of theirs.

    Args:
        rows: of a plane, M over the planes, rounded up.
        budget: bytes on each rank.
        weight_group_bytes: as of `ExecutionPolicy`.
    """
    operands = [each for number, product in enumerate(products) for each in _gathered(number, product, shape, rows)]
    for block in {product.block for product in products if product.block is not None}:
        inside = {number for number, product in enumerate(products) if product.block == block}
        operands = _together(operands, inside, shape, weight_group_bytes)
    inputs, weights = [0] * len(products), [0] * len(products)
    held = spared = collectives = 0
    for _, group in groupby(sorted(operands, key=lambda each: each.order), key=lambda each: each.order):
        alike = list(group)
        size, members = alike[0].bytes, alike[0].members
        found = sum(len(products[each.products[0]].places) for each in alike)
        taken = min(found, (budget - held) // size)
        for operand, count in _last(taken, found, alike, products):
            for product in operand.products:
                (weights if operand.is_weight else inputs)[product] += count
        held += taken * size
        spared += taken * (size // members * (members - 1))
        collectives += taken
    return KeptChoice(
        counts=tuple(KeptCount(inputs=a, weights=w) for a, w in zip(inputs, weights, strict=True)),
        held_bytes=held,
        spared_bytes=spared,
        spared_collectives=collectives,
    )


def gathered_bytes(products: Sequence[GatheringProduct], shape: CubeShape, rows: int) -> int:
    """Of all operands: the budget that keeps everything."""
    return sum(
        len(product.places) * each.bytes
        for number, product in enumerate(products)
        for each in _gathered(number, product, shape, rows)
    )


def _gathered(number: int, product: GatheringProduct, shape: CubeShape, rows: int) -> list[_Operand]:
    """A' (M/planes, K/columns) and W' (N/rows, K/columns), where they come from more than one member."""
    x, members, columns = shape.x, shape.size(other(product.face)), product.k // shape.size(product.face)
    chunk = -(-(product.n // members) // x)  # shards travel padded to one size
    found = [
        _Operand(products=(number,), is_weight=False, members=members, bytes=rows * columns * product.element),
        _Operand(products=(number,), is_weight=True, members=x, bytes=x * chunk * columns * product.element),
    ]
    return [operand for operand in found if operand.members > 1]


def _together(
    operands: list[_Operand], inside: set[int], shape: CubeShape, weight_group_bytes: int | None
) -> list[_Operand]:
    """The weights of these products as one, where they travel as one."""
    mine = [each for each in operands if each.is_weight and each.products[0] in inside]
    size = sum(each.bytes for each in mine)
    if len(mine) < 2 or not travel_together(shape, size, weight_group_bytes):
        return operands
    numbers = tuple(each.products[0] for each in mine)
    one = _Operand(products=numbers, is_weight=True, members=mine[0].members, bytes=size)
    return [each for each in operands if each not in mine] + [one]


def _last(
    taken: int, found: int, alike: Sequence[_Operand], products: Sequence[GatheringProduct]
) -> Iterator[tuple[_Operand, int]]:
    """Of operands of one size the last `taken` in the model, and how many of each."""
    if taken == found:
        for each in alike:
            yield each, len(products[each.products[0]].places)
        return
    order = sorted(
        (-place, each.is_weight, number)
        for number, each in enumerate(alike)
        for place in products[each.products[0]].places
    )
    for _, _, number in order[:taken]:
        yield alike[number], 1

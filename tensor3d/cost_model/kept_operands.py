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
from tensor3d.distributed.cube_shape import CubeShape


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


@dataclass(frozen=True, kw_only=True)
class KeptCount:
    """Of the products of one size, the first so many keep something."""

    inputs: int = 0
    weights: int = 0

    def of(self, number: int) -> Kept:
        """What product `number`, counted from 0, keeps."""
        keeps_input, keeps_weight = number < self.inputs, number < self.weights
        if keeps_input == keeps_weight:
            return keeps_input
        return "input" if keeps_input else "weight"

    def runs(self, number: int) -> Iterator[tuple[Kept, int]]:
        """What the products keep, of `number` of them, with how many keep it."""
        for kept, products in groupby(map(self.of, range(number))):
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
    """What products of one size gather from `members`, as it is then."""

    product: int
    is_weight: bool
    members: int
    bytes: int

    @property
    def order(self) -> tuple[int, int]:
        """Most is spared for a byte where many members take part; small ones spare as many collectives."""
        return -self.members, self.bytes


def choose_kept(products: Sequence[GatheringProduct], shape: CubeShape, rows: int, budget: int) -> KeptChoice:
    """Of all gathered operands those that spare most for a byte, then the smallest, then the first in the model, as
    long as they fit.

    Args:
        rows: of a plane, M over the planes, rounded up.
        budget: bytes on each rank.
    """
    operands = [each for number, product in enumerate(products) for each in _gathered(number, product, shape, rows)]
    inputs, weights = [0] * len(products), [0] * len(products)
    held = spared = collectives = 0
    for _, group in groupby(sorted(operands, key=lambda each: each.order), key=lambda each: each.order):
        alike = list(group)
        size, members = alike[0].bytes, alike[0].members
        found = sum(len(products[each.product].places) for each in alike)
        taken = min(found, (budget - held) // size)
        for product, is_weight, count in _first(taken, found, alike, products):
            (weights if is_weight else inputs)[product] += count
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
        _Operand(product=number, is_weight=False, members=members, bytes=rows * columns * product.element),
        _Operand(product=number, is_weight=True, members=x, bytes=x * chunk * columns * product.element),
    ]
    return [operand for operand in found if operand.members > 1]


def _first(
    taken: int, found: int, alike: Sequence[_Operand], products: Sequence[GatheringProduct]
) -> Iterator[tuple[int, bool, int]]:
    """Of operands of one size the first `taken` in the model: product, whether it is the weight, how many."""
    if taken == found:
        for each in alike:
            yield each.product, each.is_weight, len(products[each.product].places)
        return
    order = sorted((place, each.is_weight, each.product) for each in alike for place in products[each.product].places)
    for _, is_weight, product in order[:taken]:
        yield product, is_weight, 1

"""Which gathered operands of products stay for backward, within a budget of memory, by sizes alone.

A model on ranks (`layers/kept_operands.py`) and the closed forms of what it sends and holds both ask here, so that they
choose alike.

M tokens of the cube, K input features, N output features
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

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
        ends = sorted({0, number, max(0, number - self.inputs), max(0, number - self.weights)})
        for first, end in pairwise(ends):
            yield self.of(first, number), end - first


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


@dataclass(frozen=True, kw_only=True)
class GatheredOperands:
    """All that the products of a model gather, from which a budget chooses."""

    products: Sequence[GatheringProduct]
    alike: tuple[tuple[_Operand, ...], ...]
    """Operands that spare as much for a byte and are as large, the first to be kept first."""

    @classmethod
    def of(
        cls,
        products: Sequence[GatheringProduct],
        shape: CubeShape,
        rows: int,
        weight_group_bytes: int | None = None,
    ) -> GatheredOperands:
        """Args: see `choose_kept`."""
        operands = [each for number, product in enumerate(products) for each in _gathered(number, product, shape, rows)]
        for block in {product.block for product in products if product.block is not None}:
            inside = {number for number, product in enumerate(products) if product.block == block}
            operands = _together(operands, inside, shape, weight_group_bytes)
        ordered = sorted(operands, key=lambda each: each.order)
        return cls(
            products=products, alike=tuple(tuple(same) for _, same in groupby(ordered, key=lambda each: each.order))
        )

    def within(self, budget: int) -> KeptChoice:
        """What a budget of so many bytes keeps."""
        products = self.products
        inputs, weights = [0] * len(products), [0] * len(products)
        held = spared = collectives = 0
        for alike, order, taken in zip(self.alike, self._orders, self._taken(budget), strict=True):
            size, members = alike[0].bytes, alike[0].members
            for number, operand in enumerate(alike):
                count = order[:taken].count(number)
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

    def one_less(self, budget: int) -> list[range]:
        """Budgets that keep one operand less of a size, and of those that come behind none to as many as fit: they
        spare fewer bytes, and may be faster, for bytes differ in what hides them."""
        held, found = 0, list[range]()
        for alike, taken in zip(self.alike, self._taken(budget), strict=True):
            held += taken * alike[0].bytes
            found += [range(held - alike[0].bytes, held)] if taken else []
        return found

    def _taken(self, budget: int) -> list[int]:
        """How many of those alike fit."""
        found = []
        for alike, order in zip(self.alike, self._orders, strict=True):
            found.append(min(len(order), budget // alike[0].bytes))
            budget -= found[-1] * alike[0].bytes
        return found

    @cached_property
    def _orders(self) -> list[list[int]]:
        """Of operands alike, in each place of the model from the last one on, which stands there."""
        found = []
        for alike in self.alike:
            order = sorted(
                (-place, each.is_weight, number)
                for number, each in enumerate(alike)
                for place in self.products[each.products[0]].places
            )
            found.append([number for _, _, number in order])
        return found


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
    return GatheredOperands.of(products, shape, rows, weight_group_bytes).within(budget)


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

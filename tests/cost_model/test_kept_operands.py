"""What fits in a budget, against one operand after another."""

from __future__ import annotations

import pytest

from tensor3d import CubeShape
from tensor3d.cost_model.kept_operands import GatheredOperands, GatheringProduct, KeptCount, choose_kept, gathered_bytes

LAYERS, ROWS = 3, 16
# A product before the layers, two in each of them, and one behind them. On x = y = 2 weights of 8 x 4 are as large as
# inputs of 16 rows and 2 columns.
PRODUCTS = (
    GatheringProduct(k=4, n=4, element=2, places=range(1)),
    GatheringProduct(k=4, n=16, element=2, places=range(1, 7, 2)),
    GatheringProduct(k=4, n=8, face="y", element=2, places=range(2, 7, 2)),
    GatheringProduct(k=2, n=8, element=2, places=range(7, 8)),
)


def _one_by_one(shape: CubeShape, budget: int) -> tuple[list[KeptCount], int, int, int]:
    """Of every product of the model, in its order, as the words say it."""
    found = []
    for number, product in enumerate(PRODUCTS):
        members = shape.y if product.face == "z" else shape.z
        columns = product.k // (shape.z if product.face == "z" else shape.y)
        weight = shape.x * -(-product.n // members // shape.x) * columns * product.element
        for place in product.places:
            for is_weight, of, size in ((0, members, ROWS * columns * product.element), (1, shape.x, weight)):
                found += [(-of, size, -place, is_weight, number)] if of > 1 else []
    kept, held, spared, calls = [[0, 0] for _ in PRODUCTS], 0, 0, 0
    for members, size, _, is_weight, number in sorted(found):
        if held + size <= budget:
            kept[number][is_weight] += 1
            held, spared, calls = held + size, spared + size // -members * (-members - 1), calls + 1
    return [KeptCount(inputs=a, weights=w) for a, w in kept], held, spared, calls


@pytest.mark.parametrize("shape", [CubeShape(x=2, y=2), CubeShape(x=4, y=2, z=2), CubeShape(z=4), CubeShape()], ids=str)
def test_alike_operands_at_once_are_those_one_by_one(shape: CubeShape) -> None:
    whole = gathered_bytes(PRODUCTS, shape, ROWS)
    for budget in range(0, whole + 3, 2):
        chosen = choose_kept(PRODUCTS, shape, ROWS, budget)
        figures = (chosen.held_bytes, chosen.spared_bytes, chosen.spared_collectives)
        assert ([*chosen.counts], *figures) == _one_by_one(shape, budget)
    assert chosen.held_bytes == whole


def test_budgets_that_keep_one_operand_less() -> None:
    operands = GatheredOperands.of(PRODUCTS, CubeShape(x=2, y=2, z=2), ROWS)
    sizes = [(alike[0].bytes, len(order)) for alike, order in zip(operands.alike, operands._orders, strict=True)]
    assert sizes == [(8, 2), (16, 3), (32, 4), (64, 7)]
    assert operands.one_less(2 * 8 + 2 * 16 + 15) == [range(8, 16), range(32, 48)]
    assert operands.one_less(2 * 8 + 3 * 16 + 70) == [range(8, 16), range(48, 64), range(96, 128)]
    assert operands.within(32).counts == operands.within(47).counts != operands.within(48).counts
    assert operands.one_less(7) == []


def test_the_last_layers_keep_what_there_is_room_for() -> None:
    count = KeptCount(inputs=1, weights=3)
    assert [count.of(number, 4) for number in range(4)] == [False, "weight", "weight", True]
    assert list(count.runs(5)) == [(False, 2), ("weight", 2), (True, 1)]
    assert KeptCount(inputs=2).of(1, 3) == "input"

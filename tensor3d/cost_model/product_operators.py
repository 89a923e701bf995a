"""What stands around the products of a step on a rank, in closed form: operators, and the bytes that they touch.

`tools.bench operators` counts the same in the real code, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensor3d.cost_model.comm_volume import CommModel, chunk, lookup_way, other
from tensor3d.cost_model.step_cost import Product


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of memory-bound operators."""

    operators: int = 0
    touched: int = 0
    """Bytes read and written."""

    def times(self, number: int) -> Work:
        return Work(operators=number * self.operators, touched=number * self.touched)


def together(parts: Iterable[Work]) -> Work:
    every = list(parts)
    return Work(operators=sum(each.operators for each in every), touched=sum(each.touched for each in every))


# --- Weights and biases in the type of products -----------------------------------------------------------------------


def conversions(product: Product, wire: CommModel) -> Work:
    """Of weight and bias in a micro-batch: what `ExecutionPolicy.shadow_weights` spares. Each forward pass converts
    both, and the backward pass the weight, unless what was gathered of it is there (sharding/weight_slabs.py)."""
    if wire.compute == wire.parameter:
        return Work()
    slab = chunk(product.n, wire.size(other(product.face)), wire.index(other(product.face)))
    own = chunk(slab, wire.size("x"), wire.index("x")) * (product.k // wire.size(product.face))
    weight, bias = _converted(wire, own), _converted(wire, slab)
    if product.together:  # what puts them end to end converts them, and copies without that too
        weight = Work(touched=own * (wire.parameter - wire.compute))
    forward = together([weight, *([bias] if product.bias else [])]).times(1 + product.repeated)
    backward = [] if product.kept in (True, "weight") else [weight]
    return together([forward, *backward]).times(product.times)


def lookup_conversion(wire: CommModel, rows: int, vocab: int, hidden: int) -> Work:
    """The same of an `Embedding3D`'s table: a tied one takes the copy that its projection has."""
    way = lookup_way(wire.shape, rows, vocab, hidden, wire.compute, wire.gradient)
    if wire.size("x") == 1 or way == "rows" or wire.compute == wire.parameter:  # rows of the table are converted
        return Work()
    slab = chunk(vocab, wire.size("y"), wire.index("y"))
    return _converted(wire, chunk(slab, wire.size("x"), wire.index("x")) * (hidden // wire.size("z")))


def shadow_copies(wire: CommModel, multiplied: int) -> Work:
    """Once a step, of all weights and biases together: `multiplied` elements of this rank's blocks."""
    return Work() if wire.compute == wire.parameter else _converted(wire, multiplied)


def _converted(wire: CommModel, elements: int) -> Work:
    return Work(operators=1, touched=elements * (wire.parameter + wire.compute))

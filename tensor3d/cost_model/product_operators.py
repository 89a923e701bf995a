"""What stands around the products of a step on a rank, in closed form: operators, and the bytes that they touch.

`tools.bench operators` counts the same in the real code, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensor3d.cost_model.comm_volume import CommModel, Side, chunk, lookup_way, other
from tensor3d.cost_model.step_cost import Product
from tensor3d.distributed.cube_shape import CubeShape


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
    both, by one operator where the weight does not travel, and the backward pass the weight, unless what was gathered
    of it is there (sharding/weight_slabs.py)."""
    if wire.compute == wire.parameter:
        return Work()
    slab, columns = _slab(product, wire)
    own = chunk(slab, wire.size("x"), wire.index("x")) * columns
    weight, bias = _converted(wire, own), _converted(wire, slab)
    if product.together:  # what puts them end to end converts them, and copies without that too
        weight = Work(touched=own * (wire.parameter - wire.compute))
    forward = together([weight, *([bias] if product.bias else [])])
    if product.bias and wire.size("x") == 1:
        forward = Work(operators=1, touched=forward.touched)
    forward = forward.times(1 + product.repeated)
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


# --- Weights that travel over x together (sharding/weight_slabs.py) ---------------------------------------------------


def end_to_end(product: Product, wire: CommModel) -> Work:
    """Of a product whose weight does, in a micro-batch: shards are put end to end and W' is cut out of what was
    gathered, in each pass, and dW' is put end to end with the others. For a block comes `BLOCK_OPERATORS` beside."""
    if not product.together:
        return Work()
    slab, columns = _slab(product, wire)
    own = chunk(slab, wire.size("x"), wire.index("x"))
    passes = 1 + product.repeated + (product.kept not in (True, "weight"))
    copied = passes * 2 * wire.compute * (own + slab) + 2 * wire.gradient * slab
    return Work(operators=passes + 1, touched=copied * columns).times(product.times)


BLOCK_OPERATORS = 2
"""That put the shards of all weights of a block end to end, forward and backward."""


# --- Products in FP8 (ops/fp8.py) -------------------------------------------------------------------------------------

SIDE = 16
"""Both sides of what a rank multiplies by must divide by it, and what it sums over is filled up to a multiple."""
_ROUNDING, _ROUNDING_AS_BEFORE = 18, 21
"""Operators of one matrix: by the scale of its largest magnitude, and by one that is there ("delayed")."""
_PASSES, _PASSES_AS_BEFORE = 13, 35
"""Bytes that they read and write for each element."""
_OF_SCALE, _BESIDE, _BESIDE_AS_BEFORE = 94, 8, 66
"""And for each scale; and for a matrix."""
READ_AGAIN = 2
"""Bytes of each element that a compiled region, which is one operator that reads 2 and writes 1, reads once more for
its scale: the region's kernels show it, the counter does not."""


def suits_fp8(shape: CubeShape, k: int, n: int, face: Side) -> bool:
    """Whether a linear layer's products may be in FP8 there."""
    return n // shape.size(other(face)) % SIDE == 0 and k // shape.size(face) % SIDE == 0


def rounding(product: Product, wire: CommModel, *, compiled: bool = False) -> Work:
    """What FP8 takes beside the kernels of a product, in a micro-batch: A' and W' are rounded forward, dC' and W' for
    dA, and dC' and A' for dW, unless that stays as it is ("rowwise"). The kernels read both by rows, of which some lie
    by columns. Compiled, each rounding is a region (`ExecutionPolicy.compile`), else many operators."""
    if product.fp8 is None:
        return Work()
    rows, (slab, columns) = product.rows, _slab(product, wire)
    rowwise, delayed = product.fp8 == "rowwise", product.fp8 == "delayed"

    def one(height: int, width: int, scales: int) -> Work:
        if compiled:
            again, beside = (0, 8) if delayed else (READ_AGAIN, 4 * (scales if rowwise else 1))
            return Work(operators=1, touched=(3 + again) * height * width + beside)
        if delayed:
            beside = 4 * height + _BESIDE_AS_BEFORE  # magnitudes of rows are written and read
            return Work(operators=_ROUNDING_AS_BEFORE, touched=_PASSES_AS_BEFORE * height * width + beside)
        of_scales = _OF_SCALE * (scales if rowwise else 1) + _BESIDE
        return Work(operators=_ROUNDING, touched=_PASSES * height * width + of_scales)

    def turned(height: int, width: int) -> Work:
        return Work(operators=1, touched=2 * height * width)

    of_a, of_dc = one(rows, columns, rows), one(rows, slab, rows)
    forward = together([of_a, one(slab, columns, slab)]).times(1 + product.repeated)
    parts = [forward, of_dc, one(slab, columns, columns), turned(slab, columns)]
    if not rowwise:
        parts += [of_a, turned(rows, slab), turned(rows, columns)]
        parts += [] if delayed else [of_dc]
        missing = -rows % SIDE
        if missing:
            parts.append(Work(operators=2, touched=(2 * rows + missing) * (slab + columns)))
        parts.append(_widened(product, wire, slab * columns))
    if delayed:
        parts.append(_compared(1))
    if product.hands_on and wire.size(other(product.face)) == 1:
        # The gradient of the residual is added in place, for the kernel is of another type.
        parts.append(Work(operators=1, touched=3 * wire.compute * rows * columns))
    return together(parts).times(product.times)


def delayed_scales(weights: int) -> Work:
    """Once a step, of delayed scaling: the histories of so many weights' products go on by one pass, and give new
    scales. What `rounding` counts of a weight's first use in it is compared with nothing."""
    return together(
        [Work(operators=3 * weights + 32, touched=1971 * weights + 112), _compared(-weights)] if weights else []
    )


def scale_bytes(weights: int, history: int) -> int:
    """Bytes that stay of delayed scaling: of A', W' and dC' of so many weights' products a history of fp32 magnitudes,
    and a scale in 16 bytes."""
    return 3 * weights * (4 * history + 16)


def _compared(times: int) -> Work:
    """The largest magnitudes of A', W' and dC', with those of the uses of a weight before."""
    return Work(operators=3, touched=3 * 12).times(times)


def _widened(product: Product, wire: CommModel, elements: int) -> Work:
    """Of dW', which comes in 16 bits from products in FP8: in the type of its sum from others."""
    if wire.size("x") > 1 and wire.gradient == wire.compute:
        return Work()
    if product.together:  # what puts it with the others reads less
        return Work(touched=elements * (wire.compute - wire.gradient))
    return Work(operators=1, touched=elements * (wire.compute + wire.parameter))


def _slab(product: Product, wire: CommModel) -> tuple[int, int]:
    """Rows and columns of W'."""
    rows = other(product.face)
    return chunk(product.n, wire.size(rows), wire.index(rows)), product.k // wire.size(product.face)

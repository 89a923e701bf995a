"""Embedding of tokens, small tables beside it, and the projection back to the vocabulary with the same weight.

M tokens of the cube, V vocabulary, H hidden size
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tensor3d.cube import Cube
from tensor3d.faces import check_activation, check_divides, in_batch, lies
from tensor3d.layout import block, chunk_bounds, matrix, table, vector
from tensor3d.ledger import asked_for
from tensor3d.matmul import gather_next_slab, matmul, place_in_order, scatter_slab, take_slab
from tensor3d.parameters import constant, normal, use
from tensor3d.rows import check_numbers, lookup, own_rows


class Embedding3D(nn.Module):
    """Rows of a table [V, H] by token id, onto face z. The weight has the layout of a product that reads face z.

        weight   (V/yx, H/z)          ids  (M/x,) of the whole plane, on each of its ranks
        forward  W' = all-gather over x; own rows where owned; reduce-scatter over y      -> (M/xy, H/z)
        backward all-gather over y; sum of rows by id; reduce-scatter over x              -> to the ledger

    Elements received: forward `(x-1)/x*VH/yz + (y-1)/y*MH/xz`, backward the same. V need not divide by anything.

    Raises:
        ValueError: H does not divide by z, V is below 1, or (on the CPU) ids outside of the vocabulary.
    """

    def __init__(self, vocab: int, hidden: int, cube: Cube, *, std: float = 0.02) -> None:
        super().__init__()
        check_divides("hidden", hidden, cube, "z")
        if vocab < 1:
            raise ValueError(f"vocab must be at least 1. Got {vocab}.")
        self.vocab, self.hidden, self.cube = vocab, hidden, cube
        self.weight = normal((vocab, hidden), matrix("z"), cube, std)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (M/x,) of the plane, -1 for a row of zeros, to (M/xy, H/z) on face z. A batch dim of 1 is kept."""
        if ids.dim() == 2:
            return in_batch(self.forward, ids, "Embedding3D")
        check_numbers("ids", ids, self.vocab, self.cube)
        y = self.cube.axis("y")
        first, _ = chunk_bounds(self.vocab, y.size, y.index)
        return lookup(
            _Slab.apply(self.weight, self.cube, place_in_order(None, self.cube)),
            ids,
            first,
            y,
            f"Embedding3D of {self.vocab} entries",
            dtype=self.cube.precision.computed(self.weight.dtype),
        )

    def extra_repr(self) -> str:
        return f"{self.vocab}, {self.hidden}, ids -> {lies(self.hidden, 'z', self.cube)}, {block(self.weight)}"


class TableEmbedding3D(nn.Module):
    """Rows of a small table [T, H], held whole in its rows, added on face z: positions, token types. No collective.

    Raises:
        ValueError: H does not divide by z, or T is below 1.
    """

    def __init__(self, rows: int, hidden: int, cube: Cube, *, std: float = 0.02) -> None:
        super().__init__()
        check_divides("hidden", hidden, cube, "z")
        if rows < 1:
            raise ValueError(f"a table needs at least 1 row. Got {rows}.")
        self.rows, self.hidden, self.cube = rows, hidden, cube
        self.weight = normal((rows, hidden), table("z"), cube, std)

    def forward(self, numbers: Tensor) -> Tensor:
        """Row numbers (M/x,) of the plane to (M/xy, H/z) on face z. A batch dim of 1 is kept."""
        if numbers.dim() == 2:
            return in_batch(self.forward, numbers, "TableEmbedding3D")
        check_numbers("row numbers", numbers, self.rows, self.cube, lowest=0)
        own = own_rows(numbers, self.cube, "z")
        chosen = F.embedding(own, use(self.weight, table("z"), self.cube))
        return chosen.to(self.cube.precision.computed(chosen.dtype))

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.hidden}, numbers -> {lies(self.hidden, 'z', self.cube)}, {block(self.weight)}"


class TiedProjection3D(nn.Module):
    """Logits over the vocabulary with the embedding's own weight; its gradients add up with the embedding's.

    The slices of the logits are the vocabulary's chunks over y, so V need not divide. Pass them to `cross_entropy`.
    """

    def __init__(self, vocab: int, hidden: int, cube: Cube, bias: bool = True) -> None:
        super().__init__()
        check_divides("hidden", hidden, cube, "z")
        self.vocab, self.hidden, self.cube = vocab, hidden, cube
        self.bias = constant((vocab,), vector("y"), cube, 0.0) if bias else None

    def forward(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """(R/xy, H/z) on face z and `Embedding3D.weight`, to (R/xz, V/y) on face y."""
        if x.dim() == 3:
            return in_batch(lambda one: self.forward(one, weight), x, "TiedProjection3D")
        check_activation(x, self.hidden, self.cube, "z", "TiedProjection3D")
        if tuple(weight.shape) != (self.vocab, self.hidden):
            raise ValueError(
                f"the tied weight must have shape ({self.vocab}, {self.hidden}). Got {tuple(weight.shape)}."
            )
        return matmul(x, weight, self.cube, "z", self.bias)

    def extra_repr(self) -> str:
        reads, gives = lies(self.hidden, "z", self.cube), lies(self.vocab, "y", self.cube)
        return f"{self.hidden} -> {self.vocab}, {reads} -> {gives}"


class _Slab(torch.autograd.Function):
    """The embedding's rows of this rank's y chunk, gathered over x; backward sums over x, into the ledger."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, cube: Cube, after: bool | None) -> Tensor:
        cube.ledger.forget_failed_passes()
        ctx.weight, ctx.cube, ctx.is_ordered = weight, cube, True
        # Where the table does not travel, its rows are converted once they are chosen, and the sums of theirs are not.
        dtype = weight.dtype if cube.axis("x").size == 1 else cube.precision.computed(weight.dtype)
        slab = take_slab(weight, cube, cube.axis("y"), dtype, kind="lookup", after=after).wait()
        gather_next_slab(cube, after=after)
        return slab.view_as(slab)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        cube, weight = ctx.cube, ctx.weight
        if all(asked_for(ctx, weight)):
            scattering = scatter_slab(gradient, weight, cube)
            cube.ledger.hand_in(weight, scattering, cube.over(*matrix("z").sum_over))
        return None, None, None

"""Embedding of tokens, and small tables beside it.

M tokens of the cube, V vocabulary, H hidden size
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tensor3d.distributed.collectives import all_gather, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.grad_reducer import asked_for
from tensor3d.distributed.weight_prefetch import PassPosition
from tensor3d.sharding.activation_layout import check_divides, in_batch, lies
from tensor3d.sharding.matmul import (
    get_gathered_weight,
    position_in_pass,
    prefetch_next_weight,
    reduce_scatter_weight_grad,
)
from tensor3d.sharding.param_layout import block, chunk_bounds, local_param, matrix, normal, table
from tensor3d.sharding.redistribute import check_numbers, chosen_rows, local_rows, places_in, sums_by_row


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
        return _Embedding.apply(self.weight, ids, self.cube, position_in_pass(None, self.cube))

    def extra_repr(self) -> str:
        return f"{self.vocab}, {self.hidden}, ids -> {lies(self.hidden, 'z', self.cube)}, {block(self.weight)}"


class LookupEmbedding3D(nn.Module):
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
            return in_batch(self.forward, numbers, "LookupEmbedding3D")
        check_numbers("row numbers", numbers, self.rows, self.cube, lowest=0)
        own = local_rows(numbers, self.cube, "z")
        chosen = F.embedding(own, local_param(self.weight, table("z"), self.cube))
        return chosen.to(self.cube.precision.computed(chosen.dtype))

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.hidden}, numbers -> {lies(self.hidden, 'z', self.cube)}, {block(self.weight)}"


class _Embedding(torch.autograd.Function):
    """Saved for backward: the ids' places and which of them are owned, never the table."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, cube: Cube, position: PassPosition) -> Tensor:
        cube.ledger.forget_failed_passes()
        y, dtype = cube.axis("y"), cube.precision.computed(weight.dtype)
        # A table that does not travel is not converted: its chosen rows are.
        in_type = weight.dtype if cube.axis("x").size == 1 else dtype
        slab = get_gathered_weight(weight, cube, y, in_type, kind="lookup", position=position).wait()
        prefetch_next_weight(cube, position=position)
        local_rows, owned = places_in(slab, ids, chunk_bounds(weight.shape[0], y.size, y.index)[0])
        ctx.save_for_backward(local_rows, owned)
        ctx.weight, ctx.cube, ctx.is_ordered, ctx.table_rows = weight, cube, True, slab.shape[0]
        ctx.result_face, ctx.made = "z", f"Embedding3D of {weight.shape[0]} entries"
        return reduce_scatter(chosen_rows(slab, local_rows, owned, dtype), y).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        cube, weight = ctx.cube, ctx.weight
        if all(asked_for(ctx, weight)):
            local_rows, owned = ctx.saved_tensors
            sums = sums_by_row(all_gather(gradient, cube.axis("y")).wait(), local_rows, owned, ctx.table_rows)
            cube.ledger.accumulate_grad(
                weight, reduce_scatter_weight_grad(sums, weight, cube), cube.over(*matrix("z").sum_over)
            )
        return None, None, None, None

"""Embedding of tokens, and small tables beside it.

M tokens of the cube, V vocabulary, H hidden size; R = M/x rows of a plane
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d.cost_model.comm_volume import LookupWay, lookup_way
from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle, all_gather, all_to_all, largest, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.distributed.grad_reducer import RowSums
from tensor3d.distributed.weight_prefetch import PassPosition
from tensor3d.ops.as_type import as_type
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.sharding.activation_layout import check_divides, in_batch, lies
from tensor3d.sharding.param_layout import block, check_layout, local, matrix, normal, table
from tensor3d.sharding.redistribute import (
    add_by_row,
    check_numbers,
    chosen_rows,
    local_rows,
    places_in,
    spoil,
    sums_by_row,
)
from tensor3d.sharding.weight_slabs import (
    block_or_shadow,
    get_gathered_weight,
    position_in_pass,
    prefetch_next_weight,
    reduce_scatter_weight_grad,
)


class Embedding3D(nn.Module):
    """Rows of a table [V, H] by token id, onto face z. The weight has the layout of a product that reads face z.

        weight   (V/yx, H/z)          ids  (M/x,) of the whole plane, on each of its ranks

    What travels over x is the table, or its columns and what is found in them, or what is found alone:

        "table"   forward  W' (V/y, H/z) = all-gather over x; own rows where owned; reduce-scatter over y
                  backward all-gather over y; sums of rows by id; reduce-scatter over x
        "columns" forward  W" (V/y, H/zx) = all-to-all over x; the ids of all planes by all-gather over x; their rows
                           where owned (M, H/zx); reduce-scatter over y; all-to-all over x: own rows, all columns
                  backward all-to-all over x; all-gather over y; sums of rows by id; all-to-all over x
        "rows"    forward  the ids of all planes by all-gather over x; their rows where owned (M, H/z), of the own block
                           of W alone; reduce-scatter over y; reduce-scatter over x
                  backward all-gather over x; all-gather over y; sums of rows by id
                                                                         -> (M/xy, H/z), gradients to the ledger

    Elements received, forward, and backward the same (but for the ids, of 4 bytes each):

        "table"   `(x-1)/x*VH/yz            + (y-1)/y*RH/z`
        "columns" `(x-1)/x*(V/x + R)*H/yz   + (y-1)/y*RH/z`   and `(x-1)*R` ids
        "rows"    `(x-1)*RH/z               + (y-1)/y*RH/z`   and `(x-1)*R` ids

    The way that receives the fewest bytes is taken (`tensor3d.cost_model.comm_volume.lookup_way`). Roughly: "rows"
    where M is below V/y and V/(xy-1), "table" where M is above (x-1)V. The forward pass gives the same bits in each.
    Shards must be of one size, so the hosts along x first agree on the largest number of rows of a plane (8 bytes; no
    device is waited for), and planes with fewer rows are padded. `forward(..., planes_alike=True)` skips that: the
    caller knows that all planes have the same number.

    Why these three: the bytes follow from the sizes alone, so nobody waits for ids on the device. How many rows one
    member must send another depends on the ids. Without reading them there must be room for the worst case, in which
    all ids lie in one block of the table: min(M, V/xy) rows leave it. "rows" is bounded by M (an all-to-all of rows
    padded to M would receive as much). "columns", where each row of the table leaves once, is bounded by V/xy.
    Gradients of all planes are summed where their row lies, in fp32 at least. Only "columns" rounds the sums to
    `precision.reduce` before they travel. V need not divide by anything.

    Raises:
        ValueError: H does not divide by z, V is below 1 or not below 2^31, or (on the CPU) ids outside of the
            vocabulary; with gradients, where other planes have other ids, at the end of the backward pass.
    """

    def __init__(self, vocab: int, hidden: int, cube: Cube, *, std: float = 0.02) -> None:
        super().__init__()
        check_divides("hidden", hidden, cube, "z")
        if not 1 <= vocab < 2**31:  # ids travel as int32
            raise ValueError(f"vocab must be at least 1 and below 2^31. Got {vocab}.")
        self.vocab, self.hidden, self.cube = vocab, hidden, cube
        self.weight = normal((vocab, hidden), matrix("z"), cube, std)

    @out_of_graphs
    def forward(self, ids: Tensor, *, planes_alike: bool = False) -> Tensor:
        """Ids (M/x,) of the plane, -1 for a row of zeros, to (M/xy, H/z) on face z. A batch dim of 1 is kept.

        Args:
            planes_alike: True, on all ranks, where all planes are known to have the same number of rows.
        """
        if ids.dim() == 2:
            return in_batch(partial(self.forward, planes_alike=planes_alike), ids, "Embedding3D")
        ids, outside = check_numbers("ids", ids, self.vocab, self.cube)
        check_layout(self.weight, matrix("z"), self.cube)
        most = ids.shape[0] if planes_alike else largest(ids.shape[0], self.cube.hosts_along_x)
        way, position = self._way(most), position_in_pass(None, self.cube)
        if way == "table":
            found = _Embedding.apply(self.weight, ids, self.cube, position)
        else:
            found = _LookupOfAllPlanes.apply(self.weight, ids, self.cube, position, way, most)
        return spoil(found, outside, self.cube, "z")

    def _way(self, rows: int) -> LookupWay:
        precision, stored = self.cube.precision, self.weight.dtype
        compute, gradient = precision.computed(stored).itemsize, precision.reduced(stored).itemsize
        return lookup_way(self.cube.shape, rows, self.vocab, self.hidden, compute, gradient)

    def extra_repr(self) -> str:
        return f"{self.vocab}, {self.hidden}, ids -> {lies(self.hidden, 'z', self.cube)}, {block(self.weight)}"


class LookupEmbedding3D(nn.Module):
    """Rows of a small table [T, H] by number, on face z: positions, token types. Every rank holds all T rows of its
    columns, so nothing is sent.

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

    @out_of_graphs
    def forward(self, numbers: Tensor) -> Tensor:
        """Row numbers (M/x,) of the plane to (M/xy, H/z) on face z. A batch dim of 1 is kept."""
        if numbers.dim() == 2:
            return in_batch(self.forward, numbers, "LookupEmbedding3D")
        numbers, outside = check_numbers("row numbers", numbers, self.rows, self.cube, lowest=0)
        check_layout(self.weight, table("z"), self.cube)
        self.cube.over(*table("z").sum_over)  # its process groups must exist before a backward pass needs them
        found = _SmallTable.apply(self.weight, local_rows(numbers, self.cube, "z"), self.cube)
        return spoil(found, outside, self.cube, "z")

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.hidden}, numbers -> {lies(self.hidden, 'z', self.cube)}, {block(self.weight)}"


class _SmallTable(Function):
    """Rows of a table that is whole on this rank, in the type of products. Saved for backward: their numbers."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, numbers: Tensor, cube: Cube) -> Tensor:
        cube.ledger.forget_failed_passes()
        rows = local(weight)
        ctx.save_for_backward(numbers)
        ctx.weight, ctx.cube = weight, cube
        ctx.result_face, ctx.made = "z", f"LookupEmbedding3D of {weight.shape[0]} rows"
        return as_type(F.embedding(numbers, rows), cube.precision.computed(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if all(asked_for(ctx, ctx.weight)):
            (numbers,) = ctx.saved_tensors
            gradient = as_type(gradient, ctx.weight.dtype)
            sums = torch.ops.aten.embedding_dense_backward(gradient, numbers, ctx.weight.shape[0], -1, False)
            ctx.cube.ledger.accumulate_grad(ctx.weight, CommHandle(sums), ctx.cube.over(*table("z").sum_over))
        return None, None, None


class _Embedding(Function):
    """The table travels. Saved for backward: the ids' places and which of them are owned, never the table."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, cube: Cube, position: PassPosition) -> Tensor:
        cube.ledger.forget_failed_passes()
        y, dtype = cube.axis("y"), cube.precision.computed(weight.dtype)
        # A table that does not travel is not converted: its chosen rows are.
        in_type = weight.dtype if cube.axis("x").size == 1 else dtype
        slab = get_gathered_weight(weight, cube, y, in_type, kind="lookup", position=position).wait()
        prefetch_next_weight(cube, position=position)
        first = chunk_bounds(weight.shape[0], y.size, y.index)[0]
        local_rows, owned = places_in(ids, first, slab.shape[0])
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
            found, over = all_gather(gradient, cube.axis("y")).wait(), cube.over(*matrix("z").sum_over)
            if cube.axis("x").size == 1:
                own: CommHandle = _row_sums(found, local_rows, owned, weight)
            else:
                own = reduce_scatter_weight_grad(sums_by_row(found, local_rows, owned, ctx.table_rows), weight, cube)
            cube.ledger.accumulate_grad(weight, own, over)
        return None, None, None, None


class _LookupOfAllPlanes(Function):
    """Each member of x looks the ids of all planes up in what it has: rows of the table, or columns of the slab.

    Saved for backward: the ids of all planes.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: nn.Parameter, ids: Tensor, cube: Cube, position: PassPosition, way: LookupWay, most: int
    ) -> Tensor:
        cube.ledger.forget_failed_passes()
        x, y, dtype = cube.axis("x"), cube.axis("y"), cube.precision.computed(weight.dtype)
        cut = _Cut(weight, cube)
        gathering_ids = _gather_ids(ids, most, cube)
        part, first = local(weight), cut.block_start
        if way == "columns":
            converted = block_or_shadow(weight, cube, dtype).to(dtype)
            part = cut.to_columns(converted, cut.heights).wait().view(sum(cut.heights), cut.width)
            first = cut.slab_start
        every = gathering_ids.wait().view(x.size, y.size, most // y.size)
        every = every.transpose(0, 1).reshape(-1)  # rows of a member of y together: it scatters first
        if position is not PassPosition.UNORDERED:
            cube.ahead.pass_lookup(weight, y, dtype, position is PassPosition.FOLLOWING)
        prefetch_next_weight(cube, position=position)
        local_rows, owned = places_in(every, first, part.shape[0])
        found = reduce_scatter(chosen_rows(part, local_rows, owned, dtype), y).wait()  # (M/y, columns of `part`)
        result = cut.to_rows(found, [most // y.size] * x.size) if way == "columns" else reduce_scatter(found, x).wait()
        ctx.save_for_backward(every)
        ctx.weight, ctx.cube, ctx.way, ctx.rows = weight, cube, way, most // y.size
        ctx.is_ordered = True
        ctx.result_face, ctx.made = "z", f"Embedding3D of {weight.shape[0]} entries"
        # A view could not be changed in place.
        return result if ids.shape[0] == most else result[: ids.shape[0] // y.size].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None, None, None]:
        cube, weight = ctx.cube, ctx.weight
        if all(asked_for(ctx, weight)):
            (every,) = ctx.saved_tensors
            x, y, cut = cube.axis("x"), cube.axis("y"), _Cut(weight, cube)
            if gradient.shape[0] < ctx.rows:
                gradient = F.pad(gradient, (0, 0, 0, ctx.rows - gradient.shape[0]))
            if ctx.way == "columns":
                found = cut.to_columns(gradient, [ctx.rows] * x.size).wait().view(x.size * ctx.rows, cut.width)
                first, rows = cut.slab_start, sum(cut.heights)
            else:
                found, first, rows = all_gather(gradient, x).wait(), cut.block_start, local(weight).shape[0]
            local_rows, owned = places_in(every, first, rows)
            found = all_gather(found, y).wait()
            if ctx.way == "columns":
                sums = sums_by_row(found, local_rows, owned, rows)
                sums = cut.to_rows(sums.to(cube.precision.reduced(weight.dtype)), cut.heights)
                own = CommHandle(sums.to(weight.dtype))
            else:
                own = _row_sums(found, local_rows, owned, weight)
            cube.ledger.accumulate_grad(weight, own, cube.over(*matrix("z").sum_over))
        return None, None, None, None, None, None


def _row_sums(rows: Tensor, local_rows: Tensor, owned: Tensor, weight: nn.Parameter) -> RowSums:
    """The gradient of this rank's block, of rows (R, H') of which some are its own."""

    def whole() -> Tensor:
        return sums_by_row(rows, local_rows, owned, local(weight).shape[0]).to(weight.dtype)

    return RowSums(rows, whole, lambda table: add_by_row(table, rows, local_rows, owned))


class _Cut:
    """How x cuts the slab of a table, (V/y, H/z): its rows, as it is stored, and here also its columns."""

    def __init__(self, weight: nn.Parameter, cube: Cube) -> None:
        self.x, y, z = cube.axis("x"), cube.axis("y"), cube.axis("z")
        self.slab_start, stop = chunk_bounds(weight.shape[0], y.size, y.index)
        rows, columns = stop - self.slab_start, weight.shape[1] // z.size
        self.heights, self.widths = _chunks(rows, self.x.size), _chunks(columns, self.x.size)
        self.width = self.widths[self.x.index]
        self.block_start = self.slab_start + sum(self.heights[: self.x.index])

    def to_columns(self, rows: Tensor, heights: list[int]) -> CommHandle:
        """Starts the turn of a matrix of which each member has rows, `heights` of them, to this member's columns of
        all rows, flat."""
        blocks = torch.cat([part.reshape(-1) for part in rows.split(self.widths, 1)])
        send = [rows.shape[0] * width for width in self.widths]
        return all_to_all(blocks, send, [height * self.width for height in heights], self.x)

    def to_rows(self, columns: Tensor, heights: list[int]) -> Tensor:
        """The dual: from own columns of all rows to own rows of all columns."""
        own = heights[self.x.index]
        receive = [own * width for width in self.widths]
        flat = all_to_all(columns.reshape(-1), [height * self.width for height in heights], receive, self.x).wait()
        return torch.cat(
            [part.view(own, width) for part, width in zip(flat.split(receive), self.widths, strict=True)], 1
        )


def _chunks(size: int, parts: int) -> list[int]:
    bounds = (chunk_bounds(size, parts, index) for index in range(parts))
    return [stop - start for start, stop in bounds]


def _gather_ids(ids: Tensor, most: int, cube: Cube) -> CommHandle:
    """Starts the gather over x of the planes' ids, those of each member of y filled up with -1."""
    y = cube.axis("y").size
    own = ids.to(torch.int32).reshape(y, ids.shape[0] // y)
    return all_gather(F.pad(own, (0, most // y - own.shape[1]), value=-1).reshape(-1), cube.axis("x"))

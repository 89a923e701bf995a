"""Rows of a matrix by their number: lookup in a table cut over an axis, selection of rows of a plane, their neighbours,
change of face.

R rows wanted, T rows of the table, H columns
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tensor3d.distributed.collectives import Axis, all_gather, all_to_all, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.ops.as_type import as_type
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.row_chunks import is_host_readable
from tensor3d.sharding.activation_layout import Face, check_face, in_batch, other
from tensor3d.sharding.layout_checks import check_matrix, check_origin


@out_of_graphs
def select(tensor: Tensor, rows: Tensor, cube: Cube, face: Face = "z") -> Tensor:
    """The chosen rows of a plane, spread over the cube as a matrix of R rows on the same face.

    A lookup whose table is the plane's rows. Each of the n members of the axis that splits them has T' rows:

        forward  reduce-scatter over the axis of [own rows where owned, else 0]    -> (R/n, H')
        backward dY' = all-gather dY over the axis; sums of its rows by row number

    Elements received: `(n-1)/n * R*H'` each way. Saved for backward: the rows' places and which are owned.

    Args:
        tensor: (M/xy, H/z) on face z (y and z swapped on face y).
        rows: (R,) row numbers within the plane, the same on every rank of it; -1 gives a row of zeros. R divides by y
            and by z, so that the result can go on to either face.

    Returns:
        (R/y, H/z) on face z.

    Raises:
        ValueError: R does not divide, or (on the CPU) there is no such row.
    """
    check_face(face)
    if tensor.dim() == 3:
        return in_batch(lambda one: select(one, rows, cube, face), tensor, "select")
    check_matrix(tensor, "select")
    axis = cube.axis(other(face))
    rows, outside = check_numbers("selected rows", rows, tensor.shape[0] * axis.size, cube)
    check_origin(tensor, face, cube, "select")
    return spoil(_Selection.apply(tensor, rows, axis), outside, cube, face)


@out_of_graphs
def local_rows(values: Tensor, cube: Cube, face: Face = "y") -> Tensor:
    """Of one value for each row of a plane (labels, positions), those of this rank's rows on `face`.

    Raises:
        ValueError: their number does not divide by the axis that splits the rows.
    """
    check_face(face)
    axis = cube.axis(other(face))
    if values.dim() == 0:
        raise ValueError(f"values for the rows of a plane need a dim for the rows. Got the single value {values}.")
    if values.shape[0] % axis.size:
        raise ValueError(
            f"values for the rows of a plane must divide by {axis.name}={axis.size}. Got {values.shape[0]}."
        )
    return values.chunk(axis.size)[axis.index]


def check_numbers(what: str, numbers: Tensor, below: int, cube: Cube, lowest: int = -1) -> tuple[Tensor, Tensor | None]:
    """The `numbers`, those of a plane, and which of them (R,) are outside of lowest..below-1; None: none.

    Ranks of other planes have other numbers, so they would wait for a rank that raises alone. Where there are others,
    and a backward pass may follow, all raise at its end (`UseAgreement.tell`). Until then such numbers are `lowest`,
    and what is made of them is to be nan (`spoil`), so that no loss takes it for good.

    Raises:
        ValueError: they are not spread over either face or no integers; or, on one plane or without gradients, some are
            outside.
    """
    y, z = cube.axis("y").size, cube.axis("z").size
    if numbers.dim() != 1 or numbers.shape[0] % y or numbers.shape[0] % z:
        enough = -(-numbers.numel() // math.lcm(y, z)) * math.lcm(y, z)
        fill = f" Fill up to {enough} with -1 (labels with -100)." if lowest < 0 and numbers.dim() == 1 else ""
        raise ValueError(
            f"{what} must be one-dimensional, those of a plane, and their number divide by y={y} and z={z}. Got shape "
            f"{tuple(numbers.shape)}.{fill}"
        )
    if numbers.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{what} must be of type int64 or int32. Got {numbers.dtype}.")
    if not is_host_readable(numbers) or not numbers.numel():  # the loader's word is taken
        return numbers, None
    least, most = (int(bound) for bound in numbers.aminmax())
    if least >= lowest and most < below:
        return numbers, None
    wrong = f"{what} must be at least {lowest} and below {below}. Got values from {least} to {most}."
    raise_on_every_rank(wrong, cube, alike=cube.shape.planes == 1, a_pass_follows=torch.is_grad_enabled())
    outside = (numbers < lowest) | (numbers >= below)
    return numbers.masked_fill(outside, lowest), outside


def raise_on_every_rank(wrong: str, cube: Cube, *, alike: bool, a_pass_follows: bool) -> None:
    """Raises ValueError with what is `wrong` with values of this rank; where others have other values, and so cannot
    know of it, the next backward pass raises it, on all of them (`UseAgreement.tell`). What is made of such values
    until then is to be nan.

    Args:
        alike: whether all ranks have these values, and raise it now.
        a_pass_follows: whether a backward pass may follow. Where none does, this rank raises, maybe alone.
    """
    if alike or cube.ledger.agreement is None or not a_pass_follows:
        raise ValueError(wrong)
    cube.ledger.agreement.tell(wrong)


def spoil(rows: Tensor, outside: Tensor | None, cube: Cube, face: Face) -> Tensor:
    """The rows (R/n, H') on `face` that were made of numbers (R,) of a plane: nan where these are `outside`."""
    return rows if outside is None else rows.masked_fill(local_rows(outside, cube, face).unsqueeze(1), math.nan)


class _Selection(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, axis: Axis) -> Tensor:
        local_rows, owned = places_in(rows, table.shape[0] * axis.index, table.shape[0])
        ctx.save_for_backward(local_rows, owned)
        ctx.axis, ctx.table_rows = axis, table.shape[0]
        ctx.result_face, ctx.made = "z" if axis.name == "y" else "y", "select"
        return reduce_scatter(chosen_rows(table, local_rows, owned, table.dtype), axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        local_rows, owned = ctx.saved_tensors
        sums = sums_by_row(all_gather(gradient, ctx.axis).wait(), local_rows, owned, ctx.table_rows)
        return as_type(sums, gradient.dtype), None, None


@out_of_graphs
def sum_rows(tensor: Tensor, owner: Tensor, slots: int, cube: Cube, face: Face = "z") -> Tensor:
    """Sums of a plane's rows by slot, as a matrix of `slots` rows on the same face: the adjoint of `select`.

        forward  reduce-scatter over the axis that splits the rows of [sums of own rows by slot]    -> (slots/n, H')
        backward dY' = all-gather dY over the axis; of each own row that of its slot

    Elements received: `(n-1)/n * slots*H'` each way, forward in fp32 at least. Saved for backward: `owner` of own rows.

    Args:
        tensor: (M/xy, H/z) on face z (y and z swapped on face y).
        owner: (M/x,) which slot each row of the plane belongs to, the same on every rank of it; -1: none.
        slots: C, divides by y and by z.

    Returns:
        (C/y, H/z) on face z, in fp32 at least.

    Raises:
        ValueError: slots that do not divide, rows that are not those of the plane, or (on the CPU) an owner that is no
            slot.
    """
    check_face(face)
    if tensor.dim() == 3:
        return in_batch(lambda one: sum_rows(one, owner, slots, cube, face), tensor, "sum_rows")
    check_matrix(tensor, "sum_rows")
    check_origin(tensor, face, cube, "sum_rows")
    for axis in ("y", "z"):
        if slots % cube.axis(axis).size:
            raise ValueError(f"slots must divide by {axis}={cube.axis(axis).size}. Got {slots}.")
    owner, outside = check_numbers("owner", owner, slots, cube)
    own = local_rows(owner, cube, face)
    if own.shape != tensor.shape[:1]:
        rows = tensor.shape[0] * cube.axis(other(face)).size
        raise ValueError(
            f"owner must name a slot, or -1, for each row of the plane, {rows} of them. Got shape {tuple(owner.shape)}."
        )
    sums: Tensor = _SumRows.apply(tensor, own, slots, cube.axis(other(face)))
    return sums if outside is None else sums * math.nan


class _SumRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, own: Tensor, slots: int, axis: Axis) -> Tensor:
        ctx.save_for_backward(own)
        ctx.axis, ctx.dtype = axis, tensor.dtype
        ctx.result_face, ctx.made = "z" if axis.name == "y" else "y", "sum_rows"
        return reduce_scatter(sums_by_row(tensor, own.clamp(min=0), own >= 0, slots), axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        whole = all_gather(gradient, ctx.axis).wait()
        return chosen_rows(whole, own.clamp(min=0), own >= 0, ctx.dtype), None, None, None


@out_of_graphs
def spread_rows(tensor: Tensor, owner: Tensor, cube: Cube, face: Face = "z") -> Tensor:
    """For each row of a plane the row of a smaller matrix that it belongs to: the adjoint of `sum_rows`.

        forward  all-gather over the axis that splits the rows; of each own row that of its slot    -> (M/xy, H')
        backward reduce-scatter over the axis of [sums of own rows by slot], in fp32 at least

    Elements received: `(n-1)/n * C*H'` each way. Saved for backward: `owner` of own rows.

    Args:
        tensor: (C/y, H/z) on face z (y and z swapped on face y), as `select` gives it.
        owner: (M/x,) which slot each row of the plane belongs to, the same on every rank of it; -1: none.

    Returns:
        (M/xy, H/z) on face z; 0 where there is no owner.

    Raises:
        ValueError: owners that do not spread over both faces, or (on the CPU) one that is no slot.
    """
    check_face(face)
    if tensor.dim() == 3:
        return in_batch(lambda one: spread_rows(one, owner, cube, face), tensor, "spread_rows")
    check_matrix(tensor, "spread_rows")
    check_origin(tensor, face, cube, "spread_rows")
    axis = cube.axis(other(face))
    owner, outside = check_numbers("owner", owner, tensor.shape[0] * axis.size, cube)
    return spoil(_SpreadRows.apply(tensor, local_rows(owner, cube, face), axis), outside, cube, face)


class _SpreadRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, own: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(own)
        ctx.axis, ctx.slots = axis, tensor.shape[0] * axis.size
        ctx.result_face, ctx.made = "z" if axis.name == "y" else "y", "spread_rows"
        return chosen_rows(all_gather(tensor, axis).wait(), own.clamp(min=0), own >= 0, tensor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (own,) = ctx.saved_tensors
        sums = reduce_scatter(sums_by_row(gradient, own.clamp(min=0), own >= 0, ctx.slots), ctx.axis).wait()
        return as_type(sums, gradient.dtype), None, None


@out_of_graphs
def unfold_rows(tensor: Tensor, positions: Tensor, kernel: int, cube: Cube, face: Face = "z") -> Tensor:
    """Each row of a plane with its neighbours in its sequence beside it: `Linear3D` of them is a convolution along
    sequences, padded with zeros, whose weight is that of `nn.Conv1d`, (N, H, k), with its last two dims as one.

        forward  all-gather over the axis that splits the rows of the k // 2 first and last ones of each rank
        backward the same of what gradients add up to for rows of others, in fp32 at least until they travel

    Elements received: `(n-1) * 2 (k // 2) * H'` each way. Saved for backward: which neighbours there are.

    Args:
        tensor: (M/xy, H/z) on face z (y and z swapped on face y).
        positions: (M/x,) the place of each row of the plane within its sequence, from 0 on, the same on every rank of
            it; unused rows are sequences of one.
        kernel: k, odd: rows that one looks at, itself and half of the others to each side.

    Returns:
        (M/xy, k*H/z) on face z: of each column the k values one after another, 0 where the sequence ends before.

    Raises:
        ValueError: a kernel that is not odd, positions that are not those of the plane, ranks with fewer rows than
            others look at, or (on the CPU) positions that cannot be.
    """
    check_face(face)
    if tensor.dim() == 3:
        return in_batch(lambda one: unfold_rows(one, positions, kernel, cube, face), tensor, "unfold_rows")
    check_matrix(tensor, "unfold_rows")
    check_origin(tensor, face, cube, "unfold_rows")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, so that a row has as many neighbours on both sides. Got {kernel}.")
    axis, half = cube.axis(other(face)), kernel // 2
    if axis.size > 1 and tensor.shape[0] < half:
        raise ValueError(
            f"unfold_rows with kernel={kernel} needs at least {half} rows on each rank. Got {tensor.shape[0]}. Take "
            f"larger micro-batches, or a smaller {axis.name}."
        )
    plane = tensor.shape[0] * axis.size
    positions, outside = check_numbers("positions", positions, max(1, plane), cube, lowest=0)
    if positions.shape[0] != plane:
        raise ValueError(
            f"positions must name the place of each row of the plane, {plane} of them. Got shape "
            f"{tuple(positions.shape)}."
        )
    # A row has a neighbour d rows before where it is at least the d-th of its sequence, and one behind where that is.
    there = [positions >= -d if d < 0 else positions.roll(-d) >= d for d in range(-half, half + 1)]
    valid = local_rows(torch.stack(there, 1), cube, face)
    return spoil(_UnfoldRows.apply(tensor, valid, axis), outside, cube, face)


class _UnfoldRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, valid: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(valid)
        ctx.axis, ctx.half = axis, valid.shape[1] // 2
        ctx.result_face, ctx.made = "z" if axis.name == "y" else "y", "unfold_rows"
        if not len(tensor):
            return tensor.new_zeros(0, tensor.shape[1] * valid.shape[1])
        before, after = _of_neighbours(tensor, ctx.half, axis)
        windows = torch.cat([before, tensor, after]).unfold(0, valid.shape[1], 1)  # (M', H', k)
        result = tensor.new_empty(windows.shape)
        torch.where(valid.unsqueeze(1), windows, tensor.new_zeros(()), out=result)
        return result.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (valid,) = ctx.saved_tensors
        rows, kernel = valid.shape
        half, parts = ctx.half, gradient.unflatten(1, (-1, kernel))
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums = gradient.new_zeros(rows + 2 * half, parts.shape[1], dtype=wide)
        for number in range(kernel):
            sums[number : number + rows] += parts[:, :, number].where(valid[:, number : number + 1], 0)
        own = sums[half : half + rows]
        # What lies before this rank's rows is a sum for the last ones of the rank before, and so on.
        here = as_type(torch.cat([sums[:half], sums[rows + half :]]), gradient.dtype)
        before, after = _of_neighbours(here, half, ctx.axis)
        if half and ctx.axis.size > 1:
            own[:half] += before
            own[rows - half :] += after
        return as_type(own, gradient.dtype), None, None


def _of_neighbours(tensor: Tensor, half: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """The last rows of the member before and the first ones of the one behind, (half, H') each; 0 where there is
    none."""
    none = tensor.new_zeros(half, tensor.shape[1])
    if axis.size == 1 or half == 0:
        return none, none
    edges = torch.cat([tensor[:half], tensor[len(tensor) - half :]])
    members = all_gather(edges, axis).wait().view(axis.size, 2, half, -1)
    before = members[axis.index - 1, 1] if axis.index else none
    after = members[axis.index + 1, 0] if axis.index + 1 < axis.size else none
    return before, after


def places_in(rows: Tensor, first: int, table_rows: int) -> tuple[Tensor, Tensor]:
    """(R,) each: where rows of the whole table lie in a part of it, T' rows from `first` on, and whether they do. Those
    that do not have some place of it, if it has any."""
    if table_rows == 0:
        return torch.zeros_like(rows), torch.zeros_like(rows, dtype=torch.bool)
    own = rows - first if first else rows
    places = own.clamp(0, table_rows - 1)
    return places, places == own


def chosen_rows(table: Tensor, local_rows: Tensor, owned: Tensor, dtype: torch.dtype) -> Tensor:
    """(R, H) of this type: own rows where owned, else 0."""
    if table.shape[0] == 0:  # a chunk of a vocabulary smaller than its axis
        return table.new_zeros(local_rows.shape[0], table.shape[1], dtype=dtype)
    found, owned = table.index_select(0, local_rows), owned.unsqueeze(1)
    if found.dtype == dtype:
        return found.mul_(owned)
    return torch.mul(found, owned, out=torch.empty_like(found, dtype=dtype))  # rounded as it is written


def sums_by_row(gradient: Tensor, local_rows: Tensor, owned: Tensor, table_rows: int) -> Tensor:
    """(T', H): what the rows (R, H) of `gradient` add up to for each row of the table, in fp32 at least."""
    # A frequent token's row is a sum of thousands: in bf16 that would stop growing after some hundred.
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return add_by_row(gradient.new_zeros(table_rows, gradient.shape[1], dtype=wide), gradient, local_rows, owned)


def add_by_row(table: Tensor, gradient: Tensor, local_rows: Tensor, owned: Tensor) -> Tensor:
    """The table (T', H), of fp32 at least, to which the rows (R, H) of `gradient` are added, in place."""
    if len(table) == 0:
        return table
    own = torch.mul(gradient, owned.unsqueeze(1), out=torch.empty_like(gradient, dtype=table.dtype))
    return table.index_add_(0, local_rows, own)


@out_of_graphs
def redistribute(tensor: Tensor, cube: Cube, to: Face) -> Tensor:
    """The same matrix on the other face, by one all-to-all inside the plane.

        from face y (R/xz, H/y)  to face z (R/xy, H/z), or back; the backward is the turn back

    Elements received: the part of the new shard that this rank did not hold, at most `R*H/xyz`.

    Raises:
        ValueError: no matrix, or rows of the plane or columns that do not divide by both y and z.
    """
    check_face(to)
    if tensor.dim() == 3:
        return in_batch(lambda one: redistribute(one, cube, to), tensor, "turn")
    if tensor.dim() != 2:
        raise ValueError(f"only a matrix (rows, columns) can change its face. Got shape {tuple(tensor.shape)}.")
    check_origin(tensor, other(to), cube, f'turn(to="{to}")')
    return _Turn.apply(tensor, cube, to)


class _Turn(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cube: Cube, to: Face) -> Tensor:
        ctx.cube, ctx.to = cube, to
        ctx.result_face, ctx.made = to, "turn"
        # Not a view, which could not be changed in place, as the result on other cubes can.
        return tensor.clone() if cube.plane.size == 1 else _turned(tensor, cube, to)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.cube.plane.size == 1:
            return gradient, None, None
        return _turned(gradient, ctx.cube, other(ctx.to)), None, None


def _turned(tensor: Tensor, cube: Cube, to: Face) -> Tensor:
    before, after = other(to), to
    # Of the plane's matrix: `before` splits its columns over axis `before` and its rows over the other one.
    rows, columns = tensor.shape[0] * cube.axis(after).size, tensor.shape[1] * cube.axis(before).size
    _check_turn(rows, columns, cube)
    members = [cube.shape.coordinate(rank) for rank in cube.plane.ranks]
    mine = cube.coordinate
    held, wanted = _block(before, mine, rows, columns, cube), _block(after, mine, rows, columns, cube)
    sent = [held.overlap(_block(after, member, rows, columns, cube)) for member in members]
    received = [wanted.overlap(_block(before, member, rows, columns, cube)) for member in members]
    blocks = torch.cat([tensor[part.within(held)].reshape(-1) for part in sent])
    flat = all_to_all(blocks, [p.size for p in sent], [p.size for p in received], cube.plane).wait()
    result = tensor.new_empty(wanted.bottom - wanted.top, wanted.right - wanted.left)
    for part, values in zip(received, flat.split([p.size for p in received]), strict=True):
        result[part.within(wanted)] = values.view(part.bottom - part.top, part.right - part.left)
    return result


def _check_turn(rows: int, columns: int, cube: Cube) -> None:
    for axis in ("y", "z"):
        size = cube.axis(axis).size
        if rows % size or columns % size:
            raise ValueError(
                f"to change the face, a plane's rows and columns must divide by {axis}={size}. Got ({rows}, {columns})."
            )


class _Block:
    """A rectangle of the plane's matrix. Empty where its bounds cross."""

    def __init__(self, top: int, bottom: int, left: int, right: int) -> None:
        self.top, self.bottom, self.left, self.right = top, max(top, bottom), left, max(left, right)

    @property
    def size(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def overlap(self, block: _Block) -> _Block:
        return _Block(
            max(self.top, block.top),
            min(self.bottom, block.bottom),
            max(self.left, block.left),
            min(self.right, block.right),
        )

    def within(self, outer: _Block) -> tuple[slice, slice]:
        return (
            slice(self.top - outer.top, self.bottom - outer.top),
            slice(self.left - outer.left, self.right - outer.left),
        )


def _block(face: Face, place: Any, rows: int, columns: int, cube: Cube) -> _Block:
    """What the rank at `place` holds of the plane's matrix on `face`."""
    row_axis, column_axis = other(face), face
    high, wide = rows // cube.axis(row_axis).size, columns // cube.axis(column_axis).size
    i, j = place[row_axis], place[column_axis]
    return _Block(i * high, (i + 1) * high, j * wide, (j + 1) * wide)

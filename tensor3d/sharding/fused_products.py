"""Products in one operator with a collective before or behind them, by PyTorch's symmetric memory (asynchronous tensor
parallelism: Wang et al. 2023, doi:10.1145/3567955.3567959, §4; PyTorch's operators of the namespace `symm_mem`).

A product on the cube is a chain: all-gather over one axis, multiply, reduce-scatter over another. The operators cut the
product into as many parts as the axis has members, and multiply one while the next one travels: so a single product
hides what it waits for, where `ExecutionPolicy.overlap` needs other work to be there. One of the two collectives can
be in the operator; the other one stays as it is.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from tensor3d.distributed.collectives import Axis, CommHandle, all_gather, counted, open_group, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.ops.products import product
from tensor3d.torch_private import symmetric_memory_operators

Fused = Literal["gather", "scatter"]
"""Which collective is in one operator with the product."""


def fused_with_product(
    cube: Cube, *, gathered_over: Axis, columns: int, summed_over: Axis, results: int
) -> Fused | None:
    """Which collective of a chain goes with its product: the one by which a rank receives more. None: neither.

    Of R rows of a rank's shard, g members of the first axis and s of the second, these are `(g-1) R columns/s` elements
    and `(s-1) R results/s`: the logical sizes of the weight decide, which are the same on every rank, and no blocks.

    Args:
        columns: of the logical matrix whose rows are gathered.
        results: columns of the logical result.
    """
    if not cube.speed.symmetric_memory or cube.traffic.is_dry:
        return None
    gathers, sums = (gathered_over.size - 1) * columns, (summed_over.size - 1) * results
    if gathers == sums == 0:
        return None
    return "gather" if gathers >= sums else "scatter"


def fused_product(
    fused: Fused, a: Tensor, b: Tensor, gathered_over: Axis, summed_over: Axis, *, keep: bool
) -> tuple[CommHandle, Tensor]:
    """`reduce-scatter of (all-gather of a) @ b`.

    Args:
        a: (R, K), to be gathered in the operator; for "scatter" (gR, K), gathered before.
        b: (K, N), transposed or not.
        keep: whether the gathered matrix is needed.

    Returns:
        (gR/s, N), and the gathered matrix (gR, K); `a` may be in its place if it is not to be kept.
    """
    if fused == "gather":
        gathered, parts = all_gather_product(a, b, gathered_over, keep=keep)
        return reduce_scatter(parts, summed_over), a if gathered is None else gathered
    return CommHandle(product_reduce_scatter(a, b, summed_over)), a


def all_gather_product(a: Tensor, b: Tensor, axis: Axis, *, keep: bool) -> tuple[Tensor | None, Tensor]:
    """(R, K) on each of g members -> (gR, K), if it is to be kept, and (gR, K) @ b."""
    if a.numel() == 0:  # on all members alike; no memory can be shared for it
        gathered = all_gather(a, axis).wait()
        return gathered, product(gathered, b)
    a, group = a.contiguous(), open_group(axis)
    assert group is not None, "an axis of one member has nothing to gather"
    received = (axis.size - 1) * a.numel() * a.element_size()
    with counted(axis, "all-gather", received, on_device=a.is_cuda):
        gather = symmetric_memory_operators().fused_all_gather_matmul
        gathered, (result,) = gather(a, [b], 0, group.group_name, return_A=keep)
    return gathered, result


def product_reduce_scatter(a: Tensor, b: Tensor, axis: Axis) -> Tensor:
    """`a @ b`, summed over s members, of whose rows member i has the i-th of s equal slices: (R, K) -> (R/s, N)."""
    rows, columns, group = a.shape[0], b.shape[1], open_group(axis)
    assert rows % axis.size == 0, f"{rows} rows cannot be scattered over {axis.name}={axis.size}"
    if rows * columns == 0:
        return reduce_scatter(product(a, b), axis).wait()
    assert group is not None, "an axis of one member has nothing to sum"
    received = (axis.size - 1) * (rows // axis.size) * columns * a.element_size()
    with counted(axis, "reduce-scatter", received, on_device=a.is_cuda):
        result: Tensor = symmetric_memory_operators().fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)
    return result

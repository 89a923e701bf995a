"""Heads with a handful of outputs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle, all_gather, all_reduce
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.ops.as_type import as_type, without_autocast
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.sharding.activation_layout import Face, check_divides, check_face, in_batch, lies
from tensor3d.sharding.layout_checks import check_matrix, check_origin
from tensor3d.sharding.param_layout import block, check_layout, constant, copies, local, narrow, normal

# --- The likeliest entries of a vocabulary whose slices lie on different ranks ----------------------------------------
#
# R' rows of this rank, V vocabulary, V' its slice here, k entries asked for, n members of the axis that splits it


@out_of_graphs
def vocab_topk(logits: Tensor, k: int, vocab: int, cube: Cube, face: Face = "y") -> tuple[Tensor, Tensor]:
    """The k entries with the largest logits of each row, largest first, and their log-probabilities. No gradient.

    Each member sends its own k and the logarithm of the sum of its exponentials; of equal logits the lower entry comes
    first, on any cube. Elements received: (n-1) (2k + 1) a row, of which k are int64.

    Args:
        logits: (R', V') on `face`, as a projection to the vocabulary returns them (slices are DTensor's chunks).
        k: 1 to V.

    Returns:
        Entries (R', k) int64 and log-probabilities (R', k), fp32 at least; the same on all members of the axis.

    Raises:
        ValueError: a k that cannot be, or logits of another width.
    """
    check_face(face)
    axis = cube.axis(face)
    first, last = chunk_bounds(vocab, axis.size, axis.index)
    if not 1 <= k <= vocab:
        raise ValueError(f"k must lie between 1 and the vocabulary of {vocab}. Got {k}.")
    check_matrix(logits, "vocab_topk")
    if logits.shape[1] != last - first:
        raise ValueError(
            f"vocab_topk over {vocab} entries on face {face} needs logits (rows, {last - first}). Got "
            f"{tuple(logits.shape)}."
        )
    check_origin(logits, face, cube, "vocab_topk")
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    values, places = _largest(wide, min(k, wide.shape[1]))
    missing = k - values.shape[1]  # a slice may be smaller than k
    values, places = F.pad(values, (0, missing), value=-math.inf), F.pad(places + first, (0, missing))
    log_sums = wide.logsumexp(1, keepdim=True) if wide.shape[1] else wide.new_full((wide.shape[0], 1), -math.inf)
    parts = all_gather(torch.cat([values, log_sums], 1), axis).wait().chunk(axis.size)
    all_places = torch.cat(all_gather(places, axis).wait().chunk(axis.size), 1)
    log_sum = torch.cat([part[:, k:] for part in parts], 1).logsumexp(1, keepdim=True)
    # Slices come in the order of the vocabulary, so that again the lower entry is the first of equal ones.
    best, order = torch.cat([part[:, :k] for part in parts], 1).sort(dim=1, descending=True, stable=True)
    return all_places.gather(1, order[:, :k]), best[:, :k] - log_sum


def _largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row with their places, of equal ones the first. (A stable sort of whole rows gives the
    same, many times slower; `topk` may take any of equal ones.)"""
    if k == 0:
        return rows[:, :0], rows.new_zeros(rows.shape[0], 0, dtype=torch.int64)
    ranked = torch.where(rows.isnan(), math.inf, rows)
    least = ranked.topk(k).values[:, -1:]
    above, equal = ranked > least, ranked == least
    equal &= equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)
    places = (above | equal).nonzero()[:, 1].view(-1, k)
    values, order = rows.gather(1, places).sort(dim=1, descending=True, stable=True)
    return values, places.gather(1, order)


# --- Heads with a handful of outputs ----------------------------------------------------------------------------------


class SmallHead3D(nn.Module):
    """`x @ weight.T + bias` for few outputs (next sentence, classes, answer spans): no output columns are split.

    Computed in fp32 at least: the outputs are few, and what is made of them is a loss or an answer.

    Each rank multiplies its own columns, and one all-reduce over the columns axis gives every member the same logits;
    the rows stay where they are. Elements received a row: `2(n-1)/n*C` forward, none backward.

    Args:
        in_features: K, divides by the face's axis.
        classes: C.
        face: the face of the input.

    Raises:
        ValueError: an unknown face, or a K that does not divide.
    """

    def __init__(
        self, in_features: int, classes: int, cube: Cube, face: Face = "y", bias: bool = True, *, std: float = 0.02
    ) -> None:
        super().__init__()
        check_face(face)
        check_divides("in_features", in_features, cube, face)
        self.in_features, self.classes, self.cube, self.face = in_features, classes, cube, face
        self.weight = normal((classes, in_features), narrow(face), cube, std)
        self.bias = constant((classes,), copies(face), cube, 0.0) if bias else None

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(R', K/face) to logits (R', C), fp32 at least, the same on all members of the face's axis."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "SmallHead3D")
        check_matrix(x, "SmallHead3D")
        columns = self.in_features // self.cube.axis(self.face).size
        if x.shape[1] != columns:
            raise ValueError(
                f"SmallHead3D on face {self.face} needs the local shape (rows, {columns}). Got {tuple(x.shape)}."
            )
        check_origin(x, self.face, self.cube, f"SmallHead3D ({self.in_features} -> {self.classes})")
        for parameter, layout in ((self.weight, narrow(self.face)), (self.bias, copies(self.face))):
            if parameter is not None:
                check_layout(parameter, layout, self.cube)
                self.cube.over(*layout.sum_over)  # its process groups must exist before a backward pass needs them
        return _SmallHead.apply(x, self.weight, self.bias, self.cube, self.face)

    def extra_repr(self) -> str:
        reads = lies(self.in_features, self.face, self.cube)
        return f"{self.in_features} -> {self.classes}, {reads} -> copies over {self.face}, {block(self.weight)}"


class _SmallHead(Function):
    """Saved for backward: the input, in the type of the logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, cube: Cube, face: Face) -> Tensor:
        cube.ledger.forget_failed_passes()
        axis, wide = cube.axis(face), as_type(x, torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device):
            product = wide @ as_type(local(weight), wide.dtype).t()
        logits = all_reduce(product, axis).wait()
        if bias is not None:
            logits = logits + as_type(local(bias), wide.dtype)
        ctx.save_for_backward(wide, weight)
        ctx.weight, ctx.bias, ctx.cube, ctx.face, ctx.dtype = weight, bias, cube, face, x.dtype
        ctx.result_face, ctx.made = None, "a sum over ranks"  # copies, which lie on no face
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Each copy of the logits has the gradient of the one value that they are: nothing is summed."""
        (wide, weight), cube = ctx.saved_tensors, ctx.cube
        needs_weight, needs_bias = asked_for(ctx, ctx.weight, ctx.bias)
        with without_autocast(wide.device):
            if needs_bias:
                db = as_type(gradient.sum(0), ctx.bias.dtype)
                cube.ledger.accumulate_grad(ctx.bias, CommHandle(db), cube.over(*copies(ctx.face).sum_over))
            if needs_weight:
                dw = as_type(gradient.t() @ wide, ctx.weight.dtype)
                cube.ledger.accumulate_grad(ctx.weight, CommHandle(dw), cube.over(*narrow(ctx.face).sum_over))
            if not ctx.needs_input_grad[0]:
                return None, None, None, None, None
            return as_type(gradient @ as_type(local(weight), wide.dtype), ctx.dtype), None, None, None, None

"""Cross-entropy over a vocabulary whose slices lie on different ranks.

R' rows of this rank, V vocabulary, V' its slice here, n members of the axis that splits it
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tensor3d.distributed.collectives import gather_statistics
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.layers.norm_kernels import widened
from tensor3d.ops.as_type import as_type
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.row_chunks import chunk_rows, is_host_readable, iter_row_chunks
from tensor3d.sharding.activation_layout import Face, check_face, other
from tensor3d.sharding.layout_checks import check_floating_point, check_origin
from tensor3d.sharding.redistribute import places_in, raise_on_every_rank

IGNORED = -100
"""A label that counts for nothing."""


@out_of_graphs
def cross_entropy(logits: Tensor, labels: Tensor, vocab: int, cube: Cube, face: Face = "y") -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each row's label, and the likeliest entry: no logit leaves its rank.

    Four numbers a row cross the axis: the slice's largest logit, the sum of its exponentials, the label's logit and the
    place of the largest. Elements received: 4(n-1) a row forward, none backward. Saved: the logits and two numbers a
    row.

    Args:
        logits: (R', V') on `face`, as a projection to the vocabulary returns them (slices are DTensor's chunks).
        labels: (R',) entries of the vocabulary, or -100 for rows that do not count.
        vocab: V.

    Returns:
        losses (R',), 0 where the label is -100, and predictions (R',) int64; both the same on all members of the axis.
        Sum the losses over rows with `all_reduce_replicated(..., cube.over("data", "x", other(face)))`.

    Raises:
        ValueError: local shapes that do not fit, or (on the CPU) a label that is none; with gradients, where other
            ranks have other rows, at the end of the backward pass. Until then, and on a device, its loss is nan.
    """
    check_face(face)
    axis = cube.axis(face)
    first, last = chunk_bounds(vocab, axis.size, axis.index)
    if logits.dim() != 2 or logits.shape[1] != last - first or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"cross-entropy over {vocab} entries on face {face} needs logits (rows, {last - first}) and labels (rows,)"
            f". Got {tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    check_origin(logits, face, cube, "cross_entropy")
    check_floating_point(logits, "cross_entropy")
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be of type int64 or int32. Got {labels.dtype}. Take labels.long().")
    if is_host_readable(labels):
        right = (labels == labels.clamp(0, vocab - 1)) | (labels == IGNORED)
        if not right.all():
            wrong = int(labels[~right][0])
            text = f"labels must be at least 0 and below {vocab}, or {IGNORED}. Got {wrong}."
            alike = cube.shape.planes * cube.axis(other(face)).size == 1
            raise_on_every_rank(
                text, cube, alike=alike, a_pass_follows=torch.is_grad_enabled() and logits.requires_grad
            )
    return _CrossEntropy.apply(logits, labels, vocab, cube, face)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int, cube: Cube, face: Face) -> tuple[Tensor, Tensor]:
        axis = cube.axis(face)
        first, last = chunk_bounds(vocab, axis.size, axis.index)
        if axis.size == 1 and _is_whole(logits, cube):
            target, owned = labels.clamp(0, vocab - 1), None
            found = cube.regions(_losses_alone, logits, target.unsqueeze(1), labels.unsqueeze(1))
        else:
            target, owned = places_in(labels, first, last - first)
            matrices = (logits, target.unsqueeze(1), owned.unsqueeze(1))
            parts = [matrices] if _is_whole(logits, cube) else iter_row_chunks(*matrices)
            of_rows = [cube.regions(_row_statistics, *part) for part in parts]
            statistics = gather_statistics(of_rows[0] if len(of_rows) == 1 else torch.cat(of_rows), axis)
            found = cube.regions(_combined, statistics, labels.unsqueeze(1), vocab)
        losses, place, log_sum, ignored = found
        ctx.save_for_backward(logits, log_sum, target, owned, ignored)
        ctx.cube = cube
        ctx.result_face, ctx.made = None, "cross_entropy"  # one loss a row, on no face
        ctx.mark_non_differentiable(place)
        ctx.set_materialize_grads(False)  # of the places there is none
        return losses, place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None, None]:
        if gradient is None:
            return None, None, None, None, None
        logits, log_sum, target, owned, ignored = ctx.saved_tensors
        regions, gradient = ctx.cube.regions, gradient.masked_fill(ignored, 0)
        if ctx.cube.speed.compile:
            every = [None if each is None else each.unsqueeze(1) for each in (log_sum, target, owned, gradient)]
            return regions(_gradient_compiled, logits, *every), None, None, None, None
        wide = log_sum.dtype
        taken = regions.number(-1.0, wide).expand_as(log_sum) if owned is None else -owned.to(wide)
        columns = [each.unsqueeze(1) for each in (log_sum, target, taken, gradient)]
        if _is_whole(logits, ctx.cube):
            return regions(_gradient, logits, *columns), None, None, None, None
        result = torch.empty_like(logits)
        for place, *part in iter_row_chunks(result, logits, *columns):
            place.copy_(regions(_gradient, *part))
        return result, None, None, None, None


def _is_whole(logits: Tensor, cube: Cube) -> bool:
    """Whether all rows are taken at once: those of a device, and, if few, of a CPU; and where a compiled region lets
    nothing come and go."""
    return cube.speed.compile or logits.device.type != "cpu" or logits.shape[0] <= chunk_rows(logits.shape[1])


# --- regions: rows of a matrix each, (R', V') or (R', 1) ------------------------------------------------------------


def _row_statistics(logits: Tensor, target: Tensor, owned: Tensor) -> Tensor:
    """(R', 4): largest, sum of exponentials below it, the label's logit (0 on other slices), place of the largest."""
    if logits.shape[1] == 0:  # an axis larger than the vocabulary leaves empty slices
        empty = widened(logits).new_tensor([-math.inf, 0.0, 0.0, 0.0])
        return empty.expand(logits.shape[0], 4)
    largest, place = logits.max(1)
    largest, label_logits = widened(largest), widened(logits.gather(1, target)[:, 0])
    exponentials = _exponentials(logits, _finite(largest))
    # Chosen, not multiplied: where no label is owned, the entry looked at may be -inf.
    label_logits = torch.where(owned[:, 0], label_logits, 0)
    return torch.stack([largest, exponentials, label_logits, place.to(largest.dtype)], 1)


def _exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    """(R',): the sums of a row's exponentials below its largest, which is wide: so is the difference."""
    return (_minuend(logits) - largest.unsqueeze(1)).exp_().sum(1)


def _minuend(logits: Tensor) -> Tensor:
    """A device widens what it subtracts from as it reads it; a CPU makes a copy, and in more memory than one needs."""
    return widened(logits) if logits.device.type == "cpu" else logits


def _combined(statistics: Tensor, labels: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All members' statistics (n, R', 4) to losses, predictions, the logarithms of the sums, and which rows do not
    count, (R',) each."""
    largest, exponentials, label_logits, places = statistics.unbind(-1)
    top, winner = largest.max(0)
    log_sum = top + (exponentials * (largest - _finite(top)).exp()).sum(0).log()
    # The place inside the winner's slice; the slices before it are all of full size.
    place = places.gather(0, winner.unsqueeze(0))[0].long() + winner * -(-vocab // statistics.shape[0])
    losses, ignored = _losses(log_sum, label_logits.sum(0), labels, labels.clamp(0, vocab - 1) != labels)
    return losses, place, log_sum, ignored


def _losses_alone(logits: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same at once, where one member has all columns, and so owns every label that is one. Where all entries of a
    row are -inf, its loss is nan by itself."""
    largest, place = logits.max(1)
    largest = widened(largest)
    log_sum = largest + _exponentials(logits, largest).log()
    losses, ignored = _losses(log_sum, logits.gather(1, target)[:, 0], labels, target != labels)
    return losses, place, log_sum, ignored


def _losses(log_sum: Tensor, label_logit: Tensor, labels: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """And which rows do not count. `missing`: which labels are no entries of the vocabulary."""
    ignored = labels[:, 0] == IGNORED
    losses = (log_sum - label_logit).masked_fill(missing[:, 0], math.nan)
    return losses.masked_fill(ignored, 0), ignored


def _finite(largest: Tensor) -> Tensor:
    """What the exponentials of a row are taken below: of a slice in which every entry is -inf, all of them are 0."""
    return largest.clamp_min(torch.finfo(largest.dtype).min)


def _gradient(logits: Tensor, log_sum: Tensor, target: Tensor, taken: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of logits: probabilities, less 1 at the own label (`taken`: -1 or 0), times the row's `gradient`."""
    result = (_minuend(logits) - log_sum).exp_()
    if result.shape[1]:
        result.scatter_add_(1, target, taken)
    if result.dtype == logits.dtype or logits.device.type == "cpu":
        return as_type(result.mul_(gradient), logits.dtype)
    return torch.mul(result, gradient, out=torch.empty_like(logits))  # which a device rounds as it writes


def _gradient_compiled(
    logits: Tensor, log_sum: Tensor, target: Tensor, owned: Tensor | None, gradient: Tensor
) -> Tensor:
    """The same in one pass. As it stands here it needs several times the memory of the other one.

    Args:
        owned: which labels are this member's. None: all.
    """
    probabilities = (logits.to(log_sum.dtype) - log_sum).exp()
    is_label = torch.arange(logits.shape[1], device=logits.device) == target
    is_label = is_label if owned is None else is_label & owned
    return ((probabilities - is_label.to(log_sum.dtype)) * gradient).to(logits.dtype)

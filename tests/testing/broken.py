"""Layers for the tests of `check_layer`: right ones, and each with one mistake of the kind that people make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensor3d import (
    Cube,
    Face,
    Layout,
    Linear3D,
    all_reduce_replicated,
    constant,
    cross_entropy,
    local,
    local_param,
    local_rows,
    normal,
    sum_gradient,
)
from tensor3d.distributed.collectives import all_reduce
from tensor3d.sharding.param_layout import copies, narrow, vector


class Scale(nn.Module):
    """The reference: one gain a column."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(hidden))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gain


class Scale3D(nn.Module):
    """Right for `vector("z")`; wrong for others."""

    def __init__(self, hidden: int, cube: Cube, layout: Layout | None = None) -> None:
        super().__init__()
        self.cube, self.layout = cube, layout or vector("z")
        self.gain = constant((hidden,), self.layout, cube, 1.0)

    def forward(self, h: Tensor) -> Tensor:
        return h * local_param(self.gain, self.layout, self.cube)


class DetachedScale3D(Scale3D):
    """Reads its block past the graph."""

    def forward(self, h: Tensor) -> Tensor:
        return h * local(self.gain).detach()


class PlainScale3D(nn.Module):
    """Its parameter is torch's own."""

    def __init__(self, hidden: int, cube: Cube) -> None:
        super().__init__()
        self.columns = vector("z").slices((hidden,), cube)
        self.gain = nn.Parameter(torch.ones(hidden))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gain[self.columns]


class Head3D(nn.Module):
    """A narrow head, whose bias may be summed over other axes than it should."""

    def __init__(self, hidden: int, classes: int, cube: Cube, bias: Layout | None = None, face: Face = "z") -> None:
        super().__init__()
        self.cube, self.face, self.layout = cube, face, bias or copies(face)
        self.weight = normal((classes, hidden), narrow(face), cube, 0.02)
        self.bias = constant((classes,), self.layout, cube, 0.0)

    def forward(self, h: Tensor) -> Tensor:
        logits = self.joined(h @ local_param(self.weight, narrow(self.face), self.cube).t())
        return logits + local_param(self.bias, self.layout, self.cube)

    def joined(self, part: Tensor) -> Tensor:
        return all_reduce_replicated(part, self.cube.axis(self.face))


class ForgetfulHead3D(Head3D):
    """The parts of the members of z are never added."""

    def joined(self, part: Tensor) -> Tensor:
        return part


class TwiceSummedHead3D(Head3D):
    """Its backward adds up gradients that every member of z has whole."""

    def joined(self, part: Tensor) -> Tensor:
        return _SumBothWays.apply(part, self.cube)


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cube: Cube) -> Tensor:
        ctx.cube = cube
        return all_reduce(part.clone(), cube.axis("z")).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(), ctx.cube.axis("z")).wait(), None


class Centre(nn.Module):
    """The reference: each row less its mean."""

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(1, keepdim=True)


class Centre3D(nn.Module):
    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube

    def forward(self, h: Tensor) -> Tensor:
        z = self.cube.axis("z")
        return h - self.used_by_columns(all_reduce_replicated(h.sum(1, keepdim=True) / (h.shape[1] * z.size), z))

    def used_by_columns(self, mean: Tensor) -> Tensor:
        return sum_gradient(mean, self.cube.axis("z"))


class OwnGradientCentre3D(Centre3D):
    """The gradient of a mean is what this rank's columns give."""

    def used_by_columns(self, mean: Tensor) -> Tensor:
        return mean


class HalfCentre3D(nn.Module):
    """Takes the mean of its own columns for that of the row."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(1, keepdim=True)


class Loss(nn.Module):
    """The reference: a projection to a small vocabulary and its mean cross-entropy."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, vocab)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.project(h), labels)


class Loss3D(nn.Module):
    def __init__(self, hidden: int, vocab: int, cube: Cube) -> None:
        super().__init__()
        self.cube, self.vocab = cube, vocab
        self.project = Linear3D(hidden, vocab, cube)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        losses, _ = cross_entropy(self.project(h), local_rows(labels, self.cube), self.vocab, self.cube)
        return self.reduced(losses, len(labels) * self.cube.shape.planes)

    def reduced(self, losses: Tensor, rows: int) -> Tensor:
        return all_reduce_replicated(losses.sum() / rows, self.cube.over("data", "x", "z"))


class LocalMeanLoss3D(Loss3D):
    """Divides by the number of this rank's rows."""

    def reduced(self, losses: Tensor, rows: int) -> Tensor:
        return all_reduce_replicated(losses.sum() / len(losses), self.cube.over("data", "x", "z"))


class OwnRowsLoss3D(Loss3D):
    """Returns this rank's part."""

    def reduced(self, losses: Tensor, rows: int) -> Tensor:
        return losses.sum() / rows


class CountedLoss3D(Loss3D):
    """Right where rows with label -100 do not count."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        mine = local_rows(labels, self.cube)
        losses, _ = cross_entropy(self.project(h), mine, self.vocab, self.cube)
        return self.added(losses.sum() / self.count(mine, labels))

    def count(self, mine: Tensor, labels: Tensor) -> Tensor:
        return all_reduce_replicated((mine != -100).sum(), self.cube.over("data", "x", "z"))

    def added(self, part: Tensor) -> Tensor:
        return all_reduce_replicated(part, self.cube.over("data", "x", "z"))


class OwnCountLoss3D(CountedLoss3D):
    """Divides by the labels of this rank's rows."""

    def count(self, mine: Tensor, labels: Tensor) -> Tensor:
        return (mine != -100).sum()


class PlaneCountLoss3D(CountedLoss3D):
    """Divides by the labels of this rank's plane."""

    def count(self, mine: Tensor, labels: Tensor) -> Tensor:
        return (labels != -100).sum()


class TwiceAddedLoss3D(CountedLoss3D):
    """Adds over y too, whose members have the same losses."""

    def added(self, part: Tensor) -> Tensor:
        return all_reduce_replicated(part, self.cube.over("data", "x", "y", "z"))


class OtherAxesLoss3D(CountedLoss3D):
    """Adds over the axes of rows on face z, where the losses are those of rows on face y."""

    def added(self, part: Tensor) -> Tensor:
        return all_reduce_replicated(part, self.cube.over("data", "x", "y"))


class Gated(nn.Module):
    """The reference: a product, and the input times it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, hidden)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gate(h)


class MixedFaces3D(nn.Module):
    """Multiplies a matrix on face y with one on face z."""

    def __init__(self, hidden: int, cube: Cube) -> None:
        super().__init__()
        self.gate = Linear3D(hidden, hidden, cube)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gate(h)


class UnusedScale3D(Scale3D):
    """Takes its parameter as it is."""

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gain


class Unit(nn.Module):
    """The reference: each row by its length, which has no gradient at 0."""

    def forward(self, h: Tensor) -> Tensor:
        return h / h.square().sum(1, keepdim=True).sqrt().clamp(min=1e-6)

"""Heads with a handful of outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tensor3d.collectives import sum_copies
from tensor3d.cube import Cube
from tensor3d.faces import Face, check_divides, check_face, in_batch, lies
from tensor3d.layout import block, copies, narrow
from tensor3d.origin import check_origin
from tensor3d.parameters import constant, normal, use


class NarrowHead3D(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        """(R', K/face) to logits (R', C), fp32 at least, the same on all members of the face's axis."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "NarrowHead3D")
        columns = self.in_features // self.cube.axis(self.face).size
        if x.dim() != 2 or x.shape[1] != columns:
            raise ValueError(
                f"NarrowHead3D on face {self.face} needs the local shape (rows, {columns}). Got {tuple(x.shape)}."
            )
        check_origin(x, self.face, self.cube, f"NarrowHead3D ({self.in_features} -> {self.classes})")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = use(self.weight, narrow(self.face), self.cube).to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = sum_copies(x @ weight.t(), self.cube.axis(self.face))
        return logits if self.bias is None else logits + use(self.bias, copies(self.face), self.cube).to(logits.dtype)

    def extra_repr(self) -> str:
        reads = lies(self.in_features, self.face, self.cube)
        return f"{self.in_features} -> {self.classes}, {reads} -> copies over {self.face}, {block(self.weight)}"

"""The projection to a vocabulary.

R rows of the cube, V vocabulary, H hidden size
"""

from __future__ import annotations

from torch import Tensor, nn

from tensor3d.cube import Cube
from tensor3d.faces import Face, check_activation, check_divides, in_batch, lies
from tensor3d.layout import block, check_layout, matrix, vector
from tensor3d.matmul import matmul
from tensor3d.parameters import constant, normal


class Projection3D(nn.Module):
    """Logits over a vocabulary, face z to face y, with a weight of its own or a tied one.

        weight   (V/yx, H/z)          x  (R/xy, H/z)          logits  (R/xz, V/y)

    V need not divide: slices are the vocabulary's chunks over y, as `cross_entropy` expects them. A tied weight is one
    parameter in two places, `Embedding3D.weight` for example: its gradients add up. Traffic as of `tensor3d.matmul`.

    Args:
        hidden: H, divides by z.
        vocab: V.
        std: of the initial weights; biases start at 0.
        weight: the tied weight (V, H), layout `matrix("z")`. None: an own one is made.

    Raises:
        ValueError: H does not divide by z, V is below 1, or a tied weight of another shape or layout.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        cube: Cube,
        bias: bool = False,
        *,
        std: float = 0.02,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        check_divides("hidden", hidden, cube, "z")
        if vocab < 1:
            raise ValueError(f"vocab must be at least 1. Got {vocab}.")
        if weight is not None:
            if tuple(weight.shape) != (vocab, hidden):
                raise ValueError(f"the tied weight must have shape ({vocab}, {hidden}). Got {tuple(weight.shape)}.")
            check_layout(weight, matrix("z"), cube)
        self.hidden, self.vocab, self.cube, self.tied = hidden, vocab, cube, weight is not None
        self.weight = normal((vocab, hidden), matrix("z"), cube, std) if weight is None else weight
        self.bias = constant((vocab,), vector("y"), cube, 0.0) if bias else None

    @property
    def reads(self) -> Face:
        """The face of the input."""
        return "z"

    def forward(self, x: Tensor) -> Tensor:
        """(R/xy, H/z) on face z, to (R/xz, V/y) on face y."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "Projection3D")
        check_activation(x, self.hidden, self.cube, "z", "Projection3D")
        return matmul(x, self.weight, self.cube, "z", self.bias)

    def extra_repr(self) -> str:
        reads, gives = lies(self.hidden, "z", self.cube), lies(self.vocab, "y", self.cube)
        tied, bias = ", tied" if self.tied else "", "" if self.bias is None else ", with bias"
        return f"{self.hidden} -> {self.vocab}, {reads} -> {gives}, {block(self.weight)}{tied}{bias}"

"""The linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from tensor3d.cube import Cube
from tensor3d.faces import Face, check_activation, check_divides, check_face, in_batch, lies, other
from tensor3d.layout import block, matrix, vector
from tensor3d.matmul import matmul
from tensor3d.parameters import constant, normal


class Linear3D(nn.Module):
    """`x @ weight.T + bias`, from one face to the other (Bian et al. 2021, §3.1; see `tensor3d.matmul`).

    Args:
        in_features: K, divides by the axis of `face`.
        out_features: N, divides by the axis of the other face.
        face: the face of the input; the output lies on the other one, so layers come in pairs.
        std: of the initial weights, normal around 0; biases start at 0.
        reshard_after_forward: False keeps the gathered weight and input for backward.

    Raises:
        ValueError: an unknown face, or features that do not divide, named with the axis.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        cube: Cube,
        face: Face = "z",
        bias: bool = True,
        *,
        std: float = 0.02,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        check_face(face)
        check_divides("in_features", in_features, cube, face)
        check_divides("out_features", out_features, cube, other(face))
        self.in_features, self.out_features, self.cube, self.face = in_features, out_features, cube, face
        self.reshard_after_forward = reshard_after_forward
        self.weight = normal((out_features, in_features), matrix(face), cube, std)
        self.bias = constant((out_features,), vector(other(face)), cube, 0.0) if bias else None

    @property
    def reads(self) -> Face:
        """The face of the input."""
        return self.face

    def forward(self, x: Tensor) -> Tensor:
        """(M/xy, K/z) on face z to (M/xz, N/y) on face y; y and z swapped on face y. A batch dim of 1 is kept."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "Linear3D")
        check_activation(x, self.in_features, self.cube, self.face, "Linear3D")
        return matmul(x, self.weight, self.cube, self.face, self.bias, reshard_after_forward=self.reshard_after_forward)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        reads = lies(self.in_features, self.face, self.cube)
        gives = lies(self.out_features, other(self.face), self.cube)
        return f"{self.in_features} -> {self.out_features}, {reads} -> {gives}, {block(self.weight)}{bias}"

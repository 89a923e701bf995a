"""The linear layer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.fp8_scales import history_tensor, restore_history
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.ops.fp8 import suits_fp8
from tensor3d.sharding.activation_layout import Face, check_activation, check_divides, check_face, in_batch, lies, other
from tensor3d.sharding.matmul import Reshard, check_reshard, matmul
from tensor3d.sharding.param_layout import block, check_layout, constant, matrix, normal, vector
from tensor3d.sharding.weight_slabs import gathered_together

# --- The projection to a vocabulary -----------------------------------------------------------------------------------
#
# R rows of the cube, V vocabulary, H hidden size


class Projection3D(nn.Module):
    """Logits over a vocabulary, face z to face y. The weight is its own, a tied one, or passed with each call.

        weight   (V/yx, H/z)          x  (R/xy, H/z)          logits  (R/xz, V/y)

    V need not divide: slices are the vocabulary's chunks over y, as `cross_entropy` expects them. A tied weight, such
    as `Embedding3D.weight`, gets the sum of the gradients of all its uses. Passed as `weight` it is one parameter in
    two places, and checkpoints name both. With `holds_weight=False` only the embedding holds it.

    Traffic: that of `sharding.matmul`, less `(x-1)/x*VH/yz` elements: backward follows at once, so the gathered weight
    is kept for it. It is freed once dA is computed, before dW. Peak memory grows by at most VH/yz elements.

    Never in FP8 (`MixedPrecisionPolicy.fp8`): a loss reads the result.

    Args:
        hidden: H, divides by z.
        vocab: V.
        std: of the initial weights; biases start at 0.
        weight: the tied weight (V, H), layout `matrix("z")`. None: the layer makes its own.
        holds_weight: False: the layer holds none, and each call passes the tied weight.
        reshard_after_forward: as in `Linear3D`; "input" keeps the gathered weight, where x is more than 1.

    Raises:
        ValueError: H does not divide by z, V is below 1, a tied weight of another shape or layout, or one for a
            projection that holds none.
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
        holds_weight: bool = True,
        reshard_after_forward: Reshard = "input",
    ) -> None:
        super().__init__()
        check_reshard(reshard_after_forward)
        check_divides("hidden", hidden, cube, "z")
        if vocab < 1:
            raise ValueError(f"vocab must be at least 1. Got {vocab}.")
        self.hidden, self.vocab, self.cube, self.tied = hidden, vocab, cube, weight is not None or not holds_weight
        spared = reshard_after_forward == "input"
        self.reshard_after_forward: Reshard = kept_for_heads(cube) if spared else reshard_after_forward
        if weight is not None:
            if not holds_weight:
                raise ValueError("holds_weight=False leaves the tied weight to each call. Give no weight here.")
            self._check_shape(weight)
            check_layout(weight, matrix("z"), cube)
        self.weight = normal((vocab, hidden), matrix("z"), cube, std) if not self.tied else weight
        self.bias = constant((vocab,), vector("y"), cube, 0.0) if bias else None

    @property
    def reads(self) -> Face:
        """The face of the input."""
        return "z"

    @out_of_graphs
    def forward(self, x: Tensor, weight: nn.Parameter | None = None) -> Tensor:
        """(R/xy, H/z) on face z, to (R/xz, V/y) on face y.

        Args:
            weight: the tied one, where the projection holds none.
        """
        if x.dim() == 3:
            return in_batch(lambda rows: self.forward(rows, weight), x, "Projection3D")
        check_activation(x, self.hidden, self.cube, "z", "Projection3D")
        used = weight if self.weight is None else self.weight
        if used is None or (weight is not None and weight is not used):
            raise ValueError(
                "a projection with holds_weight=False needs the tied weight in each call, and any other has its own. "
                f"Got {'none' if weight is None else 'a second one'}."
            )
        self._check_shape(used)
        reshard = self.reshard_after_forward
        return matmul(x, used, self.cube, "z", self.bias, reshard_after_forward=reshard, fp8=False)

    def _check_shape(self, weight: Tensor) -> None:
        if tuple(weight.shape) != (self.vocab, self.hidden):
            raise ValueError(
                f"the tied weight must have shape ({self.vocab}, {self.hidden}). Got {tuple(weight.shape)}."
            )

    def extra_repr(self) -> str:
        reads, gives = lies(self.hidden, "z", self.cube), lies(self.vocab, "y", self.cube)
        own = "" if self.weight is None else f", {block(self.weight)}"
        tied, bias = ", tied" if self.tied else "", "" if self.bias is None else ", with bias"
        return f"{self.hidden} -> {self.vocab}, {reads} -> {gives}{own}{tied}{bias}"


def kept_for_heads(cube: Cube) -> Reshard:
    """`reshard_after_forward` for the layers of a head. Their backward follows at once, so gathered weights are kept.
    With x = 1 nothing is gathered: only a copy in the type of the product would be kept."""
    return "input" if cube.axis("x").size > 1 else True


# --- The linear layer -------------------------------------------------------------------------------------------------


class Linear3D(nn.Module):
    """`x @ weight.T + bias`, from one face to the other (Bian et al. 2021, §3.1; see `sharding.matmul`).

    Args:
        in_features: K, divides by the axis of `face`.
        out_features: N, divides by the axis of the other face.
        face: the face of the input; the output lies on the other one, so layers come in pairs.
        std: of the initial weights, normal around 0; biases start at 0.
        reshard_after_forward: which gathered operands are gathered again in backward. True: weight and input. False:
            none, both are kept. `"input"` or `"weight"`: that one alone.

    Raises:
        ValueError: an unknown face, features that do not divide, named with the axis, or an unknown
            `reshard_after_forward`.
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
        reshard_after_forward: Reshard = True,
    ) -> None:
        super().__init__()
        check_reshard(reshard_after_forward)
        check_face(face)
        check_divides("in_features", in_features, cube, face)
        check_divides("out_features", out_features, cube, other(face))
        self.in_features, self.out_features, self.cube, self.face = in_features, out_features, cube, face
        self.reshard_after_forward: Reshard = reshard_after_forward
        self.is_decided = isinstance(reshard_after_forward, str)
        """Whether whoever made it has named an operand, which `keep_gathered` leaves so."""
        self.is_with_others = False
        """Whether the module that holds it multiplies an input by this layer's weight and those of its others of this
        face in one product each way, and gathers the weights of all together."""
        self.weight = normal((out_features, in_features), matrix(face), cube, std)
        self.bias = constant((out_features,), vector(other(face)), cube, 0.0) if bias else None

    @property
    def reads(self) -> Face:
        """The face of the input."""
        return self.face

    @property
    def in_fp8(self) -> bool:
        """Whether its products are, in bf16's place: `MixedPrecisionPolicy.fp8` is set, and its local sides suit."""
        rows, columns = self.cube.axis(other(self.face)).size, self.cube.axis(self.face).size
        suits = suits_fp8(self.out_features // rows, self.in_features // columns)
        return self.cube.precision.fp8 is not None and suits

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(M/xy, K/z) on face z to (M/xz, N/y) on face y; y and z swapped on face y. A batch dim of 1 is kept."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "Linear3D")
        check_activation(x, self.in_features, self.cube, self.face, "Linear3D")
        return matmul(x, self.weight, self.cube, self.face, self.bias, reshard_after_forward=self.reshard_after_forward)

    def __getstate__(self) -> dict[str, Any]:
        """With what delayed scaling knows of the weight: copies of parameters lose it, and files of them."""
        return vars(self) | {"_fp8_history": history_tensor(self.weight)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        history = state.pop("_fp8_history", None)
        super().__setstate__(state)
        restore_history(self.weight, history if isinstance(history, Tensor) else None)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        reads = lies(self.in_features, self.face, self.cube)
        gives = lies(self.out_features, other(self.face), self.cube)
        fp8 = f", FP8 {self.cube.precision.fp8}" if self.in_fp8 else ""
        return f"{self.in_features} -> {self.out_features}, {reads} -> {gives}, {block(self.weight)}{bias}{fp8}"


_NOTHING: AbstractContextManager[None] = nullcontext()


def gather_together(modules: Iterable[nn.Module], cube: Cube) -> AbstractContextManager[None]:
    """Inside, the weights of all linear layers in `modules` travel over x together: one all-gather in forward, one in
    backward, and one reduce-scatter of their gradients. `ExecutionPolicy.weight_group_bytes` says when.

        with gather_together([self.up, self.down], self.cube):
            return self.down(torch.relu(self.up(x)))

    For a block whose layers follow one another; `Block3D` does it by itself. Call each layer inside exactly once: the
    weight of one that is not called is gathered in vain, and a second call gathers again.
    """
    if cube.axis("x").size == 1:
        return _NOTHING
    return gathered_together(
        lambda: [
            (layer.weight, cube.axis(other(layer.face)))
            for module in modules
            for layer in module.modules()
            if isinstance(layer, Linear3D) and layer.cube is cube
        ],
        cube,
    )

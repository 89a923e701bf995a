"""The feed-forward block, the residual block and the transformer layer.

M tokens of the cube, H hidden size, I inner size
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d.attention import Backend
from tensor3d.attention.relative import RelativeTerms
from tensor3d.batches.row_selection import RowSelection
from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.layers.attention import Attention3D, Recompute
from tensor3d.layers.dropout import Dropout3D
from tensor3d.layers.linear import Linear3D, gather_together
from tensor3d.layers.mlp import add_bias_and_activate, add_dropped
from tensor3d.layers.norm import LayerNorm3D
from tensor3d.layers.relative import RelativeRows
from tensor3d.ops.activations import Activation, activated, check_activation_name
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.sharding.activation_layout import check_activation, in_batch
from tensor3d.sharding.matmul import HandedOn, matmul
from tensor3d.sharding.redistribute import select
from tensor3d.torch_private import is_plain

NormPlace = Literal["post", "pre"]
Relative = RelativeTerms | RelativeRows | None


class MLP3D(nn.Module):
    """Up (z to y), an activation, down (y to z).

    Args:
        hidden: H, divides by z (and by y for other layers beside it).
        inner: I, divides by y. Default: 4H.
        activation: between the two, GELU unless told otherwise.
        reshard_after_forward: as in `Linear3D`.

    Raises:
        ValueError: sizes that do not divide, named with the axis, or an unknown activation.
    """

    def __init__(
        self,
        hidden: int,
        cube: Cube,
        inner: int | None = None,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        std: float = 0.02,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        check_activation_name(activation)
        self.activation: Activation = activation
        self.cube = cube
        inner = 4 * hidden if inner is None else inner
        reshard = reshard_after_forward
        self.up = Linear3D(hidden, inner, cube, "z", bias, std=std, reshard_after_forward=reshard)
        self.down = Linear3D(inner, hidden, cube, "y", bias, std=std, reshard_after_forward=reshard)

    @out_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(M/xy, H/z) on face z, to the same."""
        if self._fuses_bias():
            return self.down(self._fused_up(x))
        return self.down(activated(self.up(x), self.activation))

    def _fuses_bias(self) -> bool:
        if not (self.cube.speed.compile and self.cube.regions.with_activations):
            return False
        return is_plain(self.up, Linear3D) and self.up.bias is not None

    def _fused_up(self, x: Tensor) -> Tensor:
        """activation(up(x)), whose bias is added where the activation is."""
        if x.dim() == 3:
            return in_batch(self._fused_up, x, "MLP3D")
        up = self.up
        assert up.bias is not None
        check_activation(x, up.in_features, self.cube, "z", "MLP3D")
        product = matmul(x, up.weight, self.cube, "z", reshard_after_forward=up.reshard_after_forward)
        return add_bias_and_activate(product, up.bias, self.activation, self.cube, "y")

    def extra_repr(self) -> str:
        return "" if self.activation == "gelu" else f"activation={self.activation}"


class Block3D(nn.Module):
    """A transformer's residual block of given parts, on face z: attention and MLP, each with dropout and a norm.

        post    x = attention_norm(x + dropout(attention(x)));    x = mlp_norm(x + dropout(mlp(x)))
        pre     x = x + dropout(attention(attention_norm(x)));    x = x + dropout(mlp(mlp_norm(x)))
        both    as pre, with a norm of what each part gives: x = x + dropout(attention_out_norm(attention(...)))

    Sends nothing itself; its weights may travel over x together (`gather_together`). Saves only what its two sums and
    dropouts keep.

    Args:
        attention: called with (x, sequences), face z to face z, as `Attention3D`; for chosen rows with (x, sequences,
            queries); where scores hang on distance, with `relative` too.
        mlp: called with x, face z to face z, as `MLP3D` and `GatedMLP3D`.
        attention_norm, mlp_norm: on face z, as `LayerNorm3D("z")` and `RMSNorm3D`; `nn.Identity()` leaves one out.
        norm: `"post"`: after the residual, as in BERT. `"pre"`: before each part.
        attention_out_norm, mlp_out_norm: on face z, of what each part gives, before it is dropped and added: beside
            `norm="pre"` alone (sandwich norms: Ding et al. 2021, arXiv 2105.13290, §2.3). Both, or None of them.
        dropout: of the output of each part; with `attention_out_dropout`, of the MLP's alone.
        attention_out_dropout: of the attention's output. Default: `dropout`.
        recompute: what backward computes again instead of keeping it (Chen et al. 2016, arXiv 1604.06174):
            `"layer"`: all of it; the input alone is saved, and the forward's collectives are issued again.
            `"attention"`: what the attention, made with the same option, computes again by itself.

    Raises:
        ValueError: an unknown `norm` or `recompute`; recompute="attention" with an attention made without it; one norm
            of outputs without the other, or beside `norm="post"`.
    """

    def __init__(
        self,
        attention: nn.Module,
        attention_norm: nn.Module,
        mlp: nn.Module,
        mlp_norm: nn.Module,
        *,
        norm: NormPlace = "post",
        dropout: Dropout3D,
        attention_out_dropout: Dropout3D | None = None,
        attention_out_norm: nn.Module | None = None,
        mlp_out_norm: nn.Module | None = None,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        if norm not in get_args(NormPlace):
            raise ValueError(f'norm must be "post" or "pre". Got {norm!r}.')
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}. Got {recompute!r}.")
        if recompute == "attention" and getattr(attention, "recompute", None) != "attention":
            raise ValueError(
                'recompute="attention" is the attention\'s own work. '
                f'Got {type(attention).__name__} made without it; make it with recompute="attention".'
            )
        of_outputs = {"attention_out_norm": attention_out_norm, "mlp_out_norm": mlp_out_norm}
        out_norms = [name for name, each in of_outputs.items() if each is not None]
        if len(out_norms) == 1 or (out_norms and norm != "pre"):
            raise ValueError(
                'attention_out_norm and mlp_out_norm come together, beside norm="pre". Got '
                f"{' and '.join(out_norms)} with norm={norm!r}."
            )
        self.norm, self.recompute = norm, recompute
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm
        self.attention_out_norm, self.mlp_out_norm = attention_out_norm, mlp_out_norm
        self.dropout = dropout
        # Not the other one a second time, by which whoever replaces one of them would replace half of it.
        self.attention_out_dropout = attention_out_dropout

    @out_of_graphs
    def forward(
        self, x: Tensor, sequences: Sequences, chosen: RowSelection | None = None, *, relative: Relative = None
    ) -> Tensor:
        """(M/xy, H/z) on face z, to the same. `sequences` are those of this rank's rows on face y.

        Args:
            chosen: U rows of the plane. Only these are computed, though they still attend to all rows: the result is
                (U/y, H/z), equal to the same rows of the whole result. Costs one more reduce-scatter over y, of U/z
                rows of H, and its gather in backward.
            relative: for the attention, as `Attention3D` takes it.
        """
        if self.recompute == "layer" and torch.is_grad_enabled():
            # Not reentrant: backward stays one pass, at whose end the ledger sums once.
            result: Tensor = checkpoint(self._blocks, x, sequences, chosen, relative, use_reentrant=False)
            return result
        return self._blocks(x, sequences, chosen, relative)

    def _blocks(self, x: Tensor, sequences: Sequences, chosen: RowSelection | None, relative: Relative) -> Tensor:
        with gather_together([self.attention, self.mlp], self.dropout.cube):
            return self._parts(x, sequences, chosen, relative)

    def _parts(self, x: Tensor, sequences: Sequences, chosen: RowSelection | None, relative: Relative) -> Tensor:
        of_attention = self.dropout if self.attention_out_dropout is None else self.attention_out_dropout
        if self.norm == "pre":
            attended = self._attend(self.attention_norm(x), sequences, chosen, relative)
            if self.attention_out_norm is not None:
                attended = self.attention_out_norm(attended)
            x = self._added(self._kept(x, chosen), attended, of_attention)
            part = self.mlp(self.mlp_norm(x))
            return self._added(x, part if self.mlp_out_norm is None else self.mlp_out_norm(part), self.dropout)
        cube = self.dropout.cube
        with HandedOn(x, cube) as residual:
            attended = self._attend(x, sequences, chosen, relative)
        x = self._normed(self._kept(residual.tensor, chosen), attended, self.attention_norm, of_attention)
        with HandedOn(x, cube) as residual:
            part = self.mlp(x)
        return self._normed(residual.tensor, part, self.mlp_norm, self.dropout)

    def _added(self, x: Tensor, part: Tensor, dropout: Dropout3D) -> Tensor:
        """x + dropout(part)"""
        if _compiles(dropout) and is_plain(dropout, Dropout3D) and dropout.active and x.dim() == 2:
            return add_dropped(x, part, dropout.p, dropout.cube, "z")
        return x + dropout(part)

    def _normed(self, x: Tensor, part: Tensor, norm: nn.Module, dropout: Dropout3D) -> Tensor:
        """norm(x + dropout(part))"""
        result: Tensor
        if not is_plain(norm, LayerNorm3D):
            result = norm(x + dropout(part))
        # A norm drops in training alone: its own, which somebody may have set apart from the dropout's.
        elif _compiles(dropout) and is_plain(dropout, Dropout3D) and (norm.training or not dropout.active):
            result = norm(x, part, dropout=dropout.p if dropout.active else 0.0)
        else:
            result = norm(x, dropout(part))
        return result

    def _attend(self, x: Tensor, sequences: Sequences, chosen: RowSelection | None, relative: Relative) -> Tensor:
        options = {} if relative is None else {"relative": relative}
        rows = () if chosen is None else (chosen,)
        mixed: Tensor = self.attention(x, sequences, *rows, **options)
        return mixed

    def _kept(self, x: Tensor, chosen: RowSelection | None) -> Tensor:
        """Of the residual stream, what goes on."""
        return x if chosen is None else select(x, chosen.plane_rows, self.dropout.cube)


def _compiles(dropout: nn.Module) -> bool:
    """Whether it is on a cube that computes it as part of something else, if it may be."""
    return isinstance(dropout, Dropout3D) and dropout.cube.speed.compile


class TransformerLayer3D(Block3D):
    """BERT's block: `Attention3D`, `MLP3D` and two `LayerNorm3D`, on face z.

    Args:
        hidden, heads, inner, activation: as in `Attention3D` and `MLP3D`.
        norm: `"post"`: LayerNorm after the residual, as in BERT. `"pre"`: before each block.
        dropout: of each block's output; `attention_dropout`: of the attention probabilities.
        attention_out_dropout: as in `Block3D`.
        recompute: as in `Block3D`; `"attention"` computes what lies between QKV and projection again (Korthikanti et
            al. 2022, arXiv 2205.05198, §5), and nothing is sent for it.
        reshard_after_forward: False keeps gathered inputs and weights of the products for backward.

    Raises:
        ValueError: sizes that do not divide, an unknown `activation`, `norm` or `recompute`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        cube: Cube,
        inner: int | None = None,
        *,
        activation: Activation = "gelu",
        causal: bool = False,
        norm: NormPlace = "post",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attention_out_dropout: float | None = None,
        backend: Backend = "auto",
        eps: float = 1e-12,
        std: float = 0.02,
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__(
            Attention3D(
                hidden,
                heads,
                cube,
                causal,
                dropout=attention_dropout,
                backend=backend,
                std=std,
                recompute=recompute,
                reshard_after_forward=reshard_after_forward,
            ),
            LayerNorm3D(hidden, cube, eps=eps),
            MLP3D(hidden, cube, inner, activation=activation, std=std, reshard_after_forward=reshard_after_forward),
            LayerNorm3D(hidden, cube, eps=eps),
            norm=norm,
            dropout=Dropout3D(dropout, cube),
            attention_out_dropout=None if attention_out_dropout is None else Dropout3D(attention_out_dropout, cube),
            recompute=recompute,
        )

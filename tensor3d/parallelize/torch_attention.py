"""torch's multi-head attention, over packed sequences.

M tokens of the cube, H hidden size, h heads, d = H/h head dimension
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.attention import attention
from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.layers.dropout import check_dropout
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.parallelize.auto.op_rules import hides_what_comes_later
from tensor3d.parallelize.module_copy import ModuleBuilder
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.torch_layer_rules import Linear
from tensor3d.sharding.activation_layout import check_activation, check_divides, in_batch, lies
from tensor3d.sharding.fused_rows import to_fused_rows
from tensor3d.sharding.matmul import matmul
from tensor3d.sharding.param_layout import block, matrix, vector

# --- Where the sequences of the running forward pass lie, for modules whose own arguments cannot tell -----------------


class PackedRows:
    """Holds the sequences of a rank's rows while a model runs, whose code knows nothing of packs.

        rows = PackedRows()
        model = parallelize(module, cube, {"layers.*.attention": rules.attention(rows), ...})
        with rows.holding(sequences):
            loss = model(ids)

    One object serves all attention layers of a model, and the copies of the model too.
    """

    def __init__(self) -> None:
        self._held: Sequences | None = None

    @contextmanager
    def holding(self, sequences: Sequences) -> Iterator[None]:
        """Inside, attention runs within `sequences`: those of this rank's rows on face y."""
        before, self._held = self._held, sequences
        try:
            yield
        finally:
            self._held = before

    @property
    def sequences(self) -> Sequences:
        """Those held now.

        Raises:
            ValueError: none are held.
        """
        if self._held is None:
            raise ValueError(
                "attention needs to know where sequences begin and end, and no Sequences are held. Call the model "
                "inside `with rows.holding(sequences):` (the backward pass too, if it recomputes the forward pass)."
            )
        return self._held

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedRows:
        return self  # whoever feeds the model feeds its copies

    def __repr__(self) -> str:
        return f"PackedRows({'nothing held' if self._held is None else f'{len(self._held.lengths)} sequences'})"


# --- torch's multi-head attention, over packed sequences --------------------------------------------------------------


@dataclass(frozen=True)
class Attention(ParallelRule):
    """nn.MultiheadAttention as self-attention within the sequences that `rows` holds while the model runs.

    In nn.TransformerEncoderLayer it works as it is. Rows of `in_proj_weight` and `in_proj_bias` are in another order
    than the original's, (head, q/k/v, d): take them out with `full_state_dict`, put them in with
    `load_full_state_dict`.
    """

    rows: PackedRows
    causal: bool = False

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        if type(module) is not nn.MultiheadAttention or "forward" in vars(module):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, and {self} takes nn.MultiheadAttention with torch's forward. "
                "Say with rules.replace(build) what takes its place (Attention3D, or code around tensor3d.attention)."
            )
        _check_options(module, name)
        layer = TorchAttention3D(module.embed_dim, module.num_heads, workshop.cube, self.rows, self.causal)
        order = layer.original_rows["in_proj_weight"]
        layer.in_proj_weight = workshop.parameter(module.in_proj_weight, matrix("z"), order)
        bias = module.in_proj_bias
        layer.in_proj_bias = None if bias is None else workshop.parameter(bias, vector("y"), order)
        layer.out_proj = Linear(face="y").build(module.out_proj, f"{name}.out_proj", workshop)
        layer.dropout = module.dropout
        check_dropout(module.dropout, workshop.cube)
        return layer.train(module.training)


def _check_options(module: nn.MultiheadAttention, name: str) -> None:
    refused = {
        "kdim or vdim, which differ from embed_dim": not module._qkv_same_embed_dim,
        "add_bias_kv=True": module.bias_k is not None or module.bias_v is not None,
        "add_zero_attn=True": module.add_zero_attn,
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"rules.attention is self-attention among the tokens of a sequence. {name!r} was made with {option}. "
                "Make it without, or say with rules.replace(build) what takes its place."
            )


class TorchAttention3D(nn.Module):
    """nn.MultiheadAttention on the cube, called as that is: face z to face z, within packed sequences.

    Fused QKV (z to y), attention on face y, projection (y to z), as in `Attention3D`. Parameters have torch's names;
    rows of the fused weight are ordered (head, q/k/v, d) instead of torch's (q/k/v, head, d).

    Args:
        hidden: H, divides by heads, y and z.
        heads: h, divides by y.
        rows: holds the sequences of this rank's rows on face y while the model runs.
        causal: a token sees itself and what came before it.

    Raises:
        ValueError: sizes that do not divide.
    """

    def __init__(self, hidden: int, heads: int, cube: Cube, rows: PackedRows, causal: bool = False) -> None:
        super().__init__()
        check_divides("num_heads", heads, cube, "y")
        check_divides("embed_dim", hidden, cube, "y")
        check_divides("embed_dim", hidden, cube, "z")
        self.hidden, self.heads, self.head_dim, self.cube = hidden, heads, hidden // heads, cube
        self.rows, self.causal, self.dropout = rows, causal, 0.0
        # What code around it asks for. With batch_first, nn.TransformerEncoderLayer would leave for its fused kernel,
        # which reads the weights as they are; packed rows are one batch entry in either order.
        self.embed_dim, self.num_heads, self.batch_first, self._qkv_same_embed_dim = hidden, heads, False, True
        self.in_proj_weight: nn.Parameter
        self.in_proj_bias: nn.Parameter | None
        self.out_proj: nn.Module

    @property
    def original_rows(self) -> dict[str, Tensor]:
        """Of parameters whose rows are in another order than the original's: the original's row of each row."""
        order = to_fused_rows(torch.arange(3 * self.hidden), parts=3, groups=self.heads)
        return {"in_proj_weight": order, "in_proj_bias": order}

    @out_of_graphs
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(M/xy, H/z) or (1, M/xy, H/z) on face z, to the same, and None in place of attention weights.

        Raises:
            ValueError: cross-attention, weights asked for, a causal call of what was not made causal, or masks other
                than the causal one of what was. As in torch, `is_causal` says that the mask is that one.
        """
        if query is not key or query is not value:
            raise ValueError(
                "attention on a cube is self-attention: query, key and value must be one tensor, and others came. Call "
                "it with one tensor three times; for cross-attention say rules.replace(build)."
            )
        other_mask = attn_mask is not None and not (self.causal and (is_causal or hides_what_comes_later(attn_mask)))
        if key_padding_mask is not None or other_mask:
            raise ValueError(
                "attention on a cube takes no masks: rows are packed (tensor3d.pack_padded), Sequences say where "
                "sequences end, and rules.attention(rows, causal=True) hides what comes later (then a mask that does "
                "just that may be passed as well). Call it without masks."
            )
        if need_weights:
            raise ValueError("attention on a cube never has its weights in memory. Call it with need_weights=False.")
        if is_causal and not self.causal:
            raise ValueError("a causal call of attention that is not. Plan it as rules.attention(rows, causal=True).")
        return self._attended(query), None

    def _attended(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return in_batch(self._attended, x, "rules.attention")
        check_activation(x, self.hidden, self.cube, "z", "rules.attention")
        qkv = matmul(x, self.in_proj_weight, self.cube, "z", self.in_proj_bias)
        q, k, v = qkv.view(-1, self.heads // self.cube.axis("y").size, 3, self.head_dim).unbind(2)
        dropout = self.dropout if self.training else 0.0
        mixed = attention(q, k, v, self.rows.sequences, dropout=dropout, causal=self.causal)
        result: Tensor = self.out_proj(mixed.flatten(1))
        return result

    def extra_repr(self) -> str:
        reads = lies(self.hidden, "z", self.cube)
        weight = block(self.in_proj_weight)
        return f"{self.hidden}, {reads}, {weight}, heads={self.heads}, causal={self.causal}, dropout={self.dropout}"

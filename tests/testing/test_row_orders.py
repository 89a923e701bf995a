"""`check_layer` of fused weights whose twin has their rows in torch's order: a hint, and the argument that it names."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensor3d as t3d
from tensor3d import Sequences
from tests.ranks import check_layer
from tests.testing.failing import HIDDEN, TWO, matrix, message


class Encoder(nn.TransformerEncoderLayer):
    """torch's layer, for sequences of one length."""

    def forward(self, h: Tensor, sequences: Sequences) -> Tensor:  # type: ignore[override]
        return super().forward(h.view(len(sequences.lengths), -1, h.shape[-1])).flatten(0, 1)


class Gated(nn.Module):
    """Gate and up stacked, as most libraries have them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * inner, False), nn.Linear(inner, hidden, False)

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up(h).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class OwnFused(nn.Module):
    """A fused product of a user's own, whose code names none of the library's fused layers."""

    def __init__(self, hidden: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.shape = (heads, 3, -1) if fused else (3, heads, -1)
        self.heads_first, self.project = fused, nn.Linear(hidden, 3 * hidden)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.project(h).unflatten(-1, self.shape).unbind(-2 if self.heads_first else -3)
        return (q * k.sigmoid() + v.square()).flatten(-2)


def own_stacked(cube: Any) -> nn.Module:
    return OwnFused(8, 2, fused=False)


PARTS = {
    "attention.out": "self_attn.out_proj",
    "attention_norm": "norm1",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
    "mlp_norm": "norm2",
}
NAMES = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in PARTS.items() for kind in ("weight", "bias")}
NAMES |= {f"attention.qkv.{kind}": f"self_attn.in_proj_{kind}" for kind in ("weight", "bias")}
ENCODER = (
    partial(t3d.TransformerLayer3D, HIDDEN, 4, inner=16, eps=1e-5),
    partial(Encoder, HIDDEN, 4, 16, 0.0, "gelu", batch_first=True),
    [matrix(), Sequences.from_lengths([2] * 8)],
)


class GroupedQueries(nn.Module):
    """q, k and v one after another, two heads of queries for each of keys."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 2 * hidden, False), nn.Linear(hidden, hidden, False)

    def forward(self, h: Tensor, sequences: Sequences) -> Tensor:
        rows = self.qkv(h).view(len(sequences.lengths), -1, 8, HIDDEN // 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*rows.split([4, 2, 2], 1), enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(h.shape))


GROUPED_QUERIES = (
    partial(t3d.Attention3D, HIDDEN, 4, kv_heads=2, bias=False),
    partial(GroupedQueries, HIDDEN),
    ENCODER[2],
)
GATED = (partial(t3d.GatedMLP3D, HIDDEN, inner=16), partial(Gated, HIDDEN, 16), matrix())


@pytest.mark.parametrize(
    ("layer", "reference", "inputs", "options", "order"),
    [
        (*ENCODER, {"rename": NAMES}, "tensor3d.to_fused_rows(torch.arange(24), parts=3, groups=4)"),
        (*GROUPED_QUERIES, {}, "tensor3d.to_fused_rows(torch.arange(16), parts=(2, 1, 1), groups=2)"),
        (*GATED, {}, "tensor3d.to_fused_rows(torch.arange(32), parts=2, groups=16)"),
        (
            own_stacked,
            partial(OwnFused, 8, 2),
            matrix(),
            {},
            "tensor3d.from_fused_rows(torch.arange(24), parts=3, groups=2)",
        ),
    ],
    ids=["encoder", "grouped queries", "gated", "own"],
)
def test_rows_in_another_order_are_recognised_and_what_the_hint_says_mends_them(
    layer: Any, reference: Any, inputs: Any, options: Any, order: str
) -> None:
    text = message(layer, reference, inputs, **options)
    assert text.count("HINT") == 1
    assert order in text
    assert "2x2x2" not in text, "one device was enough"
    (written,) = re.findall(r"check_layer\(\.\.\., rows=(.*)\); to_fused_rows", text)
    rows = eval(written, {"tensor3d": t3d, "torch": torch})
    cubes = TWO[:1] if layer is not own_stacked else [t3d.CubeShape()]
    assert check_layer(layer, reference, inputs, rows=rows, cubes=cubes, **options).passed


def test_a_layer_that_no_order_mends_gets_no_such_hint() -> None:
    wrong = partial(t3d.GatedMLP3D, HIDDEN, inner=16, activation="gelu")
    text = message(wrong, partial(Gated, HIDDEN, 16), matrix())
    assert "another order" not in text
    assert "wrong on one device already" in text


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ({"up": torch.arange(4)}, r"rows names up.*gate_up\.weight"),
        ({"gate_up.weight": torch.arange(4)}, "each of the 32 rows of gate_up.weight.*each once"),
        ({"gate_up.weight": torch.zeros(32).long()}, "each of the 32 rows of gate_up.weight.*each once"),
        ({"gate_up.weight": 3}, "each of the 32 rows.*Got 3"),
    ],
)
def test_what_is_no_order_is_refused(rows: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_layer(*GATED, rows=rows)

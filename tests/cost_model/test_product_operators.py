"""What stands around products: the closed forms say what is counted in the real code, as on a GPU, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from models.bert import BertConfig
from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model import product_operators
from tensor3d.cost_model.product_operators import SIDE
from tensor3d.cost_model.step_cost import Fp8, StepCost, StepOptions
from tensor3d.data.masking import MASKED_SHARE
from tensor3d.layers.attention import Recompute
from tensor3d.ops import fp8 as fp8_products
from tools.bench.operators import OperatorFigures, count

ROWS, LONGEST = 96, 64
SMALL = BertConfig(layers=2, hidden=64, heads=8, inner=192, vocab=67, positions=64, dropout=0.1, attention_dropout=0.0)
MODERN = replace(SMALL, encoder="modern", window=8, global_every=2, next_sentence=False)
NARROW = replace(SMALL, family="electra", embedding=32, next_sentence=False)
UNEVEN = replace(SMALL, inner=200)  # 200 does not divide by 16
UNTIED = replace(SMALL, tied=False, vocab=503)


def said(
    config: BertConfig,
    shape: CubeShape,
    *,
    kept: bool = False,
    recompute: Recompute = "none",
    compiled: bool = False,
    **costs: Any,
) -> StepCost:
    """Of the micro-batch that `counted` counts."""
    masked = max(1, round(MASKED_SHARE * ROWS))
    batch = Batch(packs=shape.planes * shape.z, capacity=ROWS, length=LONGEST, masked_per_pack=masked)
    model = BertCosts(config=replace(config, positions=ROWS), batch=batch, compile=compiled, **costs)
    return model.cost(shape, StepOptions(recompute=recompute, reshard_after_forward=not kept))


def counted(config: BertConfig, shape: CubeShape, *, kept: bool = False, **how: Any) -> OperatorFigures:
    return count(config, shape, torch.bfloat16, ROWS, LONGEST, kept, passes=0, **how)


Case = tuple[BertConfig, str, dict[str, Any]]
CASES: list[Case] = [
    (SMALL, "2x1x1", {}),
    (SMALL, "1x1x1", {}),
    (SMALL, "2x2x2", {"kept": True}),
    (UNTIED, "2x1x1", {"kept": True}),
    (SMALL, "1x1x1", {"kept": True}),
    (SMALL, "1x2x2", {"recompute": "layer"}),
    (MODERN, "2x2x1", {}),
    (MODERN, "2x1x1", {"recompute": "layer", "kept": True}),
    (NARROW, "2x2x2", {}),
    (UNTIED, "2x4x1", {"recompute": "layer"}),
]


@pytest.mark.parametrize(
    ("config", "box", "way"),
    [pytest.param(*case, marks=[] if number < 1 else pytest.mark.slow) for number, case in enumerate(CASES)],
)
def test_shadow_weights_spare_what_is_counted(config: BertConfig, box: str, way: dict[str, Any]) -> None:
    """In each micro-batch, for one operator more in the first."""
    shape = CubeShape.parse(box)
    plain, shadows = (counted(config, shape, **way, shadow_weights=how) for how in (False, True))
    without, with_them = (said(config, shape, **way, shadow_weights=how) for how in (False, True))
    assert without.operators - with_them.operators == plain.further - shadows.further > 0
    once = with_them.once_operators - without.once_operators
    assert once == 1
    assert plain.operators - shadows.operators == plain.further - shadows.further - once
    spared = without.touched - with_them.touched - (with_them.once_touched - without.once_touched)
    assert spared == plain.moved_bytes - shadows.moved_bytes


FP8: list[tuple[BertConfig, str, Fp8, dict[str, Any]]] = [
    (SMALL, "2x1x1", "delayed", {}),
    (UNEVEN, "1x1x1", "rowwise", {}),
    (SMALL, "1x1x1", "tensorwise", {}),
    (SMALL, "2x2x2", "tensorwise", {"kept": True}),
    (SMALL, "1x2x2", "rowwise", {"recompute": "layer"}),
    (SMALL, "1x2x2", "delayed", {"recompute": "layer"}),
    (MODERN, "2x2x1", "delayed", {"shadow_weights": True}),
    (NARROW, "1x1x1", "tensorwise", {"recompute": "attention"}),
    (UNEVEN, "1x4x1", "delayed", {}),
    *((SMALL, "1x1x1", fp8, {"compiled": True}) for fp8 in get_args(Fp8)),
]


@pytest.mark.parametrize(
    ("config", "box", "fp8", "way"),
    [pytest.param(*case, marks=[] if number < 1 else pytest.mark.slow) for number, case in enumerate(FP8)],
)
@pytest.mark.slow
def test_fp8_takes_what_is_counted(
    config: BertConfig, box: str, fp8: Fp8, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its products, in a step of one micro-batch: what comes once, too. What the kernels of a region read again
    is not counted."""
    monkeypatch.setattr(product_operators, "READ_AGAIN", 0)
    shape = CubeShape.parse(box)
    before, after = (counted(config, shape, **way, fp8=how) for how in (None, fp8))
    plain, rounded = (said(config, shape, **way, fp8=how) for how in (None, fp8))

    def more(name: str) -> float:
        return sum(getattr(rounded, each) - getattr(plain, each) for each in (name, f"once_{name}"))

    assert more("operators") == after.operators - before.operators == after.further - before.further > 0
    assert more("touched") == after.moved_bytes - before.moved_bytes > 0
    assert (rounded.once_operators > plain.once_operators) == (fp8 == "delayed")


def test_sizes_and_ways_of_fp8_are_those_of_the_products() -> None:
    assert (SIDE, get_args(Fp8)) == (fp8_products.SIDE, get_args(fp8_products.Scaling))
    chosen = {
        (product.k, product.n, product.face): product.fp8
        for product in said(replace(UNEVEN, vocab=512), CubeShape(y=2), fp8="delayed").products
    }
    in_fp8 = {(64, 192, "z"), (64, 64, "y"), (64, 64, "z")}
    assert chosen == {
        **dict.fromkeys(in_fp8, "delayed"),
        **dict.fromkeys([(64, 200, "z"), (200, 64, "y"), (64, 512, "z")]),
    }


def test_in_fp32_there_is_nothing_to_convert() -> None:
    with_them, without = (said(SMALL, CubeShape(x=2), compute="fp32", shadow_weights=how) for how in (True, False))
    assert replace(with_them, memory=without.memory) == without
    assert with_them.memory.shadows == 0

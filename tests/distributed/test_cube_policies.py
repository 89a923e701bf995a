"""Computing in half precision: what travels, what stays in fp32, and how near the result is to fp32's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining
from tensor3d import Cube, Embedding3D, LayerNorm3D, MixedPrecisionPolicy, SmallHead3D, clip_grad_norm_, constant, local
from tensor3d.sharding.param_layout import vector
from tests.models.toy import Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, ranks_of

HALF = MixedPrecisionPolicy(compute=torch.bfloat16)


def _model(shape: Shape, precision: MixedPrecisionPolicy) -> tuple[Cube, BertForPreTraining]:
    cube = Cube(*shape, precision=precision)
    cube.manual_seed(2)
    return cube, BertForPreTraining(toy_config(67), cube)


def _trained(shape: Shape, precision: MixedPrecisionPolicy) -> tuple[float, dict[str, Tensor]]:
    cube, model = _model(shape, precision)
    packs = toy_packs(67, 8)
    types: dict[str, torch.dtype] = {}
    for name in ("bert.embeddings", "bert.layers.0", "masked_lm", "pooler", "next_sentence"):
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, output, name=name: types.__setitem__(name, output.dtype)
        )
    output = model(lay(packs, cube), *totals(packs))
    output.loss.backward()
    compute = precision.computed(torch.float32)
    assert types == dict.fromkeys(types, compute) | {"next_sentence": torch.float32}
    assert output.loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    return float(output.loss), {name: full(p.grad) for name, p in model.named_parameters()}


def _errors(shape: Shape, precision: MixedPrecisionPolicy) -> tuple[float, dict[str, float]]:
    loss, gradients = _trained(shape, MixedPrecisionPolicy())
    half_loss, half = _trained(shape, precision)
    # Of the norms: single entries of a bf16 gradient are off by some percent of the largest.
    off = {name: float((half[name] - g).norm() / g.norm()) for name, g in gradients.items() if "qkv.bias" not in name}
    return abs(half_loss / loss - 1), off


@pytest.mark.parametrize("reduce", [None, torch.bfloat16], ids=["reduce fp32", "reduce bf16"])
@pytest.mark.parametrize("shape", fast_alone((1, 2, 1, 2), (2, 2, 2, 1)))
def test_bf16_is_near_fp32(shape: Shape, reduce: torch.dtype | None) -> None:
    for loss, off in run_ranks(
        ranks_of(shape), _errors, shape, MixedPrecisionPolicy(compute=torch.bfloat16, reduce=reduce)
    ):
        assert 0 < loss < 0.01, "the loss is the same to the last bit: nothing was computed in bf16"
        assert max(off.values()) < 0.06, off


def _sums(reduce: torch.dtype | None) -> Tensor:
    """A gradient that bf16 cannot hold, summed over data: each rank has 1 + 2**-10."""
    cube = Cube(1, 1, 1, 2, precision=MixedPrecisionPolicy(reduce=reduce))
    head = SmallHead3D(1, 1, cube, "y", bias=False)
    head(torch.full((1, 1), 1 + 2.0**-10)).sum().backward()
    return full(head.weight.grad)


def test_gradients_travel_in_the_type_that_was_asked_for() -> None:
    assert float(run_ranks(2, _sums, None)[0]) == 2 + 2.0**-9
    assert float(run_ranks(2, _sums, torch.bfloat16)[0]) == 2.0


def _frequent(shape: Shape) -> list[float]:
    """A token that stands in 4,100 rows of the cube: each adds 1 to its row's gradient, which in bf16 would stop at
    256. A sum that was rounded to bf16 on its way would be 4,096."""
    cube = Cube(*shape, precision=HALF)
    table = Embedding3D(8, 4, cube)
    table(torch.full((4100 // cube.shape.x,), 3)).float().sum().backward()
    return full(table.weight.grad)[3].tolist()


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (2, 1, 1, 1), (2, 1, 2, 1)], ids=str)
def test_rows_are_added_up_in_fp32(shape: Shape) -> None:
    assert run_ranks(ranks_of(shape), _frequent, shape) == [[4100.0] * 4] * ranks_of(shape)


def test_one_device_computes_in_half_as_well() -> None:
    cube = Cube.single(precision=HALF)
    cube.manual_seed(2)
    model = BertForPreTraining(toy_config(67), cube)
    packs = toy_packs(67, 4)
    model(lay(packs, cube), *totals(packs)).loss.backward()
    twin = Cube.single()
    twin.manual_seed(2)
    exact = BertForPreTraining(toy_config(67), twin)
    exact(lay(packs, twin), *totals(packs)).loss.backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(local(p), local(q)), "the master weights are the same"
    got = model.bert.layers[0].mlp.up.weight.grad
    wanted = exact.bert.layers[0].mlp.up.weight.grad
    assert 0 < error(got, wanted) < 0.1


@pytest.mark.parametrize("wrong", [torch.int64, "bf16"])
def test_what_is_no_type_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"compute.*floating-point"):
        MixedPrecisionPolicy(compute=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reduce": torch.float16}, r"needs compute=torch\.float16.*GradScaler.*Got compute=None\. Take .*bfloat16"),
        ({"reduce": torch.float16, "compute": torch.bfloat16}, r"Got compute=torch\.bfloat16"),
        ({"reduce": torch.float8_e5m2}, r"reduce must have 16 bits at least.*Got torch\.float8_e5m2\.$"),
        ({"compute": torch.float8_e4m3fn}, r"compute must have 16 bits at least.*Got .*FP8 there is `fp8`, beside"),
    ],
)
def test_types_in_which_gradients_would_be_lost_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecisionPolicy(**wrong)


def test_sums_in_fp16_come_with_products_in_fp16() -> None:
    assert MixedPrecisionPolicy(compute=torch.float16, reduce=torch.float16).reduced(torch.float32) == torch.float16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"compute": torch.bfloat16, "fp8": "blockwise"},
            r"one of rowwise, tensorwise, delayed, or None\. Got 'blockwise'",
        ),
        ({"fp8_history": 0}, r"fp8_history must be .* at least 1\. Got 0"),
        ({"fp8": "rowwise"}, r"needs compute=torch\.bfloat16.*Got compute=None"),
        ({"compute": torch.float16, "fp8": "tensorwise"}, r"'tensorwise' needs .*Got compute=torch\.float16"),
    ],
)
def test_fp8_that_cannot_be_had_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecisionPolicy(**wrong)


def test_autocast_leaves_narrow_heads_and_norms_alone() -> None:
    cube = Cube.single()
    cube.manual_seed(1)
    norm, head = LayerNorm3D(32, cube), SmallHead3D(32, 3, cube, "z", std=0.5)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for enabled in (False, True):
        rows, columns = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = head(rows)
            norm(columns).pow(3).sum().backward()  # inside, too
        logits.square().sum().backward()
        assert logits.dtype == torch.float32
        results.append((logits.detach(), rows.grad, columns.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]


def test_a_cube_that_computes_in_other_types_shares_what_is_held_back() -> None:
    cube = Cube.single()
    half = cube.with_policy(HALF)
    assert (half.precision, cube.precision, half.traffic) == (HALF, MixedPrecisionPolicy(), cube.traffic)
    parameter = constant((2,), vector("y"), cube, 1.0)
    half.ledger._held[0] = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"held back by Cube\.no_sync"):
        clip_grad_norm_([parameter], 1.0, cube)
    cube.ledger.discard()
    clip_grad_norm_([parameter], 1.0, half)

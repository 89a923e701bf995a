"""The counter equals the closed form to the byte, for a whole BERT step, by axis and kind, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.bert import BertConfig, BertForPreTraining
from models.bert.cost_model.comm_volume import step_traffic
from models.bert.cost_model.kept_operands import kept_products
from tensor3d import Cube, CubeShape, MixedPrecisionPolicy, clip_grad_norm_, keep_gathered
from tensor3d.cost_model.comm_volume import CommModel
from tests.models.toy import CAPACITY, FAMILIES, Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import EVERY_SHAPE, fast_alone, ranks_of


def counted(
    shape: Shape,
    config: BertConfig,
    packs: int,
    dtype: torch.dtype,
    micro_batches: int,
    precision: MixedPrecisionPolicy,
    options: dict[str, Any],
) -> dict[str, Any]:
    torch.set_default_dtype(dtype)
    cube = Cube(*shape, precision=precision)
    made = {name: value for name, value in options.items() if name != "keep_budget"}
    model = BertForPreTraining(config, cube, **made)
    if "keep_budget" in options:
        keep_gathered(model, cube, packs * CAPACITY, options["keep_budget"])
    step = toy_packs(config.vocab, packs)
    batch = lay(step, cube)
    with cube.traffic.counting() as traffic:
        for number in range(micro_batches):
            if number < micro_batches - 1:
                with cube.no_sync():
                    model(batch, *totals(step)).loss.backward()
            else:
                model(batch, *totals(step)).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, cube)
    slots = (batch.masked.shape[0], batch.first.shape[0])
    return {"received": dict(traffic.received), "calls": dict(traffic.calls), "order": traffic.order, "slots": slots}


def check(
    shape: Shape,
    config: BertConfig | None = None,
    packs: int = 16,
    dtype: torch.dtype = torch.float32,
    micro: int = 1,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    options: dict[str, Any] | None = None,
) -> None:
    config, (x, y, z, data), options = config or toy_config(67), shape, options or {}
    results = run_ranks(ranks_of(shape), counted, shape, config, packs, dtype, micro, precision, options)
    for rank, result in enumerate(results):
        wire = CommModel(
            shape=CubeShape(x=x, y=y, z=z, data=data),
            rank=rank,
            compute=precision.computed(dtype).itemsize,
            gradient=precision.reduced(dtype).itemsize,
            parameter=dtype.itemsize,
        )
        rows = packs // (x * data) * CAPACITY
        expected = step_traffic(config, wire, rows, *result["slots"], micro_batches=micro, **options)
        received = {key: value for key, value in result["received"].items() if value}
        assert received == {key: value for key, value in expected.items() if value}
        calls = step_traffic(
            config, replace(wire, unit="calls"), rows, *result["slots"], micro_batches=micro, **options
        )
        assert result["calls"] == calls
        order = [(axis, kind) for axis, kind, _ in result["order"]]
        assert order == [(axis, kind) for axis, kind, _ in results[0]["order"]], "ranks issue in different orders"


@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_counter_equals_closed_form(shape: Shape) -> None:
    check(shape)


@pytest.mark.slow
def test_with_berts_vocabulary_in_fp64() -> None:
    check((2, 2, 2, 1), toy_config(30522), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"family": "xlm-roberta-xl", "first_position": 2}, {"family": "megatron-bert"}], ids=str
)
def test_with_pre_layer_norm(options: dict[str, Any]) -> None:
    check((2, 2, 2, 1), toy_config(67, norm="pre", **options))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mpnet", "nomic", "gte"])
def test_with_a_bias_by_distance_and_with_gates(family: str) -> None:
    check((2, 2, 2, 1), toy_config(67, **FAMILIES[family]))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((1, 2, 2, 1), {}, id="1x2x2"),
        pytest.param((2, 2, 2, 1), {}, id="2x2x2", marks=pytest.mark.slow),
        pytest.param((4, 2, 1, 1), {"recompute": "layer"}, id="4x2x1-layer", marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), {"reshard_after_forward": False}, id="1x2x2-data2-kept", marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 1), {"keep_budget": 40_000}, id="2x1x2-budget", marks=pytest.mark.slow),
    ],
)
def test_with_a_table_by_distance(shape: Shape, options: dict[str, Any]) -> None:
    check(shape, toy_config(67, **FAMILIES["deberta-v2"]), options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2, 2, 1), {}),
        ((1, 4, 2, 1), {"recompute": "layer"}),
        ((2, 1, 2, 1), {"keep_budget": 60_000}),
        ((1, 2, 1, 2), {"keep_budget": 400_000}),
    ],
    ids=str,
)
def test_with_a_convolution(shape: Shape, options: dict[str, Any]) -> None:
    check(shape, toy_config(67, **FAMILIES["deberta-v2"], conv_kernel=3), options=options)


# Layers with and without a window send the same; the first one has a norm less.
MODERN = {"encoder": "modern", "layers": 3, "window": 4, "global_every": 2}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((1, 2, 2, 1), {}, id="1x2x2"),
        pytest.param((2, 2, 2, 1), {}, id="2x2x2", marks=pytest.mark.slow),
        pytest.param((1, 2, 4, 1), {"recompute": "layer"}, id="1x2x4-layer", marks=pytest.mark.slow),
        pytest.param((4, 2, 1, 1), {"reshard_after_forward": False}, id="4x2x1-kept", marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), {"recompute": "attention"}, id="1x2x2-data2-attention", marks=pytest.mark.slow),
    ],
)
def test_of_the_modern_encoder(shape: Shape, options: dict[str, Any]) -> None:
    check(shape, toy_config(67, **MODERN), options=options)


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        pytest.param((1, 2, 2, 1), {"kv_heads": 2}, {}, id="1x2x2"),
        pytest.param((2, 2, 2, 1), {"kv_heads": 2}, {}, id="2x2x2", marks=pytest.mark.slow),
        pytest.param((1, 2, 4, 1), {}, {"recompute": "layer"}, id="1x2x4-layer", marks=pytest.mark.slow),
    ],
)
def test_of_rms_norm_and_a_decoder_alone(shape: Shape, changes: dict[str, Any], options: dict[str, Any]) -> None:
    eurobert = {"encoder": "modern", "family": "eurobert", "activation": "silu", "types": 0, "tied": False}
    check(shape, toy_config(67, **eurobert, next_sentence=not options, **changes), options=options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((1, 2, 2, 1), {}, id="1x2x2"),
        pytest.param((2, 2, 2, 1), {}, id="2x2x2", marks=pytest.mark.slow),
        pytest.param((1, 4, 2, 1), {"recompute": "layer"}, id="1x4x2-layer", marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 2), {"keep_budget": 60_000}, id="1x2x1-data2-budget", marks=pytest.mark.slow),
    ],
)
def test_of_norms_of_heads_and_outputs(shape: Shape, options: dict[str, Any]) -> None:
    check(shape, toy_config(67, **FAMILIES["qwen" if options else "gemma"]), options=options)


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (2, 2, 2, 1)))
def test_of_masked_tokens_alone(shape: Shape) -> None:
    check(shape, toy_config(67, next_sentence=False, tied=False))


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)))
def test_of_narrow_embeddings(shape: Shape) -> None:
    check(shape, toy_config(67, family="electra", embedding=24))


@pytest.mark.slow
def test_on_27_ranks() -> None:
    check((3, 3, 3, 1), toy_config(67, hidden=144, heads=24, inner=288), packs=72)


@pytest.mark.parametrize("shape", fast_alone((1, 2, 1, 2), (1, 2, 2, 2), (2, 2, 2, 1)))
def test_accumulation_sums_replicated_gradients_once(shape: Shape) -> None:
    check(shape, micro=3)


@pytest.mark.parametrize(
    "compute, reduce", [(torch.bfloat16, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_half_precision_travels_in_half_the_bytes(compute: torch.dtype, reduce: torch.dtype | None) -> None:
    check((2, 1, 2, 1), precision=MixedPrecisionPolicy(compute=compute, reduce=reduce), micro=2)


@pytest.mark.parametrize(
    "recompute, reshard_after_forward", [("none", False), ("layer", True), ("layer", False), ("attention", True)]
)
def test_what_is_kept_is_not_gathered_again(recompute: str, reshard_after_forward: bool) -> None:
    check((2, 1, 2, 1), options={"recompute": recompute, "reshard_after_forward": reshard_after_forward})


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        ((2, 2, 1, 1), {}, {"keep_budget": 240_000}),
        pytest.param(
            (2, 2, 2, 1),
            {"family": "electra", "embedding": 24, "layers": 3},
            {"keep_budget": 190_000},
            marks=pytest.mark.slow,
        ),
        pytest.param((4, 1, 2, 1), MODERN, {"keep_budget": 252_000, "recompute": "attention"}, marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), {}, {"keep_budget": 30_000, "recompute": "layer"}, marks=pytest.mark.slow),
    ],
    ids=["2x2x1", "2x2x2-electra", "4x1x2-modern-attention", "data2-1x2x2-layer"],
)
def test_what_fits_in_a_budget_is_not_gathered_again(
    shape: Shape, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    config, (x, y, z, data) = toy_config(67, **changes), shape
    box, rows = CubeShape(x=x, y=y, z=z, data=data), 16 // (x * data) * CAPACITY
    recompute = options.get("recompute", "none")
    kept = kept_products(config, box, rows, 4, budget=options["keep_budget"], recompute=recompute)
    assert 0 < kept.held_bytes <= options["keep_budget"]
    if recompute != "layer":
        layers = {of_products for _, of_products in kept.runs(config.layers)}
        assert len(layers) > 1, "all layers alike prove little"
    check(shape, config, options=options)


def test_one_device_sends_nothing() -> None:
    cube = Cube.single()
    model = BertForPreTraining(toy_config(67), cube)
    packs = toy_packs(67, 2)
    with cube.traffic.counting() as traffic:
        model(lay(packs, cube), *totals(packs)).loss.backward()
    assert traffic.total_calls == 0
    assert step_traffic(toy_config(67), CommModel(shape=CubeShape()), 48, 16, 10).total() == 0

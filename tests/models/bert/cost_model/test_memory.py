"""What a rank holds to the element; and that the formula for all together is a lower bound of what a step counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from models.bert import PRESETS, BertConfig, BertForPreTraining
from models.bert.cost_model.kept_operands import kept_products
from models.bert.cost_model.memory import Device, MicroBatchShape, held_bytes, kept_buckets, least_memory, shadow_bytes
from models.bert.cost_model.param_shapes import OptimizerName, held, held_elements, parameters, replicated_elements
from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import Cube, CubeShape, local
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.cost_model.kept_operands import KeptCount
from tensor3d.cost_model.step_cost import Memory, StepOptions
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.optim import AdamW
from tests.models.toy import FAMILIES, Shape, toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of
from tools.training.dry_step import dry_step

Changes = dict[str, Any]
MODERN = {"encoder": "modern", "layers": 3, "window": 4, "global_every": 2}
EUROBERT = {"encoder": "modern", "family": "eurobert", "activation": "silu", "types": 0, "tied": False}


def _state(shape: Shape, changes: Changes) -> dict[str, Any]:
    cube = Cube(*shape)
    config = toy_config(30522, **changes)
    model = BertForPreTraining(config, cube)
    optimizer = AdamW(model.parameters(), cube, lr=1e-3)
    moments = [local(state[name]).numel() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "blocks": [(name, tuple(p.shape), tuple(local(p).shape)) for name, p in model.named_parameters()],
        "moments": sum(moments),
    }


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((1, 1, 1, 1), {"norm": "pre"}),
        ((2, 2, 2, 1), {"norm": "pre"}),
        ((1, 4, 1, 1), {"norm": "pre"}),
        ((2, 1, 1, 2), {"norm": "pre"}),
        ((1, 2, 2, 1), MODERN),
        ((1, 2, 2, 1), {"next_sentence": False, "tied": False}),
        ((1, 2, 2, 1), {**MODERN, "family": "modernbert", "types": 0}),
        ((1, 2, 2, 1), {**EUROBERT, "kv_heads": 4}),
        ((1, 2, 2, 1), {"family": "electra", "embedding": 24}),
        ((1, 1, 1, 1), {"family": "roberta", "first_position": 2, "types": 1}),
        ((1, 1, 1, 1), {"family": "distilbert", "types": 0}),
        ((1, 2, 2, 1), FAMILIES["deberta-v2"]),
        ((1, 2, 2, 1), FAMILIES["nomic"]),
        ((1, 2, 2, 1), FAMILIES["gte"]),
        ((1, 1, 1, 1), FAMILIES["jina"]),
        ((1, 2, 2, 1), FAMILIES["gemma"]),
    ],
    ids=[
        *("1x1x1", "2x2x2", "1x4x1", "2x1x1-data2", "1x2x2-modern", "1x2x2-untied-masked-lm"),
        *("1x2x2-modernbert", "1x2x2-eurobert", "1x2x2-electra", "roberta", "distilbert", "1x2x2-deberta"),
        *("1x2x2-nomic", "1x2x2-gte", "jina", "1x2x2-gemma"),
    ],
)
def test_parameters_and_moments_to_the_element(shape: Shape, changes: Changes) -> None:
    config, (x, y, z, data) = toy_config(30522, **changes), shape
    size = CubeShape(x=x, y=y, z=z, data=data)
    planned = parameters(config)
    for rank, found in enumerate(run_ranks(ranks_of(shape), _state, shape, changes)):
        assert found["blocks"] == [(p.name, p.shape, p.local_shape(size, rank)) for p in planned]
        assert found["moments"] == 2 * held_elements(config, size, rank)
        assert held_elements(config, size, rank) <= held_elements(config, size, 0)


def test_bert_large_by_hand() -> None:
    config, one = PRESETS["large"], CubeShape()
    # Devlin et al. say 340 M; these are the ones of their checkpoint with both heads of pre-training.
    assert held_elements(config, one) == sum(p.elements for p in parameters(config)) == 336_226_108
    assert replicated_elements(config, one) == 0
    assert replicated_elements(config, CubeShape(data=2)) == 336_226_108
    # An eighth, and a little more: vectors and small tables are cut by one axis alone.
    assert 1 < 8 * held_elements(config, CubeShape(x=2, y=2, z=2)) / 336_226_108 < 1.01


LARGE, WIRE = PRESETS["large"], CommModel(shape=CubeShape(x=2, y=2, z=2), compute=2)
LOAD = MicroBatchShape(rows=8192, masked=1280, first=128, lengths=(512,) * 8)


def large(device: Device = "cuda", optimizer: Any = "adamw", load: MicroBatchShape = LOAD, **choice: Any) -> Memory:
    return least_memory(LARGE, WIRE, load, StepOptions(**choice), optimizer=optimizer, device=device)


def test_an_optimiser_has_two_moments_of_each_element_and_a_count_of_each_parameter() -> None:
    config = toy_config(67)
    load = MicroBatchShape(rows=64, masked=8, first=8, lengths=(32, 32))
    memory = least_memory(config, CommModel(shape=CubeShape()), load, StepOptions(), optimizer="adamw", device="cpu")
    elements = sum(p.elements for p in parameters(config))
    assert (memory.weights, memory.gradients) == (4 * elements, 4 * elements)
    assert memory.optimizer == 2 * 4 * elements + 4 * len(parameters(config))


def test_a_state_in_shares_by_hand() -> None:
    """Rows of 1 to 4 ranks along data: 67 pieces in shares of 17 and one of 16, of two classes one row or none."""
    config, shape = toy_config(67), CubeShape(data=4)
    every = parameters(config)
    for rank in range(4):
        state = held_bytes(config, CommModel(shape=shape, rank=rank), shard_over_data=True)[1]
        rows = {67: (17, 17, 17, 16), 2: (1, 1, 0, 0)}
        shares = [
            rows.get(each.shape[0], (each.shape[0] // 4,) * 4)[rank] * each.elements // each.shape[0] for each in every
        ]
        assert state == 2 * 4 * sum(shares) + 4 * len(every)
    whole = held(config, shape)
    assert whole.gathered == whole.share
    assert held(config, CubeShape()).share == whole.total
    assert 3.9 < whole.updates("stable_adamw") / whole.updates("stable_adamw", True) <= 4
    assert whole.updates("lamb", True) == whole.adapted_share < whole.share


def test_gradients_in_shares_by_hand() -> None:
    """Of all on copies of one rank; with x = 2 of what products multiply by, as sums of vectors go over x, too."""
    config, shape = toy_config(67), CubeShape(data=4)
    for rank in range(4):
        here = held(config, shape, rank)
        assert here.scattered(shape) == (here.total, here.share, here.gathered)
        assert here.gradients(shape, "gradients") == here.share
        assert here.gradients(shape, "state") == here.gradients(CubeShape(), "gradients") == here.total
    box = CubeShape(x=2, data=2)
    here = held(config, box)
    matrices = [each for each in parameters(config) if "x" not in each.layout.sum_over]
    whole, own, largest = here.scattered(box)
    assert whole == sum(each.held(box, 0) for each in matrices)
    assert own == largest == sum(-(-rows // 2) * columns for rows, columns in (e.local_shape(box, 0) for e in matrices))
    assert here.gradients(box, "gradients") == here.total - whole + own

    def memory(shards: ShardOverData, **options: Any) -> Memory:
        wire = CommModel(shape=CubeShape(data=8))
        choice = StepOptions(**options)
        return least_memory(
            PRESETS["large"], wire, LOAD, choice, optimizer="adamw", device="cpu", shard_over_data=shards
        )

    assert memory("gradients").gradients * 7.9 < memory("state").gradients == memory("state").weights
    assert memory("state", micro_batches=2).peak == memory("gradients", micro_batches=2).peak, (
        "held whole until the last"
    )


def test_a_layer_of_bert_large_by_hand() -> None:
    """Sixteen states, of which GELU's input and output have four times the columns; logits, and the weight that makes
    them, which x = 2 gathers."""
    state = 8192 * 1024 // 4
    logits = 1280 // 2 * (30522 // 2) + 30522 // 2 * (1024 // 2)
    assert large().saved == 2 * (24 * 16 * state + logits)
    assert large(recompute="layer").saved == 2 * (24 * state + logits)
    again = large(recompute="layer", micro_batches=2)
    assert again.peak == again.weights + again.gradients + again.optimizer + 2 * (24 + 15) * state
    # What both products from face z read is gathered over y, what the others read over z: twice as much each; and the
    # weights of the four.
    gathered = (2 + 1 + 4) * state + 12 * 1024**2 // 4
    assert large(reshard_after_forward=False).saved - large().saved == 2 * 24 * gathered
    # Within a budget: all have two members, and the smallest, half a MiB, are the output products' weights.
    budget = 4 * 2**20
    kept = kept_products(LARGE, WIRE.shape, LOAD.rows, 2, budget=budget)
    assert (kept.held_bytes, kept.layers[1]) == (budget, KeptCount(weights=8))
    assert large(keep_budget=budget).saved - large().saved == budget
    # On a CPU the probabilities of eight heads.
    assert large("cpu").saved - large().saved == 2 * 24 * 8 * 8 * 512**2


SMALL = BertConfig(layers=2, hidden=64, heads=4, inner=192, vocab=503, positions=64)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "shape", [CubeShape(), pytest.param(CubeShape(x=2, y=2, z=2), marks=pytest.mark.slow)], ids=str
)
def test_what_an_optimiser_holds_in_the_middle_of_its_step(shape: CubeShape, compiled: bool) -> None:
    """Counted beside AdamW, which holds nothing: to a few numbers a tensor. And with regions the formula for all
    together stays a lower bound."""
    load = MicroBatchShape(rows=64 * shape.z, masked=8 * shape.y, first=shape.y * shape.z, lengths=(64,))
    here, found = held(SMALL, shape), {}
    for name in get_args(OptimizerName):
        memory = dry_step(SMALL, shape, load, optimizer=name, compile=compiled).memory
        found[name] = memory.peaks["update"]
        formula = least_memory(
            SMALL, CommModel(shape=shape), load, StepOptions(), optimizer=name, device="cpu", compile=compiled
        )
        assert formula.saved <= memory.saved
        assert formula.peak <= memory.peak
    for name in ("lamb", "stable_adamw"):
        more = found[name] - found["adamw"] - 4 * here.updates(name, compiled=compiled)  # type: ignore[arg-type]
        assert 0 <= more <= 40 * here.tensors
    assert 4 * here.updates("lamb", compiled=compiled) == (0 if compiled else 4 * here.adapted)


def test_memory_of_gradients_that_stays_on_a_cpu() -> None:
    """That of what is summed over data alone: all of it on copies of one rank, weights but no vectors on others."""
    config, shape = PRESETS["large"], CubeShape(data=2)
    assert kept_buckets(config, CommModel(shape=shape)) == 4 * 336_226_108
    assert kept_buckets(config, CommModel(shape=shape, gradient=2)) == 0
    assert kept_buckets(config, CommModel(shape=CubeShape())) == 0
    vectors = held(config, box := CubeShape(x=2, data=2)).by_sum
    wanted = sum(count for axes, count in vectors.items() if "x" not in axes)
    assert 0 < kept_buckets(config, CommModel(shape=box)) == 4 * wanted < 4 * held(config, box).total

    def peak(device: Device, **options: Any) -> int:
        wire = CommModel(shape=shape)
        return least_memory(config, wire, LOAD, StepOptions(), optimizer="adamw", device=device, **options).peak

    assert peak("cpu") - peak("cpu", keep_buckets=False) == 4 * 336_226_108
    assert peak("cuda", keep_buckets=True) - peak("cuda") == 4 * 336_226_108
    assert peak("cpu", shard_over_data=True) == peak("cpu", shard_over_data=True, keep_buckets=False)


def test_what_is_bought_with_what() -> None:
    plain = large()
    assert large(recompute="layer").peak < plain.peak / 2
    assert large(micro_batches=2).peak == plain.peak + plain.gradients
    small = MicroBatchShape(rows=64, masked=8, first=8, lengths=(32,))
    assert large(load=small, optimizer="stable_adamw").peak > large(load=small, optimizer="lamb").peak
    assert large(load=small, optimizer="lamb").peak > large(load=small).peak
    assert not plain.counted


def test_scales_of_fp8_by_hand() -> None:
    """Of BERT-large 96 weights of layers, a head's and the pooler's have three histories of 4 bytes a pass, and a scale
    each; they are there from step to step."""
    costs = BertCosts(config=PRESETS["large"], batch=Batch(packs=8), fp8="delayed", fp8_history=20)
    delayed, plain = (each.memory(CubeShape(), StepOptions()) for each in (costs, replace(costs, fp8="rowwise")))
    assert delayed.scales == 3 * 98 * (4 * 20 + 16)
    assert delayed == replace(plain, scales=delayed.scales, peak=plain.peak + delayed.scales)
    assert delayed.at_rest == plain.at_rest + delayed.scales


def test_copies_of_weights_by_hand() -> None:
    """Of BERT-large: all but norms, the tables of positions and types, and the narrow head, which no product reads."""
    config, one = PRESETS["large"], CommModel(shape=CubeShape(), compute=2)
    others = 50 * 2 * 1024 + (512 + 2) * 1024 + 2 * 1024 + 2
    assert shadow_bytes(config, one) == 2 * (336_226_108 - others)
    assert shadow_bytes(replace(config, tied=False), one) == shadow_bytes(config, one)
    assert shadow_bytes(config, CommModel(shape=CubeShape())) == 0
    box = CommModel(shape=CubeShape(x=2, y=2, z=2), compute=2)
    assert shadow_bytes(config, one) / 8 < shadow_bytes(config, box) < 1.01 * shadow_bytes(config, one) / 8

    def memory(reshard: bool, **options: Any) -> Memory:
        choice = StepOptions(reshard_after_forward=reshard)
        return least_memory(config, one, LOAD, choice, optimizer="lamb", device="cuda", **options)

    plain, copied = memory(True), memory(True, shadow_weights=True)
    assert copied.peak - plain.peak == copied.shadows == shadow_bytes(config, one)
    assert copied.saved == plain.saved
    # What is kept converted without them is a copy with them.
    assert memory(False).saved - memory(False, shadow_weights=True).saved == 2 * 24 * 12 * 1024**2

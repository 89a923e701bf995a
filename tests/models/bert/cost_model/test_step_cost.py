"""What the planner is told of a BERT is what the closed forms say of its step, and those are what ranks count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from models.bert import PRESETS, BertConfig
from models.bert.cost_model.comm_volume import STEP_NUMBERS, step_traffic
from models.bert.cost_model.flops import model_flops
from models.bert.cost_model.memory import least_memory
from models.bert.cost_model.param_shapes import held, held_elements, parameters
from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import CommModel, times
from tensor3d.cost_model.step_cost import StepOptions
from tensor3d.distributed.cube_shape import chunk_bounds
from tests.models.toy import FAMILIES

SMALL = BertConfig(layers=3, hidden=64, heads=8, vocab=67, positions=32)
MODERN = BertConfig(layers=4, hidden=64, heads=8, vocab=67, encoder="modern", window=8, global_every=2)
BATCH = Batch(packs=64, capacity=32, masked_per_pack=5)


@pytest.mark.parametrize("config", [SMALL, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "stable_adamw"])
@pytest.mark.parametrize(
    "choice",
    [
        StepOptions(),
        StepOptions(micro_batches=4),
        StepOptions(recompute="layer"),
        StepOptions(micro_batches=2, reshard_after_forward=False),
    ],
    ids=["plain", "four", "recompute", "kept"],
)
def test_traffic_and_calls_of_a_step(config: BertConfig, optimizer: str, choice: StepOptions) -> None:
    shape = CubeShape(data=2, x=1, y=2, z=4)
    shares = {"adamw": False, "lamb": True, "stable_adamw": "gradients"}[optimizer]
    costs = BertCosts(config=config, batch=BATCH, optimizer=optimizer, shard_over_data=shares)  # type: ignore[arg-type]
    cost, load = costs.cost(shape, choice), BATCH.load(shape, choice.micro_batches)
    assert (load.rows, load.lengths) == (64 // 2 // choice.micro_batches * 32, (32,) * (8 // choice.micro_batches))
    for wire, found in (
        (CommModel(shape=shape, compute=2), cost.traffic),
        (CommModel(shape=shape, compute=2, unit="calls"), cost.calls),
    ):
        summed = sum({"adamw": 0, "lamb": 2 * (len(each.shape) > 1)}.get(optimizer, 1) for each in parameters(config))
        assert found == +step_traffic(
            config,
            wire,
            load.rows,
            load.masked,
            load.first,
            micro_batches=choice.micro_batches,
            norm=STEP_NUMBERS,
            reduce_loss=False,
            reshard_after_forward=choice.reshard_after_forward,
            recompute=choice.recompute,
            summed=summed,
            shard_over_data=shares,
        )
    asked = {"optimizer": optimizer, "device": "cuda", "shard_over_data": shares}
    memory = least_memory(config, CommModel(shape=shape, compute=2), load, choice, **asked)  # type: ignore[arg-type]
    assert cost.memory == memory


@pytest.mark.parametrize("config", [SMALL, MODERN, PRESETS["large"]], ids=["classic", "modern", "large"])
@pytest.mark.parametrize("shape", [CubeShape(), CubeShape(x=2, y=2, z=2), CubeShape(data=2, y=4)], ids=str)
def test_what_is_held_of_equal_layers_at_once(config: BertConfig, shape: CubeShape) -> None:
    """The short way through the inventory finds what the long one does."""
    for rank in (0, shape.ranks - 1):
        found, every = held(config, shape, rank), parameters(config)
        assert found.tensors == len(every)
        assert found.total == held_elements(config, shape, rank) == sum(each.held(shape, rank) for each in every)
        wide = [each for each in every if len(each.shape) > 1]
        own: dict[str, list[int]] = {
            "share": [],
            "adapted_share": [],
            "gathered": [],
        }  # of shares over data, by DTensor's cut
        for each in every:
            rows, *others = each.local_shape(shape, rank)
            first, last = chunk_bounds(rows, shape.data, shape.coordinate(rank)["data"])
            own["share"].append((last - first) * math.prod(others))
            own["adapted_share"] += own["share"][-1:] if len(each.shape) > 1 else []
            own["gathered"].append(chunk_bounds(rows, shape.data, 0)[1] * math.prod(others))
        assert {name: getattr(found, name) for name in own} == {name: sum(counts) for name, counts in own.items()}
        assert (found.adapted_tensors, found.adapted) == (len(wide), sum(each.held(shape, rank) for each in wide))
        for axes, count in found.by_sum.items():
            assert count == sum(each.held(shape, rank) for each in every if each.layout.sum_over == axes)


@pytest.mark.parametrize("asked", [True, False], ids=["next sentence", "masked-LM alone"])
def test_flops_of_the_parts_are_those_of_the_model(asked: bool) -> None:
    """Products on all ranks, with attention; the padding of heads' slots and the narrow head aside."""
    batch = Batch(packs=16, capacity=32, masked_per_pack=4)
    config = replace(SMALL, next_sentence=asked)
    costs, shape = BertCosts(config=config, batch=batch), CubeShape(x=2, y=2, z=2)
    cost = costs.cost(shape, StepOptions(micro_batches=2))
    products = 3 * sum(product.times * product.flops(shape) for product in cost.products)
    slots = model_flops(config, 16 * 32, 16 * 32**2, 16 * 4, 16)
    narrow = 3 * 2 * 16 * 2 * SMALL.hidden if asked else 0
    # 67 pieces are shared out as 34 and 33; a plane's share is told as half of 67.
    assert 2 * shape.ranks * (products + cost.attention_flops) == pytest.approx(slots - narrow)
    assert costs.model_flops() == slots


def test_causal_attention_costs_the_pairs_that_see_each_other() -> None:
    """A pack of 5 tokens and 3: 15 + 6 of 25 + 9 pairs, two products of 4 heads of 12 in 2 layers, three passes."""
    config = BertConfig(layers=2, hidden=64, heads=4, vocab=67, **FAMILIES["qwen"])
    batch = Batch(packs=1, capacity=8, length=5, masked_per_pack=1)
    both, before = (BertCosts(config=config, batch=batch, causal=causal) for causal in (False, True))
    attention = [each.cost(CubeShape(), StepOptions()).attention_flops for each in (both, before)]
    of_a_pair = 2 * 2 * 48 * 2 * 3
    assert attention == [of_a_pair * (25 + 9), of_a_pair * (15 + 6)]
    assert both.model_flops() - before.model_flops() == of_a_pair * (10 + 3)
    assert both.cost(CubeShape(), StepOptions()).traffic == before.cost(CubeShape(), StepOptions()).traffic


def test_micro_batches_divide() -> None:
    costs = BertCosts(config=SMALL, batch=Batch(packs=24, capacity=6))
    assert costs.micro_batches(CubeShape(data=2)) == [1, 2, 3, 4, 6, 12]
    # Rows of a plane must divide by y = 4: an odd number of packs of 6 does not.
    assert costs.micro_batches(CubeShape(y=4)) == [1, 2, 3, 4, 6, 12]
    assert costs.refuse(CubeShape(y=4)) is None
    assert costs.refuse(CubeShape(data=24, y=4)) == "the 1 packs of a plane do not divide by y=4"
    assert costs.refuse(CubeShape(x=5)) == "24 packs do not divide by data * x * z = 5"
    assert "heads" in str(costs.refuse(CubeShape(y=3)))


def test_bad_batches() -> None:
    with pytest.raises(ValueError, match=r"packs.*1.*0"):
        Batch(packs=0)
    assert [Batch(packs=1, masked_share=share).masked for share in (0.15, 0.3)] == [77, 154]
    with pytest.raises(ValueError, match=r"masked share.*at most 0.8. Got 0.9"):
        Batch(packs=1, masked_share=0.9)
    with pytest.raises(ValueError, match=r"pack.*32.*33"):
        Batch(packs=1, capacity=32, length=33)
    with pytest.raises(ValueError, match=r"compute.*fp32, bf16, fp16.*'fp8'"):
        BertCosts(config=SMALL, batch=BATCH, compute="fp8")
    for fp8, compute in (("fast", "bf16"), ("rowwise", "fp32")):
        with pytest.raises(ValueError, match=rf"fp8 must be one of .*delayed, beside compute='bf16'\. Got '{fp8}'"):
            BertCosts(config=SMALL, batch=BATCH, compute=compute, fp8=fp8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sequences of \b64\b.*32"):
        BertCosts(config=SMALL, batch=Batch(packs=1, capacity=64))
    with pytest.raises(ValueError, match=r"\b64\b.*data=1, x=1, z=1 and \b3\b micro-batches"):
        BATCH.load(CubeShape(), 3)


def test_calls_of_gradients_that_fill_many_buckets() -> None:
    """1.3 GB in buckets of 25 MiB: 52 calls, and the bytes of a single sum."""
    costs = BertCosts(config=PRESETS["large"], batch=Batch(packs=8), norm=0)
    shape = CubeShape(data=8)
    cost = costs.cost(shape, StepOptions())
    elements = held_elements(PRESETS["large"], shape)
    whole = CommModel(shape=shape).summed(("data",), elements, 4)
    uses = 2 * 7 * 8  # the question whether all ranks have used the same parameters
    sums = 2 * 7 * -(-elements // 8) * 4
    assert {key: cost.once[key] for key in whole} == {("data", "all-reduce"): sums + uses + _norms()}
    assert cost.once_calls["data", "all-reduce"] == -(-4 * elements // (25 * 2**20)) + 2 == 54
    assert times(whole, 2) == {key: 2 * count for key, count in whole.items()}


def _norms() -> int:
    """LAMB's, two numbers for each of BERT-large's matrices and tables."""
    adapted = held(PRESETS["large"], CubeShape()).adapted_tensors
    return replace(CommModel(shape=CubeShape(data=8))).summed(("data",), 2 * adapted, 4).total()

"""Dry steps of the real model against what is predicted of them: all of it to the byte."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.bert import PRESETS, BertConfig
from models.bert.cost_model.memory import MicroBatchShape, least_memory
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.cost_model.step_cost import StepOptions
from tools.plan.check import Comparison, dry_beside_prediction
from tools.training.config import PrecisionConfig
from tools.training.dry_step import dry_step

BF16 = PrecisionConfig(compute="bf16")
DELAYED = PrecisionConfig(compute="bf16", fp8="delayed")
NARROW = PrecisionConfig(compute="bf16", reduce="bf16")
ONE, BOX, TALL = CubeShape(), CubeShape(x=2, y=2, z=2), CubeShape(y=8)
SLABS, FLAT, LARGE = CubeShape(x=8), CubeShape(x=4, y=2), CubeShape(x=4, y=4, z=4)
TWINS, COPIES = CubeShape(y=2, z=2, data=2), CubeShape(data=4)
MODERN = {"encoder": "modern", "window": 9, "global_every": 2}
ROBERTA = {"family": "roberta", "first_position": 2, "types": 1, "next_sentence": False}
ELECTRA = {"family": "electra", "embedding": 24, "next_sentence": False}
MODERNBERT = {**MODERN, "family": "modernbert", "types": 0, "next_sentence": False, "local_rotary_base": 1e4}
_QUICK = 1  # of the cases; the others are for the slow tests
Case = tuple[CubeShape, dict[str, Any], dict[str, Any]]
# The cube; what is changed of the model; of the step.
CASES: list[Case] = [
    (ONE, ROBERTA, {}),
    (BOX, {"layers": 3}, {"keep_budget": 150_000}),
    (COPIES, {"vocab": 67}, {"shard_over_data": True, "types": BF16, "shadow_weights": True}),
    (COPIES, {}, {}),
    (COPIES, {"vocab": 67}, {"shard_over_data": "gradients", "optimizer": "lamb"}),
    (TWINS, {"vocab": 67}, {"shard_over_data": "gradients", "types": NARROW, "micro_batches": 2}),
    (CubeShape(x=2, data=3), MODERN, {"optimizer": "stable_adamw", "shard_over_data": "gradients"}),
    (TWINS, ELECTRA, {"optimizer": "stable_adamw"}),
    (TWINS, {}, {"types": NARROW, "micro_batches": 2}),
    (LARGE, {}, {"types": BF16}),
    (ONE, {"attention_dropout": 0.1}, {"types": BF16, "recompute": "attention"}),
    (ONE, {**MODERN, "layers": 3}, {"types": BF16, "micro_batches": 2}),
    (BOX, {}, {"optimizer": "lamb", "micro_batches": 2}),
    (BOX, {"norm": "pre", "dropout": 0.1}, {"types": NARROW, "recompute": "attention"}),
    (BOX, MODERNBERT, {"types": NARROW, "micro_batches": 2, "optimizer": "stable_adamw"}),
    (BOX, MODERN, {"types": BF16, "reshard_after_forward": False, "optimizer": "lamb"}),
    (TALL, {"dropout": 0.1}, {"types": BF16, "reshard_after_forward": False}),
    (TALL, MODERN, {"recompute": "layer"}),
    (SLABS, {"vocab": 67}, {"types": NARROW, "micro_batches": 3, "optimizer": "lamb"}),
    (FLAT, {}, {"recompute": "layer", "types": BF16}),
    (FLAT, {**MODERN, "attention_dropout": 0.1}, {"recompute": "attention", "reshard_after_forward": False}),
    (LARGE, {"norm": "pre"}, {"recompute": "layer", "reshard_after_forward": False, "micro_batches": 2}),
    (TWINS, {"attention_dropout": 0.1, "vocab": 67}, {"optimizer": "lamb"}),
    (LARGE, {**MODERN, "layers": 5}, {"types": BF16, "keep_budget": 100_000, "micro_batches": 2}),
    (FLAT, {"family": "electra", "embedding": 24}, {"recompute": "attention", "keep_budget": 300_000}),
    (TWINS, {"vocab": 67}, {"optimizer": "lamb", "shard_over_data": True, "types": NARROW, "micro_batches": 2}),
    (ONE, {"tied": False}, {"types": BF16, "reshard_after_forward": False, "shadow_weights": True}),
    (SLABS, {"vocab": 67, "tied": False}, {"types": NARROW, "micro_batches": 2, "shadow_weights": True}),
    (BOX, MODERN, {"types": BF16, "keep_budget": 150_000, "optimizer": "lamb", "shadow_weights": True}),
    (CubeShape(x=2, data=3), MODERN, {"optimizer": "stable_adamw", "shard_over_data": True}),
    (BOX, {}, {"types": DELAYED, "micro_batches": 2}),
    (BOX, {"dropout": 0.1}, {"types": BF16, "optimizer": "lamb", "compile": True}),
    (TWINS, {**ELECTRA, "embedding": 32}, {"types": DELAYED, "recompute": "layer"}),
]


def toy(**changes: Any) -> BertConfig:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 8, "inner": 192, "vocab": 503, "positions": 64}
    return BertConfig(**{**sizes, "dropout": 0.0, "attention_dropout": 0.0, **changes})


def load_of(shape: CubeShape, lengths: tuple[int, ...] = (40, 24), packs: int = 3, masked: int = 10) -> MicroBatchShape:
    """Packs full of sequences of these lengths, `packs` on each rank."""
    plane, multiple = packs * shape.z, math.lcm(shape.y, shape.z)
    return MicroBatchShape(
        rows=plane * sum(lengths),
        masked=-(-plane * masked // multiple) * multiple,
        first=-(-plane * len(lengths) // multiple) * multiple,
        lengths=lengths * packs,
    )


def check(found: list[Comparison]) -> None:
    assert [each for each in found if each.predicted != each.counted] == []


@pytest.mark.parametrize(
    ("shape", "changes", "step"),
    [pytest.param(*case, marks=[] if number < _QUICK else pytest.mark.slow) for number, case in enumerate(CASES)],
)
def test_the_closed_forms_hold(shape: CubeShape, changes: dict[str, Any], step: dict[str, Any]) -> None:
    check(dry_beside_prediction(toy(**changes), shape, load_of(shape), **step))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (BOX, {"activation": "relu"}),
        pytest.param(BOX, {"family": "electra", "embedding": 24, "layers": 3, "dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param(CubeShape(x=4, z=2), MODERN, marks=pytest.mark.slow),
        pytest.param(TALL, {"norm": "pre", "tied": False}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_what_a_budget_keeps_is_known_to_the_byte(shape: CubeShape, changes: dict[str, Any]) -> None:
    """And no more than that is held at once: `memory_counter` adds it to what is counted without."""
    config, load, wire, found = toy(**changes), load_of(shape), CommModel(shape=shape, compute=2), []
    for budget in (0, 100_000, 10**7):
        choice = StepOptions(keep_budget=budget)
        formula = least_memory(config, wire, load, choice, optimizer="adamw", device="cpu")
        counted = dry_step(config, shape, load, types=BF16, keep_budget=budget).memory
        assert formula.saved <= counted.saved
        assert formula.peak <= counted.peak
        found.append((formula.saved, counted.saved, counted.peak))
    for formula, saved, peak in found[1:]:
        assert formula - found[0][0] == saved - found[0][1] >= peak - found[0][2] >= 0
    assert found[2][2] > found[0][2]


@pytest.mark.slow
def test_the_last_rank_of_an_uneven_cut() -> None:
    """Of 67 entries the last of four members has 16, and the others 17."""
    shape = CubeShape(x=2, y=4)
    check(dry_beside_prediction(toy(vocab=67), shape, load_of(shape), rank=7))


@pytest.mark.slow
def test_bert_base_on_64_ranks() -> None:
    shape = CubeShape(x=4, y=4, z=4)
    load = load_of(shape, (512,), packs=4, masked=80)
    found = dry_beside_prediction(PRESETS["base"], shape, load, types=BF16, optimizer="lamb", micro_batches=2, rank=63)
    check(found)


@pytest.mark.slow
def test_further_micro_batches_are_alike() -> None:
    """Two are run; of eight the traffic is that of two and six times what the second added without the sums."""
    config, load = toy(layers=1), load_of(BOX)
    one, two, eight = (dry_step(config, BOX, load, micro_batches=number) for number in (1, 2, 8))
    for of in ("received", "calls"):
        first, second, last = (getattr(each, of) for each in (one, two, eight))
        for key in second:
            assert last[key] == first[key] + 7 * (second[key] - first[key])
    assert one.memory.peak < two.memory.peak == eight.memory.peak


@pytest.mark.slow
def test_65536_ranks() -> None:
    shape = CubeShape(x=16, y=8, z=16, data=32)
    check(dry_beside_prediction(toy(layers=1, heads=8), shape, load_of(shape, (64,), packs=1), rank=65_535))


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    before = torch.get_rng_state(), sys.excepthook
    dry_step(toy(layers=1, dropout=0.1), BOX, load_of(BOX))
    with pytest.raises(ValueError, match=r"divide by y=2 and z=2\. Got shape \(5,\)"):  # in the middle of a step
        dry_step(toy(), BOX, MicroBatchShape(rows=128, masked=5, first=2, lengths=(64,)))
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert sys.excepthook is before[1]
    grown = torch.ones(2, requires_grad=True)
    assert type((grown * 2).sum().detach()) is torch.Tensor  # no mode stays switched on
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(1) or tensor, lambda tensor: tensor):
        (grown * grown).sum()
    assert kept  # and no hook


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 to 7\. Got 8"):
        dry_step(toy(), BOX, load_of(BOX), rank=8)
    with pytest.raises(ValueError, match=r"at least 1 micro-batch\. Got 0"):
        dry_step(toy(), BOX, load_of(BOX), micro_batches=0)
    with pytest.raises(ValueError, match=r"heads.*y=16"):
        dry_step(toy(), CubeShape(y=16), load_of(CubeShape(y=16)))
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match=r"already in one"):
            dry_step(toy(), ONE, load_of(ONE))
    finally:
        dist.destroy_process_group()

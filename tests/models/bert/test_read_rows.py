"""A last layer that computes only the rows that heads read: the same losses and gradients, and the bytes it sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from models.bert import BertForPreTraining
from models.bert.cost_model.comm_volume import read_slots, step_traffic
from tensor3d import Cube, CubeShape, keep_gathered
from tensor3d.cost_model.comm_volume import CommModel
from tensor3d.data import PackedBatch, collate
from tests.models.toy import CAPACITY, MASKED_PER_PACK, MAX_SEQUENCES, Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, ranks_of

PACKS = 16
ENCODERS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre"},
    "modern": {"encoder": "modern", "layers": 3, "window": 4, "global_every": 3},
    "modern, local last": {"encoder": "modern", "window": 4, "global_every": 3},
    "one layer": {"layers": 1},
    "masked-LM alone": {"next_sentence": False},
}


def _both(shape: Shape, encoder: str, options: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Errors of loss and gradients against the model that computes all rows."""
    torch.set_default_dtype(dtype)
    config, packs, found = toy_config(67, **ENCODERS[encoder]), toy_packs(67, PACKS), {}
    results, made = [], {name: value for name, value in options.items() if name != "keep_budget"}
    for only in (False, True):
        cube = Cube(*shape)
        cube.manual_seed(0)
        model = BertForPreTraining(config, cube, read_rows_only=only, **made)
        if "keep_budget" in options:
            keep_gathered(model, cube, PACKS * CAPACITY, options["keep_budget"])
        batch = lay(packs, cube, with_read_rows=only)
        with cube.traffic.counting() as traffic:
            output = model(batch, *totals(packs))
            output.loss.backward()
        results.append((model, output, traffic))
    (whole, expected, _), (model, output, traffic) = results
    found["sums"] = error(output.sums, expected.sums)
    for (name, wanted), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        found[name] = error(full(got.grad), full(wanted.grad))
    assert batch.read is not None
    slots = [rows.shape[0] for rows in (batch.masked, batch.first, batch.read.plane_rows)]
    wire = CommModel(
        shape=cube.shape,
        rank=cube.rank,
        compute=dtype.itemsize,
        gradient=dtype.itemsize,
        parameter=dtype.itemsize,
    )
    assert slots[2] == read_slots(len(packs) // cube.shape.planes, MASKED_PER_PACK + MAX_SEQUENCES, wire)
    rows = PACKS // cube.shape.planes * CAPACITY
    closed = step_traffic(config, wire, rows, *slots[:2], read=slots[2], norm=0, **options)
    counted = Counter({key: count for key, count in traffic.received.items() if count})
    assert counted == Counter({key: count for key, count in closed.items() if count})
    return found


@pytest.mark.parametrize(
    "shape", fast_alone((2, 1, 2, 1), (2, 2, 2, 1), (1, 2, 4, 1), (1, 8, 1, 1), (1, 1, 4, 1), (1, 2, 2, 2))
)
def test_the_same_losses_and_gradients(shape: Shape) -> None:
    for found in run_ranks(ranks_of(shape), _both, shape, "post", {}, torch.float64):
        assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("encoder", [name for name in ENCODERS if name != "post"])
def test_every_encoder(encoder: str) -> None:
    assert max(_both((1, 1, 1, 1), encoder, {}, torch.float64).values()) < 1e-9
    assert max(_both((1, 1, 1, 1), encoder, {}, torch.float32).values()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"recompute": "layer"}, {"recompute": "attention"}, {"reshard_after_forward": False}, {"keep_budget": 200_000}],
)
@pytest.mark.parametrize("encoder", ["post", "pre", "modern"])
def test_with_what_saves_memory(options: dict[str, Any], encoder: str) -> None:
    for found in run_ranks(4, _both, (2, 2, 1, 1), encoder, options, torch.float64):
        assert max(found.values()) < 1e-9, found


def _rows(batch: PackedBatch, slots: torch.Tensor) -> list[int]:
    assert batch.read is not None
    return [int(batch.read.plane_rows[slot]) if slot >= 0 else -1 for slot in slots.tolist()]


@pytest.mark.parametrize(("y", "z"), [(1, 1), (2, 2), (3, 2), (2, 4)])
def test_slots_are_the_rows_of_the_batch(y: int, z: int) -> None:
    packs = toy_packs(67, 8)
    own = []
    for index in range(z):
        batch = collate(
            packs,
            capacity=CAPACITY,
            masked_per_pack=MASKED_PER_PACK,
            max_sequences=MAX_SEQUENCES,
            shape=CubeShape(y=y, z=z),
            rank=index,
            pad=0,
            with_read_rows=True,
        )
        assert batch.read is not None
        masked, first = batch.read.heads
        assert _rows(batch, masked) == batch.masked.tolist()
        assert _rows(batch, first) == batch.first.tolist()
        before = index * len(packs) // z * CAPACITY
        own += [number if number < 0 else number + before for number in batch.read.rows.tolist()]
    assert batch.read is not None
    assert own == batch.read.plane_rows.tolist()
    assert len(own) % y == len(own) % z == 0


def _refused(shape: Shape) -> int:
    """Collectives that were issued before the error."""
    cube, packs = Cube(*shape), toy_packs(67, 2)
    model = BertForPreTraining(toy_config(67), cube, read_rows_only=True)
    refusal = pytest.raises(ValueError, match=r"batches.*which rows are read")
    with cube.traffic.counting() as traffic, refusal:
        model(lay(packs, cube), *totals(packs))
    return traffic.total_calls


def test_a_batch_that_does_not_say_is_refused_before_anything_is_sent() -> None:
    assert run_ranks(2, _refused, (1, 2, 1, 1)) == [0, 0]


def test_only_the_read_rows_are_computed() -> None:
    """Rows of the last layer's products down: those of the slots, not those of the packs."""
    cube, packs = Cube.single(), toy_packs(67, 4)
    model = BertForPreTraining(toy_config(67), cube, read_rows_only=True)
    seen = []
    for layer in model.bert.layers:
        layer.mlp.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[0]))
    model(lay(packs, cube, with_read_rows=True), *totals(packs))
    assert seen == [4 * CAPACITY, 4 * (MASKED_PER_PACK + MAX_SEQUENCES)]

"""The counter equals the closed form to the byte, for a whole BERT step, by axis and kind, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.bert import BertForPreTraining
from models.bert.traffic import step_traffic
from tensor3d import Cube, CubeShape, clip_grad_norm_
from tensor3d.planning.traffic import Wire
from tests.models.toy import CAPACITY, Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.twins import SHAPES, name_of, ranks_of


def counted(shape: Shape, vocab: int, dtype: torch.dtype, norm: str, micro_batches: int) -> dict[str, Any]:
    torch.set_default_dtype(dtype)
    cube = Cube(*shape)
    model = BertForPreTraining(toy_config(vocab, norm=norm), cube)
    packs = toy_packs(vocab, 16)
    batch = lay(packs, cube)
    with cube.traffic.counting() as traffic:
        for number in range(micro_batches):
            if number < micro_batches - 1:
                with cube.accumulating():
                    model(batch, *totals(packs)).loss.backward()
            else:
                model(batch, *totals(packs)).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, cube)
    slots = (batch.masked.shape[0], batch.first.shape[0])
    return {"received": dict(traffic.received), "order": traffic.order, "slots": slots}


def check(
    shape: Shape, vocab: int = 67, dtype: torch.dtype = torch.float32, norm: str = "post", micro: int = 1
) -> None:
    x, y, z, data = shape
    results = run_ranks(ranks_of(shape), counted, shape, vocab, dtype, norm, micro)
    for rank, result in enumerate(results):
        size = torch.finfo(dtype).bits // 8
        wire = Wire(shape=CubeShape(x=x, y=y, z=z, data=data), rank=rank, compute=size, gradient=size)
        rows = 16 // (x * data) * CAPACITY
        expected = step_traffic(toy_config(vocab, norm=norm), wire, rows, *result["slots"], micro_batches=micro)
        received = {key: value for key, value in result["received"].items() if value}
        assert received == {key: value for key, value in expected.items() if value}
        order = [(axis, kind) for axis, kind, _ in result["order"]]
        assert order == [(axis, kind) for axis, kind, _ in results[0]["order"]], "ranks issue in different orders"


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_counter_equals_closed_form(shape: Shape) -> None:
    check(shape)


def test_with_berts_vocabulary_in_fp64() -> None:
    check((2, 2, 2, 1), vocab=30522, dtype=torch.float64)


def test_with_pre_layer_norm() -> None:
    check((2, 2, 2, 1), norm="pre")


@pytest.mark.parametrize("shape", [(1, 2, 2, 2), (2, 2, 2, 1)], ids=name_of)
def test_accumulation_sums_replicated_gradients_once(shape: Shape) -> None:
    check(shape, micro=3)


def test_one_device_sends_nothing() -> None:
    cube = Cube.single()
    model = BertForPreTraining(toy_config(67), cube)
    packs = toy_packs(67, 2)
    with cube.traffic.counting() as traffic:
        model(lay(packs, cube), *totals(packs)).loss.backward()
    assert traffic.total_calls == 0
    assert step_traffic(toy_config(67), Wire(shape=CubeShape()), 48, 16, 10).total() == 0

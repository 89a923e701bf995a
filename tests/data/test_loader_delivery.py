"""Batches on their way to a GPU: copied beside the computation, waited for by the device alone, kept while in use."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tensor3d import CubeShape
from tensor3d.data.loader import DeviceBatch, DevicePrefetcher, settle, tensors_of
from tensor3d.data.packed_batch import Pack, PackedBatch, collate

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch(*lengths: int, first_id: int = 5) -> PackedBatch:
    ids = np.arange(sum(lengths), dtype=np.int64) + first_id
    one = np.array([1])
    pack = Pack(
        ids=ids,
        types=np.zeros_like(ids),
        lengths=np.array(lengths),
        masked=one,
        masked_labels=ids[one],
        next_labels=np.zeros(len(lengths), dtype=np.int64),
    )
    return collate([pack], capacity=12, masked_per_pack=2, max_sequences=3, shape=CubeShape(), rank=0, pad=0)


def test_tensors_are_found_wherever_they_are() -> None:
    one = batch(4, 5)
    own = [getattr(one, field.name) for field in fields(one) if isinstance(getattr(one, field.name), Tensor)]
    assert len(own) >= 7
    found = {id(tensor) for tensor in tensors_of([one])}
    assert found == {id(tensor) for tensor in [*own, one.sequences.cu_seqlens]}
    settle(one)
    grouping = one.sequences.grouping
    cached = [one.sequences.positions, grouping.gather, grouping.restore, *(group.mask for group in grouping.groups)]
    new = {id(tensor) for tensor in cached if tensor is not None}
    assert len(new) >= 2
    assert found | new <= {id(tensor) for tensor in tensors_of([one])}
    assert list(tensors_of({"a": (1, "b", None)})) == []


def test_the_device_waits_before_anything_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            told.append(event)

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, used: told.append((id(tensor), used)))
    one, copied = batch(4, 5), object()
    settle(one)
    assert DeviceBatch(batches=[one], copied=copied).take() == [one]  # type: ignore[arg-type]
    assert told[0] is copied
    assert told[1:] == [(id(tensor), stream) for tensor in tensors_of(one)]


def test_to_the_cpu_there_is_no_way() -> None:
    one = batch(4, 5)
    delivery = DevicePrefetcher(
        torch.device("cpu"), prepare=lambda _: pytest.fail("nothing is to be worked out ahead")
    ).send([one])
    assert delivery.copied is None
    (taken,) = delivery.take()
    assert taken.ids is one.ids
    assert taken.sequences.lengths == one.sequences.lengths


@on_gpu
def test_copies_run_beside_the_computation() -> None:
    courier, one = DevicePrefetcher(torch.device("cuda")), batch(4, 5)
    courier.send([one])  # streams and memory are made at the first time
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    delivery = courier.send([one])
    assert delivery.copied is not None
    while not delivery.copied.query():
        assert not torch.cuda.current_stream().query(), "the copies have waited for the computation"
        time.sleep(0.001)
    (taken,) = delivery.take()
    torch.testing.assert_close(taken.ids.cpu(), one.ids)
    torch.testing.assert_close(taken.sequences.positions.cpu(), one.sequences.positions)


@on_gpu
def test_memory_in_use_is_given_to_nobody() -> None:
    courier = DevicePrefetcher(torch.device("cuda"))
    sums, expected = [], []
    for number in range(50):
        one = batch(4, 8, first_id=100 * number)
        (taken,) = courier.send([one]).take()
        torch.cuda._sleep(10_000_000)  # the next batches are copied before these are read
        sums.append(taken.ids.sum())
        expected.append(int(one.ids.sum()))
        del taken
    assert [int(total) for total in sums] == expected

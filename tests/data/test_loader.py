"""Steps: the same packs on every cube, totals without communication, threads that work ahead and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from operator import mul

import pytest
import torch

from tensor3d import CubeShape
from tensor3d.data import (
    IndexedDataset,
    Loader,
    MaskingRules,
    Pack,
    PackedBatch,
    PretrainingData,
    Schedule,
    StepPlan,
    TrainBatch,
    evaluation_batches,
)
from tensor3d.data.packed_batch import IGNORED, UNUSED
from tests.data.samples import VOCABULARY, pretraining, write_random

CAPACITY = 64
ONE_DEVICE = {"shape": CubeShape(), "rank": 0}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_random(tmp_path_factory.mktemp("set") / "set", documents=120)


@pytest.fixture(scope="module")
def data(documents: IndexedDataset) -> PretrainingData:
    return pretraining(documents, capacity=CAPACITY, max_length=48, max_sequences=4, seed=5)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def steps(data: PretrainingData, count: int, **arguments: object) -> list[TrainBatch]:
    with Loader(data, **{"global_batch": 16, **ONE_DEVICE, **arguments}) as loader:  # type: ignore[arg-type]
        return [next(loader) for _ in range(count)]


def run_packs(data: PretrainingData, count: int) -> list[Pack]:
    """The first packs of a run, one after another."""
    size = data.packs_per_epoch
    return [data.pack(n // size, int(data.epochs[n // size].order[n % size])) for n in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing has happened for 20 seconds"
        time.sleep(0.001)


def rows_of(step: TrainBatch) -> torch.Tensor:
    """(packs, capacity): the ids of a plane, over all micro-batches."""
    return torch.cat([batch.ids.view(-1, CAPACITY) for batch in step.batches])


def check_own_sequences(batch: PackedBatch, member: int, z_size: int) -> None:
    """A member's sequences begin at the [CLS] rows of its slice of the plane, and where a pack's tail is unused."""
    own = batch.ids.view(z_size, -1)[member]
    assert batch.sequences.rows == len(own)
    starts = batch.sequences.cu_seqlens[:-1].long()
    filled = own[starts] == VOCABULARY.cls
    first = batch.first - member * len(own)
    torch.testing.assert_close(starts[filled], first[(first >= 0) & (first < len(own)) & (batch.first != UNUSED)])
    assert (own[starts[~filled]] == VOCABULARY.pad).all()


@pytest.mark.parametrize(
    "shape",
    [
        CubeShape(x=2),
        CubeShape(y=2, z=2),
        CubeShape(x=2, y=2, z=2),
        CubeShape(x=2, data=2),
        CubeShape(y=2, z=4, data=2),
        CubeShape(y=8),
    ],
)
@pytest.mark.parametrize("packs_per_rank", [None, 1])
def test_a_step_has_the_same_packs_on_every_cube(
    data: PretrainingData, shape: CubeShape, packs_per_rank: int | None
) -> None:
    reference = steps(data, 3)
    sizes, x_size, z_size = shape.data, shape.x, shape.z
    planes = {
        (d, x, z): steps(
            data,
            3,
            shape=shape,
            rank=shape.rank({"data": d, "x": x, "y": 0, "z": z}),
            packs_per_rank=packs_per_rank,
        )
        for d, x, z in product(range(sizes), range(x_size), range(z_size))
    }
    for number, whole in enumerate(reference):
        first_members = [planes[d, x, 0][number] for d, x in product(range(sizes), range(x_size))]
        micro_batches = range(len(first_members[0].batches))
        laid = [step.batches[m].ids for m in micro_batches for step in first_members]
        torch.testing.assert_close(torch.cat(laid).view(-1, CAPACITY), rows_of(whole))
        for (d, x, z), own in planes.items():
            assert (own[number].targets, own[number].tokens) == (whole.targets, whole.tokens)
            assert (own[number].sequences, own[number].fill) == (whole.sequences, whole.fill)
            for m in micro_batches:
                batch, shared = own[number].batches[m], planes[d, x, 0][number].batches[m]
                torch.testing.assert_close(batch.masked, shared.masked)
                check_own_sequences(batch, z, z_size)


def test_totals_are_those_of_the_whole_step(data: PretrainingData) -> None:
    for step in steps(data, 4, packs_per_rank=4):
        assert len(step.batches) == 4
        assert step.targets == sum(int((batch.masked != UNUSED).sum()) for batch in step.batches)
        assert step.targets == sum(int((batch.masked_labels != IGNORED).sum()) for batch in step.batches)
        assert step.sequences == sum(int((batch.first != UNUSED).sum()) for batch in step.batches)
        assert step.sequences == sum(int((batch.next_labels != IGNORED).sum()) for batch in step.batches)
        # No id of the sample documents is the padding.
        assert step.tokens == int((rows_of(step) != VOCABULARY.pad).sum())
        assert step.fill == step.tokens / (16 * CAPACITY)


@pytest.mark.parametrize("shape", [CubeShape(), CubeShape(x=2, y=2, z=2), CubeShape(data=2)])
def test_a_share_that_falls_is_that_of_each_step_on_any_cube(documents: IndexedDataset, shape: CubeShape) -> None:
    """Targets, which are counted from lengths alone, are the labels that the planes have; packs hold the most."""
    masking = MaskingRules(share=0.4, end_share=0.1, steps=4)
    data = pretraining(documents, capacity=CAPACITY, max_length=48, max_sequences=4, seed=5, masking=masking)
    places = [{"data": d, "x": x, "y": 0, "z": 0} for d, x in product(range(shape.data), range(shape.x))]
    planes = [steps(data, 4, shape=shape, rank=shape.rank(place)) for place in places]
    for number, parts in enumerate(zip(*planes, strict=True)):
        labels = sum(int((part.batches[0].masked_labels != IGNORED).sum()) for part in parts)
        counts = parts[0].lengths.tolist()
        by_hand = [max(1, min(round((0.4 - 0.1 * number) * length), length - 3)) for length in range(len(counts))]
        assert {part.targets for part in parts} == {labels}
        assert labels == sum(map(mul, by_hand, counts))
    assert data.masked_per_pack == 27  # 0.4 of 64 slots, and one half of four sequences, which rounding can add


def test_marked_rows_are_what_they_are_called(data: PretrainingData) -> None:
    for step in steps(data, 2):
        batch = step.batches[0]
        first = batch.first[batch.first != UNUSED]
        assert (batch.ids[first] == VOCABULARY.cls).all()
        assert (batch.positions[first] == 0).all()
        masked = batch.ids[batch.masked[batch.masked != UNUSED]]
        assert 0.6 < (masked == VOCABULARY.mask).float().mean() < 0.95


def test_a_resumed_run_goes_on_exactly_across_epochs(data: PretrainingData) -> None:
    per_epoch = data.packs_per_epoch // 16
    whole = steps(data, 2 * per_epoch + 3)
    assert [step.index for step in whole] == list(range(2 * per_epoch + 3))
    for start in (1, per_epoch - 1, per_epoch, 2 * per_epoch + 1):
        for resumed, step in zip(steps(data, 2, start_step=start), whole[start:], strict=False):
            assert resumed.index == step.index
            torch.testing.assert_close(rows_of(resumed), rows_of(step))
            torch.testing.assert_close(resumed.batches[0].masked, step.batches[0].masked)
            assert resumed.targets == step.targets


def test_an_epoch_goes_through_all_packs_before_the_next(data: PretrainingData) -> None:
    size = data.packs_per_epoch
    rows = torch.cat([rows_of(step) for step in steps(data, size // 16 + 1)])
    built = run_packs(data, len(rows))
    assert len({tuple(pack.ids.tolist()) for pack in built[:size]}) == size
    for row, pack in zip(rows, built, strict=True):
        assert row[: len(pack.ids)].tolist() == pack.ids.tolist()


@pytest.mark.slow
def test_a_batch_of_more_than_an_epoch(data: PretrainingData) -> None:
    batch = 2 * data.packs_per_epoch + 1
    (step,) = steps(data, 1, global_batch=batch)
    assert rows_of(step).shape == (batch, CAPACITY)
    assert step.tokens == sum(len(pack.ids) for pack in run_packs(data, batch))


def test_works_ahead_and_no_further(data: PretrainingData, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = Loader._build
    monkeypatch.setattr(Loader, "_build", lambda self, steps: (build(self, steps), built.extend(steps))[0])

    with Loader(data, global_batch=16, start_step=7, lookahead=3, **ONE_DEVICE) as loader:
        wait_until(lambda: len(built) >= 3)
        time.sleep(0.05)  # time enough to build more, which it must not
        assert sorted(built) == [7, 8, 9]
        next(loader)
        wait_until(lambda: len(built) >= 4)
        time.sleep(0.05)
        assert sorted(built) == [7, 8, 9, 10]


def test_the_next_epoch_is_drawn_before_it_is_needed(documents: IndexedDataset) -> None:
    data = pretraining(documents, capacity=CAPACITY, max_length=48, max_sequences=4, seed=5)
    with Loader(data, global_batch=4, lookahead=1, **ONE_DEVICE) as loader:
        next(loader)
        wait_until(lambda: 1 in data.epochs._kept)


def test_a_failure_in_the_background_reaches_the_consumer(
    documents: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pretraining(documents, capacity=CAPACITY, max_length=48, max_sequences=4, seed=5)
    step = Schedule.step

    def fails_at_step_two(self: Schedule, index: int) -> StepPlan:
        if index == 2:
            raise OSError("the disk is gone")
        return step(self, index)

    monkeypatch.setattr(Schedule, "step", fails_at_step_two)
    loader = Loader(data, global_batch=16, **ONE_DEVICE)
    assert [next(loader).index, next(loader).index] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    with pytest.raises(ValueError, match="the loader is closed"):
        next(loader)


def test_closing_twice_is_closing_once(data: PretrainingData) -> None:
    loader = Loader(data, global_batch=16, **ONE_DEVICE)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="the loader is closed"):
        next(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": CubeShape(x=3)}, "global batch of 16.*x=3.*= 3.*Take 15 or 18"),
        (
            {"shape": CubeShape(x=2, z=2), "packs_per_rank": 3},
            r"data=1.*x=2.*z=2.*packs_per_rank=3 = 12.*Take 12 or 24",
        ),
        ({"shape": CubeShape(x=32)}, "= 32. Take 32 packs"),
        ({"shape": CubeShape(y=3)}, r"16 packs per rank \* z=1 \* capacity 64 has 1024 rows, .* y=3"),
        ({"global_batch": 0}, "at least 1.*0 and None"),
        ({"packs_per_rank": 0}, "must be at least 1. Got 16 and 0"),
        ({"rank": 1}, "a rank of 1x1x1 must lie between 0 and 0. Got 1"),
        ({"rank": -1}, "rank.* between 0 and 0. Got -1"),
        ({"start_step": -1}, r"start_step.*\b0.*\b1.*-1.*\b2"),
        ({"lookahead": 0}, r"start_step.*\b0.*\b1.*\b0.*\b0"),
    ],
)
def test_what_does_not_divide_or_fit_is_named(data: PretrainingData, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(data, **{"global_batch": 16, **ONE_DEVICE, **arguments})


@pytest.mark.parametrize(
    ("shape", "packs_per_rank"), [(CubeShape(), 5), (CubeShape(x=2, y=2, z=2), 1), (CubeShape(x=2, data=2), 8)]
)
def test_evaluation_shows_every_pack_once(data: PretrainingData, shape: CubeShape, packs_per_rank: int) -> None:
    available = data.packs_per_epoch
    expected = data.packs(0, data.epochs[0].order)
    firsts = [shape.rank({"data": d, "x": x, "y": 0, "z": 0}) for d in range(shape.data) for x in range(shape.x)]
    planes = [list(evaluation_batches(data, shape=shape, rank=rank, packs_per_rank=packs_per_rank)) for rank in firsts]
    rows = torch.cat([step.batches[0].ids for together in zip(*planes, strict=True) for step in together])
    rows = rows.view(-1, CAPACITY)
    for row, pack in zip(rows, expected, strict=False):
        assert row[: len(pack.ids)].tolist() == pack.ids.tolist()
    assert (rows[available:] == VOCABULARY.pad).all()
    assert len(rows) - available < shape.planes * shape.z * packs_per_rank
    for plane in planes:
        assert len({step.batches[0].masked.shape for step in plane}) == 1
        assert sum(step.targets for step in plane) == int(data.epochs[0].targets.sum())
        assert sum(step.tokens for step in plane) == int(data.epochs[0].tokens.sum())
        assert sum(step.sequences for step in plane) == int(data.epochs[0].sequences.sum())
    used = sum(int((step.batches[0].masked != UNUSED).sum()) for plane in planes for step in plane)
    assert used == int(data.epochs[0].targets.sum())


def test_evaluation_checks_its_arguments_at_the_call(data: PretrainingData) -> None:
    with pytest.raises(ValueError, match=r"packs_per_rank.*1.*0"):
        evaluation_batches(data, packs_per_rank=0, **ONE_DEVICE)

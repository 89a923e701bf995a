"""Which packs a step has and who works on them, on any cube."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d import CubeShape
from tensor3d.data import BatchLayout, BatchRamp, IndexedDataset, PretrainingData, Schedule
from tensor3d.packing import Work
from tests.data.samples import pretraining, write_random

WORK = Work(per_token=1.0, per_square=0.1)
LIMITS = {"capacity": 64, "max_length": 48, "max_sequences": 4, "seed": 5}
SHAPES = [CubeShape(), CubeShape(x=2, data=2), CubeShape(x=2, y=2, z=2), CubeShape(z=2, data=4)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    folder = tmp_path_factory.mktemp("shards")
    return [write_random(folder / f"{n}", documents=40 + 7 * n, seed=n) for n in range(4)]


@pytest.fixture(scope="module")
def data(shards: list[IndexedDataset]) -> PretrainingData:
    return pretraining(*shards, **LIMITS)


def layout(shape: CubeShape, k: int) -> BatchLayout:
    return BatchLayout(shape=shape, rank=0, packs_per_rank=k, capacity=64)


def work_of_ranks(data: PretrainingData, schedule: Schedule, shape: CubeShape, k: int) -> np.ndarray:
    """(micro-batches, ranks): work of each rank, counted from the packs themselves."""
    plan = schedule.step(1)
    work = []
    for epoch, pack in zip(plan.epochs, plan.packs, strict=True):
        lengths = data.pack(int(epoch), int(pack)).lengths
        tail = 64 - lengths.sum()
        work.append(64 * WORK.per_token + WORK.per_square * float((lengths**2).sum() + tail**2))
    return np.array(work).reshape(-1, shape.planes * shape.z, k).sum(-1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 2])
def test_balance_changes_the_place_of_packs_and_not_the_step(data: PretrainingData, shape: CubeShape, k: int) -> None:
    plain = Schedule(data, layout(shape, k), global_batch=48)
    balanced = Schedule(data, layout(shape, k), global_batch=48, work=WORK)
    for index in (0, 1, data.packs_per_epoch // 48):
        before, after = plain.step(index), balanced.step(index)
        pairs = [sorted(zip(p.epochs.tolist(), p.packs.tolist(), strict=True)) for p in (before, after)]
        assert pairs[0] == pairs[1]
        assert (before.targets, before.sequences, before.tokens) == (after.targets, after.sequences, after.tokens)
        assert before.imbalance == 1.0  # not weighed


def test_ranks_have_even_work_in_every_micro_batch(data: PretrainingData) -> None:
    shape, k = CubeShape(x=2, data=2), 4
    balanced = Schedule(data, layout(shape, k), global_batch=48, work=WORK)
    plain = Schedule(data, layout(shape, k), global_batch=48)
    even, random = (work_of_ranks(data, schedule, shape, k) for schedule in (balanced, plain))
    assert even.shape == (3, 4)
    worst = (even.max(1) / even.mean(1)).max()
    assert balanced.step(1).imbalance == pytest.approx(worst)
    assert worst < 1.03 < 1.04 < (random.max(1) / random.mean(1)).max()


def test_windows_weigh_the_pairs_within_them_and_a_step_knows_its_lengths(data: PretrainingData) -> None:
    """Across the end of an epoch, against each pack's own lengths; the unused tail attends to itself."""
    work = Work(per_token=1.0, per_square=0.1, per_near=0.3, window=7)
    index = data.packs_per_epoch // 48
    plan = Schedule(data, layout(CubeShape(x=2, data=2), 4), global_batch=48, work=work).step(index)
    assert len(plan.drawn) == 2
    packs = [data.pack(int(epoch), int(pack)).lengths for epoch, pack in zip(plan.epochs, plan.packs, strict=True)]
    assert plan.lengths.tolist() == np.bincount(np.concatenate(packs), minlength=65).tolist()
    costs = []
    for lengths in packs:
        slots = np.append(lengths, 64 - lengths.sum())
        costs.append(64 + 0.1 * (slots**2).sum() + 0.3 * sum(near_by_hand(int(n), 7) for n in slots))
    loads = np.array(costs).reshape(-1, 4, 4).sum(-1)
    assert plan.imbalance == pytest.approx((loads.max(1) / loads.mean(1)).max())


def near_by_hand(length: int, window: int) -> int:
    return sum(min(length, i + window) - max(0, i - window + 1) for i in range(length))


def test_packs_of_like_work_share_a_micro_batch_where_a_rank_has_one(data: PretrainingData) -> None:
    shape, k = CubeShape(x=2, data=2), 1
    even, random = (
        work_of_ranks(data, Schedule(data, layout(shape, k), global_batch=48, work=work), shape, k)
        for work in (WORK, None)
    )
    assert sorted(even.reshape(-1)) == sorted(random.reshape(-1))
    assert even.reshape(-1).tolist() == sorted(even.reshape(-1))
    assert even.max(1).sum() < 0.95 * random.max(1).sum()


def test_planes_divide_the_slots(data: PretrainingData) -> None:
    schedule = Schedule(data, layout(CubeShape(x=3, z=2, data=2), 1), global_batch=24)
    planes = [schedule.plane(d, x) for d in range(2) for x in range(3)]
    assert planes[0].tolist() == [[0, 1], [12, 13]]
    assert planes[4].tolist() == [[8, 9], [20, 21]]
    assert sorted(np.concatenate(planes, axis=None).tolist()) == list(range(24))


@pytest.mark.parametrize("work", [None, WORK])
def test_a_block_of_data_ranks_has_the_packs_of_its_groups(shards: list[IndexedDataset], work: Work | None) -> None:
    data = pretraining(*shards, **LIMITS, groups=4)
    schedule = Schedule(data, layout(CubeShape(data=4), 3), global_batch=24, work=work, blocks=2)
    for index in range(2 * data.packs_per_epoch // 24):
        plan = schedule.step(index)
        for rank in range(4):
            for slot in schedule.plane(rank, 0).reshape(-1):
                epoch = data.epochs[int(plan.epochs[slot])]
                sequences = epoch.packs[int(plan.packs[slot])]
                shard = np.searchsorted(epoch.drawing.offsets, sequences, side="right") - 1
                assert set((shard // 2).tolist()) == {rank // 2}


def test_a_global_batch_has_the_same_share_of_each_group(shards: list[IndexedDataset]) -> None:
    data = pretraining(*shards, **LIMITS, groups=2)
    epoch = data.epochs[0]
    group = np.searchsorted(epoch.drawing.offsets, epoch.packs.sequences[epoch.packs.offsets[:-1]], side="right") > 2
    assert group[epoch.order].tolist() == [bool(place % 2) for place in range(data.packs_per_epoch)]
    assert data.packs_per_epoch % 2 == 0
    assert set(epoch.order.tolist()) == set(range(len(epoch.packs)))  # the smaller group begins again


def test_what_does_not_divide_is_named(data: PretrainingData, shards: list[IndexedDataset]) -> None:
    grouped = pretraining(*shards, **LIMITS, groups=4)
    with pytest.raises(ValueError, match=r"global.*6.*4"):
        Schedule(grouped, layout(CubeShape(), 6), global_batch=6)
    with pytest.raises(ValueError, match=r"\b3\b.*data=3 and \b4\b"):
        Schedule(grouped, layout(CubeShape(data=3), 4), global_batch=12, blocks=3)
    with pytest.raises(ValueError, match="4 shards do not divide among 3 groups"):
        pretraining(*shards, **LIMITS, groups=3)


def test_a_step_ends_in_the_epoch_of_its_last_pack(data: PretrainingData) -> None:
    """Also where that is the last of its epoch."""
    size = data.packs_per_epoch
    schedule = Schedule(data, layout(CubeShape(), 1), global_batch=size)
    assert [schedule.last_epoch(step) for step in range(3)] == [0, 1, 2]
    shifted = Schedule(data, layout(CubeShape(), 1), global_batch=size + 1)
    assert [shifted.last_epoch(step) for step in range(3)] == [1, 2, 3]


def test_a_batch_that_rises_takes_the_next_packs_of_the_run(data: PretrainingData) -> None:
    """Three sizes, two steps each before the last one; no pack comes twice or is left out."""
    ramp = BatchRamp(stages=3, steps=4)
    schedule = Schedule(data, layout(CubeShape(x=2), 2), global_batch=12, work=WORK, ramp=ramp)
    assert [schedule.first_pack(step) for step in range(8)] == [0, 4, 8, 16, 24, 36, 48, 60]
    plain = Schedule(data, layout(CubeShape(x=2), 2), global_batch=12)
    packs = [sorted(schedule.step(step).packs.tolist()) for step in range(5)]
    assert [len(each) for each in packs] == [4, 4, 8, 8, 12]
    assert sorted(pack for each in packs for pack in each) == sorted(
        np.concatenate([plain.step(step).packs for step in range(3)]).tolist()
    )
    assert schedule.plane(0, 1, 8).tolist() == [[2, 3], [6, 7]]
    # As many steps of each size as can be, where they do not divide.
    sizes = np.diff([BatchRamp(stages=6, steps=7).before(step, 6) for step in range(10)])
    assert sizes.tolist() == [1, 1, 2, 3, 3, 4, 5, 6, 6]


def test_a_ramp_that_cannot_be(data: PretrainingData) -> None:
    for stages, steps in ((0, 0), (1, 5), (3, 0), (2, -1)):
        with pytest.raises(ValueError, match=rf"Got stages={stages} and steps={steps}"):
            BatchRamp(stages=stages, steps=steps)
    with pytest.raises(ValueError, match=r"global batch of 16 packs does not divide by the 3 stages"):
        Schedule(data, layout(CubeShape(), 1), global_batch=16, ramp=BatchRamp(stages=3, steps=4))


def test_squares_of_a_step_are_those_of_its_sequences(data: PretrainingData) -> None:
    plan = Schedule(data, layout(CubeShape(), 1), global_batch=16).step(1)
    lengths = [data.pack(int(e), int(p)).lengths for e, p in zip(plan.epochs, plan.packs, strict=True)]
    assert plan.squares == sum(int((each**2).sum()) for each in lengths)
    assert plan.tokens == sum(int(each.sum()) for each in lengths)

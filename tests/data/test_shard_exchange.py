"""Exchanged sequences: every rank gets exactly the batches that it would build if it could read all shards."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.data import (
    ExchangeOptions,
    IndexedDataset,
    Loader,
    PretrainingData,
    RemotePairs,
    ShardExchange,
    TrainBatch,
)
from tensor3d.data.shard_exchange import check_within, shards_of
from tensor3d.distributed.host_all_to_all import HostAllToAll, PeerError
from tensor3d.packing import Work
from tests.data.samples import VOCABULARY, pretraining, same_step, write_random
from tests.ranks import run_ranks, run_survivors

LIMITS = {"capacity": 64, "max_length": 48, "max_sequences": 4, "seed": 5}
SHARDS, BATCH, STEPS = 8, 16, 9
LIMIT = timedelta(seconds=60)
WORK = Work(per_token=1.0, per_square=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(SHARDS):
        write_random(folder / f"shard-{number}", documents=7 + number, seed=number)
    return folder


def arguments(cube: Cube) -> dict[str, Any]:
    return {
        "global_batch": BATCH,
        "shape": cube.shape,
        "rank": cube.rank,
        "packs_per_rank": 1,
        "start_step": 1,
        "end_step": 1 + STEPS,
        "work": WORK,
    }


def exchanged(folder: Path, cube: Cube, within: int | None, groups: int) -> tuple[PretrainingData, ShardExchange]:
    """Data of which this rank opens its own shards only."""
    everyone = HostAllToAll.along(cube, "data", timeout=LIMIT)
    near = None if within is None else HostAllToAll.along(cube, "data", within=within, timeout=LIMIT)
    own = shards_of(SHARDS, everyone.size, everyone.index)
    shards = [IndexedDataset(folder / f"shard-{n}") if n in own else None for n in range(SHARDS)]
    source = RemotePairs(shards, everyone, max_length=48, seed=5)
    exchange = ShardExchange(everyone, near, vocab_size=VOCABULARY.vocab_size)
    return PretrainingData(source, VOCABULARY, **LIMITS, groups=groups), exchange


def everything(folder: Path, groups: int) -> PretrainingData:
    return pretraining(*(IndexedDataset(folder / f"shard-{n}") for n in range(SHARDS)), **LIMITS, groups=groups)


def _compare(
    folder: Path, sizes: dict[str, int], every: int, within: int | None, groups: int, changed: dict[str, int]
) -> list[Any]:
    """Which steps are not the same with and without exchange, how much came from others, and over how many epochs."""
    cube = Cube(**sizes)
    settings = arguments(cube) | changed
    reading = everything(folder, groups)
    blocks = 1 if within is None else cube.shape.data // within
    with Loader(reading, **settings, blocks=blocks) as loader:
        wanted = list(loader)
    data, exchange = exchanged(folder, cube, within, groups)
    with Loader(data, **settings, exchange=exchange, every=every) as loader:
        steps = list(loader)
    exchange.close()
    assert len(steps) == len(wanted) == settings["end_step"] - settings["start_step"]
    return [
        [step.index for step, other in zip(steps, wanted, strict=True) if not same_step(step, other)],
        exchange.received_bytes,
        len({epoch for step in steps for epoch in step.digests}),
    ]


@pytest.mark.parametrize(
    ("sizes", "every", "within", "groups"),
    [
        ({"data": 8}, 1, None, 1),
        pytest.param({"data": 4, "z": 2}, 4, None, 1, marks=pytest.mark.slow),
        pytest.param({"data": 2, "x": 2, "y": 2}, 2, None, 2, marks=pytest.mark.slow),
        ({"data": 4, "x": 2}, 3, 2, 2),
    ],
)
def test_batches_are_those_of_ranks_that_read_everything(
    folder: Path, sizes: dict[str, int], every: int, within: int | None, groups: int
) -> None:
    results = run_ranks(8, _compare, folder, sizes, every, within, groups, {})
    for wrong, _, epochs in results:
        assert wrong == []
        assert epochs > 1  # the lengths of a second epoch travelled too
    assert max(received for _, received, _ in results) > 0


@pytest.mark.parametrize(
    ("batch", "start", "end", "every"),
    [
        (4, 0, 60, 1),  # at the end of an epoch some ranks have packs of one epoch only
        pytest.param(4, 20, 80, 3, marks=pytest.mark.slow),  # and where a run begins there
        (272, 0, 4, 1),  # a step of several epochs
    ],
)
@pytest.mark.slow
def test_ranks_may_have_packs_of_different_epochs(folder: Path, batch: int, start: int, end: int, every: int) -> None:
    changed = {"global_batch": batch, "start_step": start, "end_step": end}
    assert everything(folder, 1).packs_per_epoch % 4, "or no step of four has packs of two epochs"
    for wrong, _, epochs in run_ranks(4, _compare, folder, {"data": 4}, every, None, 1, changed):
        assert wrong == []
        assert epochs > 2


def _content(folder: Path) -> list[list[tuple[int, ...]]]:
    """The sequences that this rank has in each global batch."""
    cube = Cube(data=8)
    data, exchange = exchanged(folder, cube, None, 1)
    with Loader(data, **{**arguments(cube), "start_step": 0, "packs_per_rank": 2}, exchange=exchange) as loader:
        content = [sequences_in(step) for step in loader]
    exchange.close()
    return content


def sequences_in(step: TrainBatch) -> list[tuple[int, ...]]:
    found = []
    for batch in step.batches:
        ids = batch.ids.clone()
        known = batch.masked >= 0
        ids[batch.masked[known]] = batch.masked_labels[known]
        pieces = ids.split(list(batch.sequences.lengths))
        found += [tuple(piece.tolist()) for piece in pieces if piece[0] == VOCABULARY.cls]
    return found


def test_the_sequences_of_every_global_batch_are_unchanged(folder: Path) -> None:
    together = run_ranks(8, _content, folder)
    reading = everything(folder, 1)
    alone = {"shape": CubeShape(), "rank": 0}
    with Loader(reading, global_batch=BATCH, end_step=1 + STEPS, **alone) as loader:
        for index, step in enumerate(loader):
            mine = sorted(sequence for rank in together for sequence in rank[index])
            assert mine == sorted(sequences_in(step))
            assert len(mine) == step.sequences
            assert min(len(rank[index]) for rank in together) > 0


def _one_fails(folder: Path) -> str:
    cube = Cube(data=4)
    data, exchange = exchanged(folder, cube, None, 1)
    if cube.rank == 2:

        def fails(chosen: np.ndarray) -> Any:
            raise OSError("the disk is gone")

        drawing = data.epochs[0].drawing
        object.__setattr__(drawing.own, "segments", fails)  # type: ignore[attr-defined]
    else:
        data.epochs[0]
    loader = Loader(data, **{**arguments(cube), "start_step": 0}, exchange=exchange, every=2)
    try:
        next(loader)
    except (PeerError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_cannot_read_is_named_to_all(folder: Path) -> None:
    told = run_ranks(4, _one_fails, folder, timeout=60)
    assert told.pop(2) == "OSError: the disk is gone"
    for line in told:
        assert line.startswith("PeerError")
        assert "rank 2" in line
        assert "the disk is gone" in line


def _one_dies(folder: Path) -> str:
    cube = Cube(data=4)
    data, exchange = exchanged(folder, cube, None, 1)
    settings = {**arguments(cube), "start_step": 0, "end_step": None}
    loader = Loader(data, **settings, exchange=exchange, every=2, lookahead=1)
    try:
        for step in loader:
            if step.index == 3 and cube.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_the_loaders_of_the_others(folder: Path) -> None:
    told = run_survivors(4, 2, _one_dies, folder)
    assert sorted(told) == [0, 1, 3]
    for line in told.values():
        assert line.startswith("rank 2 (data 2 of 4) does not answer (dead or stopped)")


def _closes(folder: Path) -> float:
    """Seconds that a rank takes to close a loader whose round no peer joins."""
    cube = Cube(data=2)
    data, exchange = exchanged(folder, cube, None, 1)
    data.epochs[0]
    seconds = 0.0
    if cube.rank == 0:
        loader = Loader(data, **arguments(cube), exchange=exchange, lookahead=1)
        time.sleep(0.3)
        start = time.monotonic()
        loader.close()
        seconds = time.monotonic() - start
    dist.barrier()
    return seconds


def test_closing_waits_for_no_peer(folder: Path) -> None:
    assert max(run_ranks(2, _closes, folder)) < 10  # and not the minute that a round waits for its peers


def test_without_other_ranks_nothing_is_sent(folder: Path) -> None:
    cube = Cube.single()
    data, exchange = exchanged(folder, cube, None, 1)
    with (
        Loader(data, **arguments(cube), exchange=exchange, every=2) as loader,
        Loader(everything(folder, 1), **arguments(cube)) as plain,
    ):
        assert all(same_step(step, other) for step, other in zip(loader, plain, strict=True))
    assert exchange.near.received_bytes == 0


def test_what_cannot_be_is_named(folder: Path) -> None:
    shards: list[IndexedDataset | None] = [IndexedDataset(folder / "shard-0"), None]
    alone = HostAllToAll.along(Cube.single(), "data")
    with pytest.raises(ValueError, match=r"data rank \b0\b of \b1\b needs shards \b0\b to \b1\b of 2, and shard \b1\b"):
        RemotePairs(shards, alone, max_length=48, seed=5)
    with pytest.raises(ValueError, match=r"\b8\b.*data=3"):
        shards_of(8, 3, 0)
    with pytest.raises(ValueError, match=r"within.*1.*0 and None"):
        ExchangeOptions(every=0)
    with pytest.raises(ValueError, match="within 3 of data=8 ranks"):
        check_within(ExchangeOptions(within=3), 8, 8)
    with pytest.raises(ValueError, match="Got 2 groups"):
        check_within(ExchangeOptions(within=2), 8, 2)
    check_within(ExchangeOptions(within=2), 8, 4)
    check_within(ExchangeOptions(within=16), 8, 1)

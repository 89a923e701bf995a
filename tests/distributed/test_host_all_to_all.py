"""Arrays between processes: what arrives, next to a main thread that is busy, and who is named when one does not."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube
from tensor3d.distributed.host_all_to_all import HostAllToAll, PeerError
from tests.ranks import run_ranks

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "i8", "f2", "f4", "f8", "c16", "S3", "M8[s]", "i4,f8"]
SHORT = timedelta(seconds=20)

# --- one process ---------------------------------------------------------------------------------------------------


def test_one_member_copies_and_needs_no_process_group() -> None:
    array = np.arange(3)
    with HostAllToAll.along(Cube.single(), "data", within=1) as peers:
        assert (peers.index, peers.size, peers.ranks) == (0, 1, (0,))
        for received in (peers.all_to_all([array]), peers.all_gather(array, sizes=[3])):
            assert len(received) == 1
            received[0][0] = 7
        assert array.tolist() == [0, 1, 2]
        assert (peers.rounds, peers.received_bytes) == (2, 0)
    peers.close()
    with pytest.raises(ValueError, match="the peers are closed"):
        peers.all_gather(array)


def test_one_member_that_has_given_up_says_so() -> None:
    with HostAllToAll.along(Cube.single(), "data") as peers:
        peers.abort("the disk is full")
        with pytest.raises(PeerError, match=r"^rank \b0\b \(data \b0\b of 1\).*0.*full$"):
            peers.all_gather(np.arange(3))


def test_arguments_that_cannot_be_sent() -> None:
    peers = HostAllToAll.along(Cube.single(), "data")
    array = np.arange(3)
    for parts, sizes, message in (
        ([array, array], None, "an array for each of the 1 peers is needed. Got 2"),
        ([np.zeros((2, 2))], None, r"have one dim .* Got \(2, 2\) of float64"),
        ([np.array(["a", None], dtype=object)], None, "arrays of object cannot be sent"),
        ([array], [2], r"sizes are 1 numbers .* this rank's own, 3. Got \[2\]"),
        ([array], [3, 0], r"Got \[3, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            peers.all_to_all(parts, sizes=sizes)
    assert peers.rounds == 0
    with pytest.raises(ValueError, match=r"within.*1.*2"):
        HostAllToAll.along(Cube.single(), "data", within=2)
    with pytest.raises(ValueError, match=r"timeout must be positive\. Got 0 s"):
        HostAllToAll.along(Cube.single(), "data", timeout=timedelta(0))


# --- what arrives --------------------------------------------------------------------------------------------------


def parcel(source: int, target: int, dtype: str, round: int = 0) -> Any:
    """What `source` sends `target`: of another size for each, and nothing for some."""
    size = (3 * source + 5 * target + round) % 7
    values = np.random.default_rng([source, target, round]).integers(0, 100, size=size)
    return values.astype("i8").astype(dtype) if dtype != "i4,f8" else values.astype("i4").astype(dtype)


def _exchange(dtypes: list[str]) -> tuple[int, int]:
    peers = HostAllToAll.along(Cube(data=4, device="cpu"), "data", timeout=SHORT)
    me, everyone = peers.index, range(peers.size)
    assert (peers.ranks, me, peers.size) == ((0, 1, 2, 3), dist.get_rank(), 4)
    expected_bytes = 0
    for dtype in dtypes:
        due = [parcel(peer, me, dtype) for peer in everyone]
        parts = [parcel(me, peer, dtype) for peer in everyone]
        for sizes in (None, [len(array) for array in due]):
            for array, wanted in zip(peers.all_to_all(parts, sizes=sizes), due, strict=True):
                np.testing.assert_array_equal(array, wanted)
                assert array.dtype == wanted.dtype
                assert array.flags.aligned
                assert array.flags.writeable
        for array, peer in zip(peers.all_gather(parcel(me, me, dtype)), everyone, strict=True):
            np.testing.assert_array_equal(array, parcel(peer, peer, dtype))
        for peer in set(everyone) - {me}:
            expected_bytes += 2 * due[peer].nbytes + parcel(peer, peer, dtype).nbytes
    strided = np.arange(20)[::3]
    assert [array.tolist() for array in peers.all_gather(strided)] == [strided.tolist()] * 4
    expected_bytes += 3 * strided.nbytes
    nothing = peers.all_to_all([strided[:0]] * 4)
    assert [len(array) for array in nothing] == [0] * 4
    assert peers.received_bytes == expected_bytes
    assert peers.rounds == 3 * len(dtypes) + 2
    peers.close()
    return peers.rounds, threading.active_count()


def test_uneven_and_empty_arrays_of_every_type() -> None:
    assert run_ranks(4, _exchange, DTYPES) == [(3 * len(DTYPES) + 2, 1)] * 4


def _lines() -> list[list[int]]:
    cube = Cube(2, 1, 2, data=2, device="cpu")
    along, across = HostAllToAll.along(cube, "data", timeout=SHORT), HostAllToAll.along(cube, "x", timeout=SHORT)
    alone = HostAllToAll.along(cube, "data", within=1)
    rank = np.array([cube.rank])
    assert along.ranks == cube.axis("data").ranks
    result = [np.concatenate(peers.all_gather(rank)).tolist() for peers in (along, across, alone, along)]
    assert result == [list(along.ranks), list(across.ranks), [cube.rank], list(along.ranks)]
    return result


def test_every_line_of_the_cube_has_its_own_peers() -> None:
    results = run_ranks(8, _lines)
    assert sorted({tuple(result[0]) for result in results}) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert sorted({tuple(result[1]) for result in results}) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def _blocks() -> list[int]:
    cube = Cube(data=4, device="cpu")
    with pytest.raises(ValueError, match=r"within.*4.*3"):
        HostAllToAll.along(cube, "data", within=3)
    with (
        HostAllToAll.along(cube, "data", within=2, timeout=SHORT) as near,
        HostAllToAll.along(cube, "data", timeout=SHORT) as all4,
    ):
        assert near.index == cube.rank % 2
        assert near.ranks == ((0, 1) if cube.rank < 2 else (2, 3))
        assert [int(array[0]) for array in all4.all_gather(np.array([cube.rank]))] == [0, 1, 2, 3]
        assert [peer.tolist() for peer in near.all_to_all([np.array([cube.rank, i]) for i in range(2)])] == [
            [rank, near.index] for rank in near.ranks
        ]
        return np.concatenate(near.all_gather(np.array([cube.rank]))).tolist()


def test_blocks_of_an_axis_keep_to_themselves() -> None:
    assert run_ranks(4, _blocks) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _beside_training(rounds: int) -> None:
    cube = Cube(1, 1, 2, data=2, device="cpu")
    peers = HostAllToAll.along(cube, "data", timeout=SHORT)
    rank = dist.get_rank()
    together = []

    def feed(number: int) -> None:
        due = [parcel(peer, peers.index, "i4", number) for peer in range(2)]
        received = peers.all_to_all([parcel(peers.index, peer, "i4", number) for peer in range(2)])
        for array, wanted in zip(received, due, strict=True):
            np.testing.assert_array_equal(array, wanted)
        together.append(number)

    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(feed, number) for number in range(rounds)]
        for step in range(rounds):
            total = torch.full((1000,), float(rank + step))
            dist.all_reduce(total)
            assert total[0] == 6 + 4 * step
            if step % 50 == 0:
                dist.new_group([0, 1, 2, 3])  # waits in the job's store, over the main thread's connection
        for future in ahead:
            future.result(timeout=60)
    assert together == list(range(rounds))


def test_rounds_in_a_thread_while_the_main_thread_trains() -> None:
    run_ranks(4, _beside_training, 150)


def _out_of_step(case: str) -> str:
    peers = HostAllToAll.along(Cube(data=3, device="cpu"), "data", timeout=SHORT)
    odd, array = peers.index == 1, np.arange(4, dtype=np.int32)

    def calls() -> None:
        peers.all_gather(array)
        if case == "type":
            peers.all_gather(array.view(np.uint32) if odd else array)
        elif case == "call":
            peers.all_gather(array) if odd else peers.all_to_all([array] * 3)
        else:
            peers.all_gather(array[:1] if odd else array, sizes=[4, 1, 4] if odd else [4, 4, 4])
        # The odd one has got what it expected, and learns of it now.
        peers.all_gather(array)

    with pytest.raises(PeerError) as caught:
        calls()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "type",
            r"\) sent 4 elements of <u4 for all_gather in round 2 where 4 elements of <i4 for all_gather in round 2",
        ),
        pytest.param(
            "call",
            r"\) sent 4 elements of <i4 for all_gather in round 2 where 4 elements of <i4 for all_to_all in round 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "size",
            r"\) sent 1 elements of <i4 for all_gather in round 2 where 4 elements of <i4 for all_gather in round 2",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda text: text if text.isalpha() else "",
)
def test_peers_out_of_step_are_told(case: str, message: str) -> None:
    errors = run_ranks(3, _out_of_step, case)
    assert all("rank 1 (data 1 of 3)" in error for error in errors), errors
    assert any(re.search(rf"rank 1 \(data 1 of 3{message} was due", error) for error in errors) or case != "size", (
        errors
    )

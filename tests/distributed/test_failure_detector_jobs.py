"""Peers that die, stop, give up or stay away, on real gloo ranks: all others name them, and none of them hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tensor3d import Cube
from tensor3d.distributed.host_all_to_all import HostAllToAll, PeerError
from tests.ranks import run_ranks, run_survivors

ARRAY = np.arange(1000)


def failure(call: Callable[[], object]) -> tuple[str, float]:
    """The message of the PeerError, and after how many seconds it came."""
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def _lost(how: signal.Signals, seconds: float) -> tuple[str, float]:
    """Rank 5 of eight in two lines is lost after its second round; rank 7 of its line is not in a round then."""
    cube = Cube(2, data=4, device="cpu")
    with HostAllToAll.along(cube, "data", timeout=timedelta(seconds=seconds)) as peers:
        for _ in range(2):
            peers.all_gather(ARRAY)
        dist.barrier()
        time.sleep(0.3)  # notes are written in the background
        if cube.rank == 5:
            os.kill(os.getpid(), how)
        if cube.coordinate["x"] == 0:
            # The other line knows nothing of it.
            for _ in range(5):
                peers.all_gather(ARRAY)
            return "", 0.0
        if cube.rank == 7:
            time.sleep(seconds + 3 if how == signal.SIGSTOP else 2.5)
        first = failure(lambda: peers.all_gather(ARRAY))
        again = failure(lambda: peers.all_to_all([ARRAY] * 4))
        assert again[0] == first[0]
        assert again[1] < 0.1
        return first


def check_named(results: dict[int, tuple[str, float]], longest: float) -> None:
    assert all(results[rank] == ("", 0.0) for rank in (0, 2, 4, 6))
    assert len({results[rank][0] for rank in (1, 3, 7)}) == 1, results
    message = results[1][0]
    assert message.startswith("rank 5 (data 2 of 4) does not answer (dead or stopped), last seen after round 2; rank ")
    assert max(results[1][1], results[3][1]) < longest
    assert results[7][1] < 0.1, "who was not in a round learns of it without waiting"


@pytest.mark.slow
def test_a_killed_rank_is_named_by_all_in_a_moment() -> None:
    check_named(run_survivors(8, 5, _lost, signal.SIGKILL, 60.0), longest=4)


@pytest.mark.slow
def test_a_stopped_rank_is_named_when_the_time_is_over() -> None:
    results = run_survivors(8, 5, _lost, signal.SIGSTOP, 1.5)
    check_named(results, longest=1.5 + 4)
    assert "it did not end within 1.5 s" in results[1][0]


def _killed_inside() -> tuple[str, float]:
    """A rank dies in a round that it has entered, of which the others may have got its data already."""
    peers = HostAllToAll.along(Cube(data=3, device="cpu"), "data", timeout=timedelta(seconds=30))
    peers.all_gather(ARRAY)
    if peers.index == 2:
        assert peers._roll is not None
        peers._roll.note(2, inside=True)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: peers.all_gather(ARRAY))


@pytest.mark.slow
def test_the_round_in_which_it_died_is_told() -> None:
    results = run_survivors(3, 2, _killed_inside)
    assert {text.partition(";")[0] for text, _ in results.values()} == {
        "rank 2 (data 2 of 3) does not answer (dead or stopped), last seen in round 2"
    }


def _give_up(by_error: bool) -> tuple[str, float]:
    cube = Cube(data=4, device="cpu")
    peers = HostAllToAll.along(cube, "data", timeout=timedelta(seconds=30))
    peers.all_gather(ARRAY)
    dist.barrier()
    if peers.index == 1:
        time.sleep(0.3)
        if by_error:
            with pytest.raises(KeyError), peers:
                raise KeyError("shard 7")
            return "", 0.0
        peers.abort("shard 7 is damaged")
        peers.abort("said once")
    if peers.index == 3:
        time.sleep(0.9)
    return failure(lambda: peers.all_gather(ARRAY))


@pytest.mark.parametrize("by_error", [False, True])
def test_one_that_gives_up_is_named_with_its_reason(by_error: bool) -> None:
    results = run_ranks(4, _give_up, by_error)
    reason = "KeyError: 'shard 7'" if by_error else "shard 7 is damaged"
    texts = {results[rank][0] for rank in (0, 2, 3)}
    assert texts == {f"rank 1 (data 1 of 4) gave up after round 1: {reason}"}
    assert max(results[0][1], results[2][1]) < 0.3 + 1.0
    assert results[3][1] < 0.1
    if not by_error:
        assert results[1][0] in texts


def _absent(case: str) -> tuple[str, float]:
    cube = Cube(data=3, device="cpu")

    def make() -> HostAllToAll:
        return HostAllToAll.along(cube, "data", timeout=timedelta(seconds=2))

    dist.barrier()
    if case == "construction":
        if cube.rank == 1:
            time.sleep(3)
            return "", 0.0
        return failure(make)
    peers = make()
    peers.all_gather(ARRAY)
    if cube.rank == 1:
        if case == "closed":
            peers.close()
        else:
            time.sleep(5)
        return "", 0.0
    return failure(lambda: peers.all_gather(ARRAY))


@pytest.mark.parametrize(
    ("case", "text", "longest"),
    [
        pytest.param(
            *("construction", "rank 1 (data 1 of 3) did not come within 2 s; every rank of the job must call", 3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("away", "rank 1 (data 1 of 3) is alive but did not come to round 2, last seen after round 1; rank ", 4.5),
            marks=pytest.mark.slow,
        ),
        ("closed", "rank 1 (data 1 of 3) ended or closed its peers after round 1; rank ", 2),
    ],
    ids=["construction", "away", "closed"],
)
def test_one_that_stays_away_is_named(case: str, text: str, longest: float) -> None:
    results = run_ranks(3, _absent, case)
    for rank in (0, 2):
        assert results[rank][0].startswith(text)
        assert results[rank][1] < longest


def _closed_from_outside() -> tuple[str, bool]:
    peers = HostAllToAll.along(Cube(data=2, device="cpu"), "data", timeout=timedelta(seconds=30))
    if peers.index == 0:
        threading.Timer(0.3, peers.close).start()
    else:
        time.sleep(0.9)
    text, seconds = failure(lambda: peers.all_gather(ARRAY))
    return text, seconds < 2


def test_closing_ends_a_round_that_another_thread_waits_in() -> None:
    ours, theirs = run_ranks(2, _closed_from_outside)
    assert ours == ("the peers were closed while a round was under way", True)
    assert theirs == (
        "rank 0 (data 0 of 2) gave up in round 1: ended or closed its peers in the middle of a round",
        True,
    )


def _hosted(how: signal.Signals) -> tuple[str, float]:
    """The job's store lives in rank 0, as it does without torchrun, and rank 0 is lost."""
    rank, old = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        old.set("port of rank 0", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(old.get("port of rank 0")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    peers = HostAllToAll.along(Cube(data=3, device="cpu"), "data", timeout=timedelta(seconds=1.5))
    peers.all_gather(ARRAY)
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), how)
    return failure(lambda: peers.all_gather(ARRAY))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_lost_with_its_host_is_said(how: signal.Signals) -> None:
    results = run_survivors(3, 0, _hosted, how)
    what = "is gone" if how == signal.SIGKILL else "does not answer, its host is stopped or out of reach"
    for text, seconds in results.values():
        assert text.startswith(f"the job's store {what} (rank 0 hosts it, unless torchrun does")
        assert seconds < 6


# The end of a process whose peer is stopped: it must neither wait for gloo nor crash.
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np
import torch.distributed as dist
from tensor3d import Cube
from tensor3d.distributed.host_all_to_all import HostAllToAll
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
peers = HostAllToAll.along(Cube(data=3, device="cpu"), "data", timeout=timedelta(seconds=3))
peers.all_gather(np.arange(3))
if rank == 2:
    open(sys.argv[3], "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)
peers.all_gather(np.arange(3))
"""


@pytest.mark.slow
def test_a_process_ends_by_its_error_though_its_transfer_is_stuck(tmp_path: Path) -> None:
    stopped, logs = tmp_path / "stopped", [(tmp_path / f"log-{rank}").open("w+") for rank in range(3)]
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), str(stopped)], stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=150) for process in processes[:2]]
        seconds = time.time() - stopped.stat().st_mtime
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    errors = [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]
    assert codes == [1, 1], errors
    for error in errors:
        assert "tensor3d.distributed.host_all_to_all.PeerError: rank 2 (data 2 of 3) does not answer" in error
    assert seconds < 60, "gloo's own time-out, of half an hour, was waited for"

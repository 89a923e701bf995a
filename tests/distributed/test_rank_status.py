"""Who is blamed, without any process: the dead before those who failed, these before the living."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from tensor3d.distributed import failure_detector
from tensor3d.distributed.failure_detector import FailureDetector
from tensor3d.distributed.rank_status import ProcessId, RankStatus, blame, raised_line, source_line

NAMES = [f"rank {rank}" for rank in range(4)]
HERE = RankStatus(number=9, step=12, doing="forward", issued=30, waiting=(30, "y", "all-gather"), idle=61.2)
WITNESS = "first rank 0 in collective 30 (all-gather over y), step 12, forward"


@pytest.mark.parametrize(
    ("last", "silent", "sentence"),
    [
        (
            replace(HERE, step=11, waiting=None),
            "its process is gone",
            f"rank 3 does not answer (its process is gone), last seen in step 11, forward; 3 wait, {WITNESS}",
        ),
        (
            replace(HERE, left="failed", reason="ValueError: bad shard"),
            "its process is gone",
            f"rank 3 failed in step 12, forward: ValueError: bad shard; 3 wait, {WITNESS}",
        ),
        (
            replace(HERE, left="cut off", reason="gloo: reset"),
            "its process is gone",
            f"rank 3 lost a collective in step 12, forward: gloo: reset; 3 wait, {WITNESS}; no rank is missing",
        ),
        (replace(HERE, left="closed"), "", f"rank 3 has ended in step 12, forward; 3 wait, {WITNESS}"),
        (
            replace(HERE, doing="data", waiting=None, issued=29, idle=63, line="data.py:57 in next"),
            "",
            "rank 3 is alive in no collective for 63 s, 29 issued, step 12, data, at data.py:57 in next; "
            f"3 wait, {WITNESS}",
        ),
        (
            replace(HERE, issued=28, waiting=(28, "x", "reduce-scatter")),
            "",
            "rank 3 is alive in collective 28 (reduce-scatter over x) for 61 s, 28 issued, step 12, forward; "
            f"3 wait, {WITNESS}",
        ),
        (
            replace(HERE, waiting=(30, "x", "all-gather")),
            "",
            "ranks wait in different collectives: rank 0 is alive in collective 30 (all-gather over y) for 61 s",
        ),
        (
            HERE,
            "",
            "no rank is missing or behind. Look for errors of the network or of a device; rank 0, like all others, is "
            "alive in collective 30",
        ),
    ],
)
def test_the_one_at_fault_is_named(last: RankStatus, silent: str, sentence: str) -> None:
    assert blame(NAMES, [HERE, HERE, HERE, last], {3: silent} if silent else {}).startswith(sentence)


def test_a_victim_that_has_ended_is_not_blamed_beside_the_dead() -> None:
    beats = [HERE, replace(HERE, left="cut off", reason="gloo: reset"), HERE, replace(HERE, left="closed")]
    sentence = blame(NAMES, beats, {1: "its process is gone", 2: "its process is gone"})
    assert sentence.startswith("rank 2 does not answer (its process is gone), last seen in step 12, forward; 3 wait")
    assert "rank 1" not in sentence


LOST = replace(HERE, waiting=None, line="norm.py:118 in backward", left="cut off", reason="gloo: timed out")


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (
            replace(HERE, doing="data", waiting=None, issued=29, line="data.py:57 in next"),
            "rank 3 is alive in no collective for 61 s, 29 issued, step 12, data, at data.py:57 in next; ",
        ),
        (
            replace(HERE, issued=29, waiting=(29, "x", "reduce-scatter")),
            "rank 3 is alive in collective 29 (reduce-scatter over x) for 61 s, 29 issued, step 12, forward; ",
        ),
        (replace(HERE, left="closed", waiting=None), "rank 3 has ended in step 12, forward; "),
        (HERE, ""),
    ],
)
def test_the_victim_of_a_time_out_is_the_last_to_be_blamed(last: RankStatus, sentence: str) -> None:
    lost = "rank 0 lost a collective in step 12, forward, at norm.py:118 in backward: gloo: timed out; rank 2 lost "
    blamed = blame(NAMES, [LOST, HERE, LOST, last], {})
    assert blamed.startswith(sentence or lost)
    assert lost in blamed
    assert blamed.endswith("no rank is missing or behind. Look for errors of the network or of a device") == (
        not sentence
    )


def test_where_nobody_waits_the_last_is_named() -> None:
    """On a GPU the main thread waits for the device, and for no collective of the host."""
    beats = [replace(HERE, waiting=None, issued=issued) for issued in (30, 28, 30, 30)]
    assert blame(NAMES, beats, {}).startswith("rank 1 is alive in no collective for 61 s, 28 issued")


def test_of_many_some_are_named() -> None:
    names = [f"rank {i}" for i in range(100)]
    sentence = blame(names, [HERE] * 100, dict.fromkeys(range(1, 100), "no heartbeat for 3.1 s"))
    assert sentence.count("no heartbeat for 3.1 s") == 8
    assert "; and 91 more; 1 wait, first rank 0 in" in sentence


def test_a_beat_travels() -> None:
    beat = replace(HERE, process=ProcessId.own(), left="failed", reason='"quoted"\nand more')
    assert RankStatus.decode(beat.encode().encode()) == beat
    assert RankStatus.decode(RankStatus().encode().encode()) == RankStatus()


@pytest.mark.skipif(not ProcessId.own().machine, reason="processes are looked up in /proc")
def test_processes_are_looked_up() -> None:
    here = ProcessId.own()
    assert here.look(here.machine) == "alive"
    assert here.look("elsewhere") == here.look("") == "unknown"
    assert replace(here, started=here.started + 1).look(here.machine) == "gone", "another process got the number"
    child = subprocess.Popen(["sleep", "60"])
    number = child.pid
    try:
        process = ProcessId.of(number)
        assert process.number == number
        assert process.look(here.machine) == "alive"
        os.kill(number, signal.SIGSTOP)
        os.waitid(os.P_PID, number, os.WSTOPPED | os.WNOWAIT)
        assert process.look(here.machine) == "stopped"
        os.kill(number, signal.SIGKILL)
        os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)
        assert process.look(here.machine) == "gone", "not buried yet"
    finally:
        child.kill()
        child.wait()
    assert process.look(here.machine) == "gone"


def test_the_line_is_in_our_source() -> None:
    waiting, ended = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        ended.wait()  # deep inside threading.py

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    time.sleep(0.05)
    assert thread.ident is not None
    assert source_line(thread.ident).startswith("test_rank_status.py:")
    assert source_line(thread.ident).endswith(" in wait")
    ended.set()
    thread.join()
    assert source_line(thread.ident) == ""


def test_the_line_of_an_error_is_in_our_source() -> None:
    def loses() -> None:
        int("no number that a library could read")

    assert raised_line(None) == ""
    with pytest.raises(ValueError, match="no number") as caught:
        loses()
    assert raised_line(caught.value).startswith("test_rank_status.py:")
    assert raised_line(caught.value).endswith(" in loses")


# Ranks of other machines, of whom heartbeats are all there is, as threads over a store in memory.


def beats(store: dist.Store, rank: int, ranks: int = 3) -> FailureDetector:
    heart = FailureDetector(store, NAMES[:ranks], rank, grace=0.3, note=lambda: HERE, woken=lambda: None)
    heart.start()
    return heart


def until(heart: FailureDetector, name: str, seconds: float = 5.0) -> str:
    deadline = time.monotonic() + seconds
    while not getattr(heart, name):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return str(getattr(heart, name))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessId, "own", ProcessId)


@pytest.mark.usefixtures("elsewhere")
def test_without_heartbeats_a_rank_is_dead_and_with_them_it_is_not() -> None:
    store = dist.HashStore()
    hearts = [beats(store, rank) for rank in range(3)]
    hearts[0].look(judge=False, anyway=True)
    time.sleep(0.6)
    assert hearts[0].broken == ""
    store.set("beat/2", RankStatus(number=1).encode())
    hearts[2]._store = dist.HashStore()  # it is heard no more
    start = time.monotonic()
    assert until(hearts[0], "broken").startswith("rank 2 does not answer (no heartbeat for ")
    assert time.monotonic() - start > 0.2
    for heart in hearts:
        heart.close()


@pytest.mark.usefixtures("elsewhere")
def test_one_judges_when_all_are_heard_of_and_all_adopt_it() -> None:
    store = dist.HashStore()
    hearts = [beats(store, rank) for rank in range(2)]  # the third has never come
    hearts[0].look(judge=True)
    verdict = until(hearts[0], "verdict")
    # After 0.3 s, or when a busy machine comes to it.
    said = r"rank 2 does not answer \(no heartbeat for \d+\.\d s\), last seen in step 0, starting; 2 wait"
    assert re.match(said, verdict), verdict
    assert until(hearts[1], "verdict") == verdict
    assert hearts[1].explain("gloo: reset").startswith("rank 2 does not answer (no heartbeat for ")
    for heart in hearts:
        heart.close()
        assert not heart.alive


class Gone(dist.HashStore):
    """A store whose host can go."""

    gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise dist.DistNetworkError("Broken pipe")
        return super().check(keys)


class Reads(dist.HashStore):
    """A store that notes who reads the heartbeats of all."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[int] = set()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.readers.add(threading.get_ident())
        return super().multi_get(keys)


def test_a_store_that_is_gone_is_told() -> None:
    store = Gone()
    heart = beats(store, 0, 1)
    store.gone = True
    assert until(heart, "lost") == "the job's store is gone, for its host has ended (Broken pipe)"
    assert heart.explain("gloo: closed") == ""
    heart.close()


def test_many_ranks_beat_more_slowly() -> None:
    def times(ranks: int) -> tuple[float, float, float]:
        names = [f"rank {i}" for i in range(ranks)]
        heart = FailureDetector(dist.HashStore(), names, 0, grace=3.0, note=RankStatus, woken=lambda: None)
        return heart.interval, heart.grace, heart.deaf

    assert times(1024) == (1.0, 3.0, 60.0)
    assert times(4096) == pytest.approx((1.7, 5.1, 60.0), abs=0.1)
    assert times(12_000) == pytest.approx((5.0, 15.0, 60.0)), "still less than the 25 s that a signal leaves"
    assert times(120_000) == pytest.approx((50.0, 150.0, 150.0)), "a store that is asked so rarely is not deaf"


@pytest.mark.usefixtures("elsewhere")
def test_in_a_large_job_some_look_and_the_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "_LARGE", 2)
    monkeypatch.setattr(failure_detector, "LOOKERS", 1)
    store = Reads()
    hearts = [beats(store, rank, 4) for rank in range(3)]  # the fourth has never come
    for heart in hearts:
        heart.look(judge=False, anyway=True)
    assert len({until(heart, "broken") for heart in hearts}) == 1
    assert "rank 3 does not answer (no heartbeat for " in hearts[0].broken
    assert hearts[2].explain("gloo: reset") == hearts[0].broken
    assert len(store.readers) == 1
    for heart in hearts:
        heart.close()

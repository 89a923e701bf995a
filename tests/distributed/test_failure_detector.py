"""Who is blamed, without any process: the silent before those who speak, and nobody for failing after another."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tensor3d.distributed.failure_detector import GRACE, PeerMonitor, blame_peer
from tensor3d.distributed.job_store import KeyedStore
from tensor3d.distributed.rank_status import RankStatus

NAMES = [f"rank {2 * i} (data {i} of 3)" for i in range(3)]


def at(step: int, doing: str = "after", **values: Any) -> RankStatus:
    return RankStatus(step=step, doing=doing, **values)


HERE = at(12, "in")
BROKEN = at(12, "in", left="cut off", reason="gloo: connection closed")
LATE = at(12, "in", left="cut off", reason="it did not end within 5 s", late=True)


@pytest.mark.parametrize(
    ("third", "silent", "first", "verdict"),
    [
        (
            HERE,
            [2],
            BROKEN,
            "rank 4 (data 2 of 3) does not answer (dead or stopped), last seen in round 12; "
            "rank 0 (data 0 of 3) in round 12: gloo: connection closed",
        ),
        (
            at(0),
            [2],
            LATE,
            "rank 4 (data 2 of 3) does not answer (dead or stopped), last seen before round 1; rank 0",
        ),
        (
            at(11, left="failed", reason="bad shard"),
            [],
            BROKEN,
            "rank 4 (data 2 of 3) gave up after round 11: bad shard",
        ),
        (
            at(11, left="closed"),
            [],
            BROKEN,
            "rank 4 (data 2 of 3) ended or closed its peers after round 11; rank 0 (data 0 of 3) in round 12",
        ),
        (
            at(11),
            [],
            LATE,
            "rank 4 (data 2 of 3) is alive but did not come to round 12, last seen after round 11; rank 0",
        ),
        # Busy elsewhere is no fault where something broke.
        (at(11), [], BROKEN, "rank 0 (data 0 of 3) in round 12: gloo: connection closed; no peer"),
        # Left in good order after the round that is at stake.
        (at(12, left="closed"), [], BROKEN, "rank 0 (data 0 of 3) in round 12: gloo: "),
        # A victim, also if its process has ended since.
        (at(12, "in", left="cut off"), [2], BROKEN, "rank 0 (data 0 of 3) in round 12: gloo: connection closed; no"),
        (
            HERE,
            [],
            LATE,
            "rank 0 (data 0 of 3) in round 12: it did not end within 5 s; no peer is missing. Look for errors",
        ),
    ],
)
def test_the_one_at_fault_is_named(third: RankStatus, silent: list[int], first: RankStatus, verdict: str) -> None:
    sentence = blame_peer(NAMES, [first, HERE, third], silent)
    assert sentence.startswith(verdict)
    assert "rank 2" not in sentence


def test_silence_weighs_more_than_a_message() -> None:
    left = at(12, left="failed", reason="all_reduce failed")
    sentence = blame_peer(NAMES, [BROKEN, left, at(7, "in")], [2])
    assert sentence == (
        "rank 4 (data 2 of 3) does not answer (dead or stopped), last seen in round 7; "
        "rank 2 (data 1 of 3) gave up after round 12: all_reduce failed"
    )


def test_of_many_some_are_named() -> None:
    names = [f"rank {i}" for i in range(100)]
    sentence = blame_peer(names, [BROKEN] + [at(3)] * 99, range(1, 100))
    assert sentence.count("last seen after round 3") == 8
    assert " and 91 more; rank 0 in round 12" in sentence


# Roll calls of threads, over a store in memory.


def roll_calls(members: int) -> tuple[dist.HashStore, list[PeerMonitor]]:
    store = dist.HashStore()
    rolls = [PeerMonitor(store, NAMES[:members], index) for index in range(members)]
    threads = [threading.Thread(target=roll.muster, args=(timedelta(seconds=5),)) for roll in rolls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return store, rolls


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(have_ended)


def hearts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def have_ended() -> bool:
    if hearts():
        gc.collect()
    return not hearts()


def test_a_thread_ends_with_its_object() -> None:
    _, rolls = roll_calls(2)
    assert len(hearts()) == 2
    rolls.pop().close()
    assert len(hearts()) == 1
    rolls.clear()  # nobody closes the other one
    until(have_ended)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_adopt_one_verdict_at_once_where_all_answer() -> None:
    _, rolls = roll_calls(3)
    for roll in rolls[:2]:
        roll.note(4, inside=True)
    start = time.monotonic()
    verdict = rolls[0].fail("gloo: reset")
    assert time.monotonic() - start < GRACE / 2, "nobody is silent, so nobody is waited for"
    assert verdict == (
        "rank 0 (data 0 of 3) in round 4: gloo: reset; no peer is missing. "
        "Look for errors of the network, or raise the timeout"
    )
    until(lambda: rolls[1].broken and rolls[2].broken)
    assert {roll.broken for roll in rolls} == {verdict}
    assert rolls[1].fail("something else") == verdict
    for roll in rolls:
        roll.close()


def test_one_that_gives_up_is_heard_by_those_who_wait_for_nothing() -> None:
    _, rolls = roll_calls(3)
    rolls[2].note(1, inside=False)
    rolls[2].give_up("bad shard")
    rolls[2].give_up("and more")
    until(lambda: rolls[0].broken and rolls[1].broken)
    assert rolls[0].broken == "rank 4 (data 2 of 3) gave up after round 1: bad shard"
    for roll in rolls:
        roll.close()


def test_one_that_closed_in_good_order_is_not_silent() -> None:
    _, rolls = roll_calls(3)
    rolls[1].note(3, inside=False)
    rolls[1].close()
    rolls[1].close()
    rolls[0].note(4, inside=True)
    assert (
        rolls[0].fail("gloo: closed").startswith("rank 2 (data 1 of 3) ended or closed its peers after round 3; rank 0")
    )
    for roll in rolls:
        roll.close()


def test_closing_in_the_middle_of_a_round_is_giving_up() -> None:
    _, rolls = roll_calls(2)
    rolls[0].note(5, inside=True)
    rolls[0].close()
    until(lambda: rolls[1].broken)
    assert rolls[1].broken.startswith(
        "rank 0 (data 0 of 3) gave up in round 5: ended or closed its peers in the middle"
    )
    rolls[1].close()


def test_who_does_not_come_is_named() -> None:
    roll = PeerMonitor(dist.HashStore(), NAMES, 1)
    missing = roll.muster(timedelta(seconds=0.1))
    assert missing == "rank 0 (data 0 of 3), rank 4 (data 2 of 3) did not come within 0.1 s"
    roll.close()


def test_what_strangers_set_blames_nobody_and_ends_no_thread() -> None:
    """Verdicts, garbage in the place of a heartbeat, and an old heartbeat once more."""
    store = dist.HashStore()
    rolls = [PeerMonitor(KeyedStore(store, "watch", b"secret", strict=False), NAMES[:2], i) for i in range(2)]
    open_part = dist.PrefixStore("watch", store)
    first = threading.Thread(target=rolls[0].muster, args=(timedelta(seconds=5),))
    first.start()
    assert rolls[1].muster(timedelta(seconds=5)) == ""
    first.join(10)
    old = open_part.get("beat/1")
    for roll in rolls:
        roll.look(judge=True)
    open_part.set("verdict", "rank 2 is to blame")
    open_part.set("failure", "rank 2 has failed")
    strangers = [b"", b"nonsense", b"\xff" * 100, b"[1]", b"{}", b'{"waiting": 3}', b"0" * 64 + b"{}", b"[" * 9999, old]
    for stranger in strangers:
        open_part.set("beat/1", stranger)  # type: ignore[arg-type]  # bytes too
        rolls[0]._asked.set()
        time.sleep(0.02)
    assert [roll.broken for roll in rolls] == ["", ""]
    assert [roll.verdict for roll in rolls if "rank 2 is to blame" in roll.verdict] == []
    assert all(roll.alive for roll in rolls)
    for roll in rolls:
        roll.look(judge=False)
    assert rolls[0].fail("gloo: reset").startswith("rank 0 (data 0 of 3) in round 0: gloo: reset; no peer is missing")
    for roll in rolls:
        roll.close()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"7",
        b"[" * 99_999,
        b"\xff\xfe",
        b'{"waiting": null}',
        RankStatus().encode().replace('"step": 0', '"step": "0"').encode(),
        RankStatus().encode().replace('"idle": 0.0', '"idle": []').encode(),
        RankStatus().encode().replace('"waiting": null', '"waiting": [1, 2]').encode(),
        RankStatus().encode().replace('"process": {', '"process": {"more": 1, ').encode(),
        RankStatus().encode().replace('"doing": "starting"', '"doing": null').encode(),
    ],
)
def test_what_is_no_heartbeat_is_read_as_none(text: bytes) -> None:
    assert RankStatus.decode(text) is None


class Gone(dist.HashStore):
    """A store whose host can go."""

    gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise dist.DistNetworkError("Broken pipe")
        return super().check(keys)


def test_a_store_that_is_gone_is_said_when_something_fails_and_not_before() -> None:
    store = Gone()
    roll = PeerMonitor(store, NAMES[:1], 0)
    assert roll.muster(timedelta(seconds=1)) == ""
    store.gone = True
    until(lambda: not roll._thread.is_alive())
    assert roll.broken == ""
    assert roll.fail("gloo: closed") == (
        "the job's store is gone (rank 0 hosts it, unless torchrun does; Broken pipe), so nobody can say who failed; "
        "rank 0 (data 0 of 3): gloo: closed"
    )

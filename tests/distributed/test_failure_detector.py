"""Who is blamed, without any process: the silent before those who speak, and nobody for failing after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from tensor3d.distributed.failure_detector import GRACE, FailureReport, MembershipMonitor, MemberStatus, judge

NAMES = [f"rank {2 * i} (data {i} of 3)" for i in range(3)]
HERE = MemberStatus(round=12, inside=True, answered=True)
BROKEN = FailureReport(by=0, round=12, reason="gloo: connection closed")
LATE = FailureReport(by=0, round=12, reason="it did not end within 5 s", late=True)


@pytest.mark.parametrize(
    ("third", "alarm", "verdict"),
    [
        (
            MemberStatus(round=12, inside=True),
            BROKEN,
            "rank 4 (data 2 of 3) does not answer (dead or stopped), last seen in round 12; "
            "rank 0 (data 0 of 3) in round 12: gloo: connection closed",
        ),
        (
            MemberStatus(),
            LATE,
            "rank 4 (data 2 of 3) does not answer (dead or stopped), last seen before round 1; rank 0",
        ),
        (
            MemberStatus(round=11, left="gave up", message="bad shard", answered=True),
            BROKEN,
            "rank 4 (data 2 of 3) gave up after round 11: bad shard",
        ),
        (
            MemberStatus(round=11, left="closed", answered=True),
            BROKEN,
            "rank 4 (data 2 of 3) ended or closed its peers after round 11; rank 0 (data 0 of 3) in round 12",
        ),
        (
            MemberStatus(round=11, answered=True),
            LATE,
            "rank 4 (data 2 of 3) is alive but did not come to round 12, last seen after round 11; rank 0",
        ),
        # Busy elsewhere is no fault where something broke.
        (
            MemberStatus(round=11, answered=True),
            BROKEN,
            "rank 0 (data 0 of 3) in round 12: gloo: connection closed; no peer",
        ),
        # Left in good order after the round that is at stake.
        (MemberStatus(round=12, left="closed", answered=True), BROKEN, "rank 0 (data 0 of 3) in round 12: gloo: "),
        (
            HERE,
            LATE,
            "rank 0 (data 0 of 3) in round 12: it did not end within 5 s; no peer is missing. Look for errors",
        ),
    ],
)
def test_the_one_at_fault_is_named(third: MemberStatus, alarm: FailureReport, verdict: str) -> None:
    sentence = judge(NAMES, [HERE, HERE, third], alarm)
    assert sentence.startswith(verdict)
    assert "rank 2" not in sentence


def test_silence_weighs_more_than_a_message() -> None:
    left = MemberStatus(round=12, left="gave up", message="all_reduce failed", answered=True)
    sentence = judge(NAMES, [HERE, left, MemberStatus(round=7, inside=True)], BROKEN)
    assert sentence == (
        "rank 4 (data 2 of 3) does not answer (dead or stopped), last seen in round 7; "
        "rank 2 (data 1 of 3) gave up after round 12: all_reduce failed"
    )


def test_of_many_some_are_named() -> None:
    names = [f"rank {i}" for i in range(100)]
    sentence = judge(names, [HERE] + [MemberStatus(round=3)] * 99, BROKEN)
    assert sentence.count("last seen after round 3") == 8
    assert " and 91 more; rank 0 in round 12" in sentence


# Roll calls of threads, over a store in memory.


def roll_calls(members: int) -> tuple[dist.HashStore, list[MembershipMonitor]]:
    store = dist.HashStore()
    rolls = [MembershipMonitor(store, NAMES[:members], index) for index in range(members)]
    threads = [threading.Thread(target=roll.muster, args=(timedelta(seconds=5),)) for roll in rolls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return store, rolls


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
    until(lambda: rolls[1].verdict and rolls[2].verdict)
    assert {roll.verdict for roll in rolls} == {verdict}
    assert rolls[1].fail("something else") == verdict
    for roll in rolls:
        roll.close()


def test_one_that_gives_up_is_heard_by_those_who_wait_for_nothing() -> None:
    _, rolls = roll_calls(3)
    rolls[2].note(1, inside=False)
    rolls[2].give_up("bad shard")
    rolls[2].give_up("and more")
    until(lambda: rolls[0].verdict and rolls[1].verdict)
    assert rolls[0].verdict == "rank 4 (data 2 of 3) gave up after round 1: bad shard"


def test_one_that_closed_in_good_order_is_not_silent() -> None:
    _, rolls = roll_calls(3)
    rolls[1].note(3, inside=False)
    rolls[1].close()
    rolls[1].close()
    rolls[0].note(4, inside=True)
    assert (
        rolls[0].fail("gloo: closed").startswith("rank 2 (data 1 of 3) ended or closed its peers after round 3; rank 0")
    )


def test_closing_in_the_middle_of_a_round_is_giving_up() -> None:
    _, rolls = roll_calls(2)
    rolls[0].note(5, inside=True)
    rolls[0].close()
    until(lambda: rolls[1].verdict)
    assert rolls[1].verdict.startswith(
        "rank 0 (data 0 of 3) gave up in round 5: ended or closed its peers in the middle"
    )


def test_who_does_not_come_is_named() -> None:
    roll = MembershipMonitor(dist.HashStore(), NAMES, 1)
    missing = roll.muster(timedelta(seconds=0.1))
    assert missing == "rank 0 (data 0 of 3), rank 4 (data 2 of 3) did not come within 0.1 s"
    roll.close()


class Gone(dist.HashStore):
    """A store whose host can go."""

    gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise dist.DistNetworkError("Broken pipe")
        return super().check(keys)


def test_a_store_that_is_gone_is_said_when_something_fails_and_not_before() -> None:
    store = Gone()
    roll = MembershipMonitor(store, NAMES[:1], 0)
    assert roll.muster(timedelta(seconds=1)) == ""
    store.gone = True
    until(lambda: not roll._thread.is_alive())
    assert roll.verdict == ""
    assert roll.fail("gloo: closed") == (
        "the job's store is gone (rank 0 hosts it, unless torchrun does; Broken pipe), so nobody can say who failed; "
        "rank 0 (data 0 of 3): gloo: closed"
    )

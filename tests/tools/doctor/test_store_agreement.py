"""Rounds over a store in which strangers set what they like: they end in time, and by name."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tensor3d.distributed.job_store import KeyedStore
from tools.doctor import store_agreement
from tools.doctor.rules import Finding, MemberNames, NotReadyError
from tools.doctor.store_agreement import MEETING, RoundResult, StoreRounds

SECRET = b"of this job"
KEYS = [f"{round}/{which}" for round in (MEETING, "versions") for which in (0, 1, "verdict")] + ["left/1", "told"]


@pytest.fixture(autouse=True)
def _short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_agreement, "_FAREWELL", 0.05)


class Harm:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return exec, ("raise SystemExit('a stranger is obeyed')",)


def board(store: dist.Store, member: int, told: list[str]) -> StoreRounds:
    def say(findings: Sequence[Finding]) -> None:
        told.extend(finding.text for finding in findings)

    return StoreRounds(store, names=MemberNames(kind="node"), member=member, members=2, wait=0.1, say=say)


def outcome(store: dist.Store, member: int, versions: str = "1") -> str:
    """Of a member that goes through both rounds: what it learns, or the sentence that it ends with."""
    told: list[str] = []
    rounds = board(store, member, told)

    def judge(reports: list[Any]) -> RoundResult:
        findings = [Finding(text="versions differ", about=(1,))] if len(set(reports)) > 1 else []
        return RoundResult(findings=findings, data=reports)

    try:
        rounds.meet(f"host{member}")
        return f"ready: {rounds.decide('versions', versions, judge)}"
    except NotReadyError as error:
        return error.findings[0].text
    finally:
        rounds.leave(host=member == 0)


def roll(raw: dist.Store, *versions: str) -> list[str]:
    with ThreadPoolExecutor() as pool:
        members = [
            pool.submit(outcome, KeyedStore(raw, "part", SECRET), member, each) for member, each in enumerate(versions)
        ]
        return [member.result(timeout=60) for member in members]


@pytest.mark.parametrize("former", [("1", "1"), ("1", "2")], ids=["good", "bad"])
@pytest.mark.parametrize("replayed", [*([key] for key in KEYS), KEYS], ids=lambda keys: "+".join(keys[:2]))
def test_what_was_recorded_of_another_roll_with_the_same_secret_ends_or_changes_nothing(
    former: tuple[str, str], replayed: list[str]
) -> None:
    recorded, raw = dist.HashStore(), dist.HashStore()
    roll(recorded, *former)
    for key in (f"part/{key}" for key in replayed):
        if recorded.check([key]):
            raw.set(key, recorded.get(key))  # type: ignore[arg-type]  # bytes too
    known = {"ready: ['1', '1']", "ready: ['1', '2']", "versions differ"}
    assert set(roll(raw, "1", "1")) <= known


NONSENSE = [b"", b"[" * 100_000, b"{}", b"[]", b"7", b"\xff", pickle.dumps(Harm()), b'{"findings": [{}], "data": 1}']


@pytest.mark.parametrize("value", NONSENSE, ids=range(len(NONSENSE)))
@pytest.mark.parametrize("member", [0, 1])
def test_nonsense_in_the_place_of_what_others_tell_is_no_news(member: int, value: bytes) -> None:
    """Without a secret it is read, and ends the roll by name where it cannot be meant."""
    raw = dist.HashStore()
    foreign = [f"{MEETING}/1"] if member == 0 else [f"{MEETING}/0", f"{MEETING}/verdict"]
    for key in foreign:
        raw.set(f"part/{key}", value)  # type: ignore[arg-type]  # bytes too
    said = outcome(KeyedStore(raw, "part", b""), member)
    assert "holds under meeting/" in said or "did not come to the check of versions within" in said
    told: list[str] = []
    sealed = board(KeyedStore(raw, "part", SECRET), 0, told)
    with pytest.raises(NotReadyError, match="node 1 did not come within"):
        sealed.meet("host0")


@pytest.mark.parametrize("value", ['{"a": 1}', "[]", "[[1]]"])
def test_a_report_of_another_shape_ends_a_round_by_name(value: str) -> None:
    raw = dist.HashStore()
    for key, text in ((f"{MEETING}/1", '"host1"'), ("versions/1", value)):
        raw.set(f"part/{key}", text)
    assert re.search(r"holds under versions/ what no process.*unhashable", outcome(KeyedStore(raw, "part", b""), 0))


def test_a_value_that_is_another_one_when_it_is_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = dist.HashStore()
    monkeypatch.setattr(KeyedStore, "check", lambda *_: True)
    for member, key in enumerate((f"{MEETING}/1", f"{MEETING}/verdict")):
        raw.set(f"part/{key}", "a stranger's")
        assert f"holds under {key} what no process" in outcome(KeyedStore(raw, "part", SECRET), member)
